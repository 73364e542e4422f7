"""Pipelines of a plan that do the same, of which a few are simulated for all.

If g divides the numbers of replicas of all stages, a plan consists of g pipelines: a worker passes microbatches on only to workers of other
stages whose replica leaves the same remainder modulo g. The pipelines have in common the sums of gradients, and ports. Where neighbouring
ones share ports, groups of them do the same. Messages and sums take their ports in the order of time, so all groups do the same at the same
times, and one of them is a plan of its own, whose sums take as long as those over all replicas.
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

import jpipe
from jpipe_planner.cost.devices import network
from jpipe_planner.machine.topology import Level, Topology


class Part(NamedTuple):
    """What is simulated of a plan: some of its pipelines, or all.

    Attributes:
        plan: the pipelines as a plan, with as many microbatches as they have in a batch of the whole plan.
        link: the link between any two of its ranks; between replicas one over which sums take as long as over all replicas.
        pipelines: the number of pipelines of the whole plan.
        simulated: the number of pipelines of `plan`, the first ones.
        executed: the number of those whose instructions are simulated. A sum takes two replicas, of which the second one does the same as
            the first at the same times.
    """

    plan: jpipe.Plan
    link: jpipe.programs.Network
    pipelines: int = 1
    simulated: int = 1
    executed: int = 1

    @property
    def workers(self) -> frozenset[int] | None:
        """The workers whose instructions are simulated; None: all of them."""
        if self.executed == self.simulated:
            return None
        return frozenset(w for w, (_, replica) in enumerate(self.plan.workers) if replica % self.simulated < self.executed)

    def ranks(self) -> list[int]:
        """Return for each rank of the whole plan the one that is simulated for it."""
        ranks, first = list[int](), 0
        for stages in self.plan.pipeline_ranks:
            count = self.plan.replicas[stages[0]]
            for begin in range(first, first + count, self.simulated):
                alike = range(begin, begin + self.executed)
                ranks += [*itertools.islice(itertools.cycle(alike), self.pipelines)]
            first += count
        return ranks


class _Layout(NamedTuple):
    """The ranks that are simulated of plans with the same replicas and placement.

    Attributes:
        simulated: the number of pipelines.
        executed: the number of those whose instructions are simulated.
        devices: the device of each rank.
        rings: for each pipeline rank what joins neighbouring replicas.
    """

    simulated: int
    executed: int
    devices: tuple[int, ...]
    rings: tuple[jpipe.Link, ...]


def part_of(plan: jpipe.Plan, topology: Topology, waits: bool) -> Part:
    """Return what is to be simulated of a plan.

    Args:
        plan: the plan.
        topology: the devices and links.
        waits: whether updates wait for other stages, as for the norm of all gradients and for those of shared parameters; then all
            pipelines are simulated.
    """
    count = math.gcd(*plan.replicas)
    differs = topology.differing or topology.cores is not None or plan.placement is not None
    sums_otherwise = plan.shard_optimizer or plan.agree is not None or (plan.links is not None and plan.links.sums is not None)
    # Between stages with different replicas, pipelines stop for a sum in parts at different times.
    blocks = topology.device.overlap != "transfers and sums" and len(set(plan.replicas)) > 1
    sums_otherwise |= blocks and any(stage.sum_parts for stage in plan.stages)
    if count == 1 or waits or sums_otherwise or differs or plan.offload is not None:
        return Part(plan, network(plan, topology))
    layout = _layout(plan.replicas, tuple(map(tuple, plan.pipeline_ranks)), plan.keep_together == "replicas", topology.levels)
    if layout is None:
        return Part(plan, network(plan, topology))
    stages = [stage.model_copy(update={"replicas": stage.replicas * layout.simulated // count}) for stage in plan.stages]
    microbatches = plan.microbatches * layout.simulated // count
    some = plan.model_copy(update={"stages": tuple(stages), "microbatches": microbatches, "predicted": None})
    pipeline_ranks = [p for p, _ in some.rank_positions]

    def link(source: int, target: int) -> jpipe.Link:
        if pipeline_ranks[source] == pipeline_ranks[target]:
            return layout.rings[pipeline_ranks[source]]
        return topology.link(layout.devices[source], layout.devices[target])

    return Part(some, cache(link), count, layout.simulated, layout.executed)


@lru_cache(maxsize=1024)
def _layout(
    replicas: tuple[int, ...], pipeline_ranks: tuple[tuple[int, ...], ...], keeps_replicas: bool, levels: tuple[Level, ...]
) -> _Layout | None:
    """Return the ranks of the smallest number of neighbouring pipelines that do the same as others; None if those are all.

    Of each group of them, the messages take ports of their own, over links alike, and the same sums use these ports.
    """
    topology, count, of_ranks = Topology(levels=levels), math.gcd(*replicas), [replicas[stages[0]] for stages in pipeline_ranks]
    positions = np.array([(p, replica) for p, others in enumerate(of_ranks) for replica in range(others)])
    numbers = np.argsort(np.lexsort(positions.T[::-1] if keeps_replicas else positions.T))
    devices = np.split(numbers, np.cumsum(of_ranks)[:-1])  # of the replicas of each pipeline rank
    rings = [_crossed(topology, of_rank, np.roll(of_rank, 1)) for of_rank in devices]
    sums, last = np.zeros(2 * len(levels) * topology.num_devices, int), 0  # by port, a number for the ranks whose sums use it; 0: none
    for _, ports in rings:
        used_by_ring = np.unique(ports)
        known, places = np.unique(sums[used_by_ring], return_inverse=True)
        sums[used_by_ring] = last + 1 + places
        last += len(known)
    crossed, ports = _messages(replicas, {s: p for p, stages in enumerate(pipeline_ranks) for s in stages}, devices, topology)
    size = next(size for size in range(1, count + 1) if count % size == 0 and _are_alike(crossed, ports, sums[ports], count // size))
    simulated = size if min(replicas) * size > count else 2 * size  # a sum takes two replicas
    if simulated >= count:
        return None
    used, chosen = np.zeros(len(sums), bool), np.arange(max(of_ranks)) % count < simulated
    used[ports[:simulated]] = True
    of_chosen = [number for of_rank in devices for number in of_rank[chosen[: len(of_rank)]].tolist()]
    names = [_names_of(np.unique(ring), used, sums, topology) for _, ring in rings]
    counts = [others * simulated // count for others in of_ranks]
    links = (_shortened(levels, ring, others, ports) for ring, others, ports in zip(rings, counts, names, strict=True))
    return _Layout(simulated, size, tuple(of_chosen), tuple(links))


def _crossed(topology: Topology, source: Any, target: Any) -> tuple[Any, Any]:
    """Return the levels that messages between devices cross, and the numbers of their two ports, which are those of `Topology.link`."""
    levels = sum((source // size != target // size) * 1 for size in topology.sizes)
    inside = np.array([1, *topology.sizes])[levels]
    components = levels * topology.num_devices + np.stack([source // inside, target // inside])
    return levels, 2 * components + [[0], [1]]


def _name(port: int, topology: Topology) -> Hashable:
    """Return the name of a port in `Topology.link`."""
    return ("in" if port % 2 else "out"), *divmod(port // 2, topology.num_devices)


def _names_of(ports: Any, used: Any, sums: Any, topology: Topology) -> list[Hashable]:
    """Return the names of ports: one for all unused ports of which the sums of the same ranks use each."""
    others: list[Hashable] = [("sums", number) for number in np.unique(sums[ports[~used[ports]]]).tolist()]
    return [*(_name(port, topology) for port in ports[used[ports]].tolist()), *others]


def _messages(replicas: tuple[int, ...], rank_of: dict[int, int], devices: Sequence[Any], topology: Topology) -> tuple[Any, Any]:
    """Return for each pipeline the levels and the ports of the messages between its stages, there and back."""
    count = math.gcd(*replicas)
    levels, ports = [np.zeros((count, 0), int)], [np.zeros((count, 0), int)]
    for s, (before, after) in enumerate(itertools.pairwise(replicas)):
        if rank_of[s] != rank_of[s + 1]:
            k = np.arange(math.lcm(before, after))
            ends = devices[rank_of[s]][k % before], devices[rank_of[s + 1]][k % after]
            for source, target in (ends, ends[::-1]):
                crossed, both = _crossed(topology, source, target)
                levels.append(crossed.reshape(-1, count).T)
                ports += [numbers.reshape(-1, count).T for numbers in both]
    return np.hstack(levels), np.hstack(ports)


def _are_alike(levels: Any, ports: Any, sums: Any, groups: int) -> bool:
    """Return whether as many groups of pipelines send the same messages over ports of their own, which the same sums use."""
    ports = ports.reshape(groups, -1)
    alike = [of_groups.reshape(groups, -1) for of_groups in (levels, sums, _first_places(ports))]
    return all((table == table[0]).all() for table in alike) and np.unique(ports).size == groups * np.unique(ports[0]).size


def _first_places(rows: Any) -> Any:
    """Return for each number in a row the place where it comes first in that row."""
    order, places = np.argsort(rows, axis=1, kind="stable"), np.arange(rows.shape[1])
    numbers = np.take_along_axis(rows, order, axis=1)
    begins = np.maximum.accumulate(np.where(np.diff(numbers, axis=1, prepend=-1) != 0, places, 0), axis=1)
    first = np.empty_like(order)
    np.put_along_axis(first, order, np.take_along_axis(order, begins, axis=1), axis=1)
    return first


def _shortened(levels: Sequence[Level], ring: tuple[Any, Any], count: int, ports: Sequence[Hashable]) -> jpipe.Link:
    """Return the link over which a sum over `count` replicas takes as long as that over all of a ring."""
    crossed, replicas = [levels[k] for k in np.unique(ring[0]).tolist()], len(ring[0])
    sent, sent_by_few = (replicas - 1) / replicas, (count - 1) / count  # by each replica, twice this share of the gradients
    bandwidth = min(level.bandwidth for level in crossed) * sent_by_few / sent
    latency = max(level.latency for level in crossed) * (replicas - 1) / (count - 1)
    return jpipe.Link(bandwidth, latency, tuple(dict.fromkeys(ports)))
