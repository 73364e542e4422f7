"""Pipelines of a plan that do the same, of which one, or a group, is simulated for all.

If g divides the numbers of replicas of all stages, a plan consists of g pipelines: a worker passes microbatches on only to workers of other
stages whose replica leaves the same remainder modulo g. The pipelines have in common the sums of gradients, and ports. Where neighbouring
ones share ports, groups of them do the same.
"""

import itertools
import math
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import NamedTuple

import jpipe
from jpipe_planner.machine.topology import Level, Topology

_Message = tuple[float, float, tuple[Hashable, ...]]
"""The bandwidth, the latency and the ports of the link that it takes."""


class Copies(NamedTuple):
    """The pipelines of a plan, in groups that do the same.

    Attributes:
        pipelines: the number of pipelines.
        group: the number of neighbouring pipelines that are a group.
    """

    pipelines: int = 1
    group: int = 1

    @property
    def share(self) -> float:
        """The share of the pipelines that is simulated."""
        return self.group / self.pipelines

    def workers(self, plan: jpipe.Plan) -> frozenset[int] | None:
        """Return the workers of the first group, which are simulated; None: all."""
        if self.group == self.pipelines:
            return None
        return frozenset(w for w, (_, replica) in enumerate(plan.workers) if replica % self.pipelines < self.group)

    def ranks(self, plan: jpipe.Plan) -> list[int]:
        """Return for each rank the one that is simulated for it."""
        numbers = {place: rank for rank, place in enumerate(plan.rank_positions)}
        pipelines = [(p, replica, replica % self.pipelines) for p, replica in plan.rank_positions]
        return [numbers[p, replica - pipeline + pipeline % self.group] for p, replica, pipeline in pipelines]


ALL = Copies()
"""All pipelines are simulated."""


def copies_of(plan: jpipe.Plan, topology: Topology, waits: bool) -> Copies:
    """Return the pipelines of a plan, with groups that do the same on a topology.

    Args:
        plan: the plan.
        topology: the devices and links.
        waits: whether updates wait for other stages, as for the norm of all gradients and for those of shared parameters; then only all
            pipelines together are a group.
    """
    count = math.gcd(*plan.replicas)
    if count == 1 or waits or plan.shard_optimizer or topology.differing or topology.cores is not None:
        return Copies(count, count)
    return Copies(count, _group(plan.replicas, tuple(map(tuple, plan.pipeline_ranks)), plan.keep_together == "replicas", topology.levels))


@lru_cache(maxsize=1024)
def _group(replicas: tuple[int, ...], pipeline_ranks: tuple[tuple[int, ...], ...], keeps_replicas: bool, levels: tuple[Level, ...]) -> int:
    """Return the smallest number of neighbouring pipelines of which all groups have links alike, and ports of their own for messages."""
    topology, count = Topology(levels=levels), math.gcd(*replicas)
    places = [(p, replica) for p, stages in enumerate(pipeline_ranks) for replica in range(replicas[stages[0]])]
    devices = {place: n for n, place in enumerate(sorted(places, key=lambda place: place if keeps_replicas else place[::-1]))}
    rank_of = {s: p for p, stages in enumerate(pipeline_ranks) for s in stages}
    summing: dict[Hashable, list[int]] = {}  # the pipeline ranks whose sums go through a port
    for p, replica in places:
        others = replicas[pipeline_ranks[p][0]]
        for port in topology.link(devices[p, replica], devices[p, (replica - 1) % others]).ports if others > 1 else ():
            summing.setdefault(port, []).append(p)
    messages: list[list[_Message]] = [[] for _ in range(count)]
    for s, (before, after) in enumerate(itertools.pairwise(replicas)):
        for k in range(math.lcm(before, after)) if rank_of[s] != rank_of[s + 1] else ():
            ends = devices[rank_of[s], k % before], devices[rank_of[s + 1], k % after]
            links = topology.link(*ends), topology.link(*ends[::-1])
            messages[k % count] += [(link.bandwidth, link.latency, tuple(link.ports)) for link in links]
    summing_once: dict[Hashable, tuple[int, ...]] = {port: tuple(sorted(set(ranks))) for port, ranks in summing.items()}
    return next(size for size in range(1, count + 1) if count % size == 0 and _are_alike(messages, summing_once, size))


def _are_alike(messages: Sequence[Sequence[_Message]], summing: dict[Hashable, tuple[int, ...]], size: int) -> bool:
    """Return whether all groups of `size` pipelines send the same messages over ports of their own, which the same sums use."""
    first, seen = None, set[Hashable]()
    for begin in range(0, len(messages), size):
        numbers: dict[Hashable, int] = {}
        alike = [
            (bandwidth, latency, [(numbers.setdefault(port, len(numbers)), summing.get(port)) for port in ports])
            for pipeline in messages[begin : begin + size]
            for bandwidth, latency, ports in pipeline
        ]
        if not seen.isdisjoint(numbers) or (first is not None and alike != first):
            return False
        first = alike
        seen.update(numbers)
    return True
