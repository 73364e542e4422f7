"""The neighbours of a plan, which differ from it in one or two changes, and a quick bound on their speed."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import accumulate, permutations

import jpipe
from jpipe.plan import repeats_forward
from jpipe.schedules import PlainShape
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.search.candidate import USUAL, Asked, Candidate

MOST_EXTRA = 4  # additional microbatches in flight


def neighbours(candidate: Candidate, profile: Profile) -> Iterator[Candidate]:
    """Yield the plans that differ from a plan in one cut, in the stage of one replica, or in the number of microbatches in flight.

    Cuts move by 1, 2, 4, ... layers. Where a replica moves to the next stage, the cut between both moves, too, so that they compute for
    about as long. Only schedules without a flush get different numbers of replicas.

    Args:
        candidate: a plan of one stage on each rank, with whole backwards.
        profile: the profile of its layers.
    """
    rules, ends = jpipe.schedules.SCHEDULES[candidate.schedule], (*candidate.starts[1:], len(profile.ids))
    for s in range(1, candidate.depth):
        start, reach = candidate.starts[s], max(candidate.starts[s] - candidate.starts[s - 1], ends[s] - candidate.starts[s])
        for step in (sign << power for power in range(reach.bit_length()) for sign in (1, -1)):
            if candidate.starts[s - 1] < start + step < ends[s]:
                yield _with_cut(candidate, s, start + step)
    if "extra_in_flight" in rules.options and candidate.depth > 1 and candidate.options.max_in_flight is None:
        for extra in (candidate.options.extra_in_flight + more for more in (-2, -1, 1, 2)):
            if 0 <= extra <= MOST_EXTRA:
                yield candidate.with_options(extra_in_flight=extra)
    if (
        not rules.flushes
        and candidate.options.update_every == "batch"
        and candidate.keep_together == "replicas"
        and candidate.agree is None
    ):
        work = [0.0, *accumulate(cost.forward + cost.backward for cost in profile.costs(candidate.rows).values())]
        for source, target in permutations(range(candidate.depth), 2):
            replicas = [count - (s == source) + (s == target) for s, count in enumerate(candidate.replicas)]
            if replicas[source] and not any(candidate.microbatches % count for count in replicas):
                moved = dataclasses.replace(candidate, replicas=tuple(replicas))
                yield moved
                if abs(source - target) == 1:
                    yield _balanced(moved, max(source, target), work)


def pairs(candidate: Candidate, profile: Profile) -> Iterator[Candidate]:
    """Yield the neighbours of neighbours that are none themselves."""
    near = {_changed(one): one for one in neighbours(candidate, profile)}
    seen = {_changed(candidate), *near}
    for further in itertools.chain.from_iterable(neighbours(one, profile) for one in near.values()):
        if (changed := _changed(further)) not in seen:
            seen.add(changed)
            yield further


def recut(candidate: Candidate, profile: Profile) -> Iterator[Candidate]:
    """Yield the plans that differ in one cut, wherever it may be, and in any number of microbatches in flight."""
    rules, ends = jpipe.schedules.SCHEDULES[candidate.schedule], (*candidate.starts[1:], len(profile.ids))
    varies = "extra_in_flight" in rules.options and candidate.options.max_in_flight is None
    for extra in range(MOST_EXTRA + 1) if varies else (candidate.options.extra_in_flight,):
        more = candidate.with_options(extra_in_flight=extra)
        for s in range(1, candidate.depth):
            yield from (_with_cut(more, s, start) for start in range(candidate.starts[s - 1] + 1, ends[s]))


def _changed(candidate: Candidate) -> tuple[object, ...]:
    """Return what differs between neighbours."""
    return candidate.starts, candidate.replicas, candidate.options.extra_in_flight


def _with_cut(candidate: Candidate, s: int, start: int) -> Candidate:
    """Return the candidate whose stage s begins with another layer."""
    return dataclasses.replace(candidate, starts=(*candidate.starts[:s], start, *candidate.starts[s + 1 :]))


def _balanced(candidate: Candidate, s: int, work: Sequence[float]) -> Candidate:
    """Return the candidate with the cut before stage s that balances the work for each replica of both stages.

    Args:
        candidate: the plan.
        s: the stage.
        work: the work of all layers before each layer.
    """
    first, end = candidate.starts[s - 1], (*candidate.starts, len(work) - 1)[s + 1]
    before, after = candidate.replicas[s - 1 : s + 1]
    cuts = range(first + 1, end)
    return _with_cut(candidate, s, min(cuts, key=lambda cut: max((work[cut] - work[first]) / before, (work[end] - work[cut]) / after)))


class QuickBound:
    """A lower bound on the seconds of a batch, for plans of one microbatch size. It takes much less time than the bounds of a plan.

    It counts for each device its computations and what it sends over the fastest links, and without a flush how many microbatches are in
    flight.
    """

    def __init__(self, profile: Profile, topology: Topology, rows: int, asked: Asked = USUAL) -> None:
        costs, slowness = list(profile.costs(rows).values()), float(topology.slowness.min())  # that of the fastest device
        self._dispatch, self._count = 2 * profile.dispatch * slowness, len(costs)
        self._forward = [0.0, *accumulate(slowness * cost.forward for cost in costs)]
        self._both = [0.0, *accumulate(slowness * (cost.forward + cost.backward) for cost in costs)]
        self._summed = [0, *accumulate(cost.summed for cost in costs)]
        self._outputs = asked.message_bytes([cost.outputs for cost in costs])
        self._ways = 1 if any(cost.frozen for cost in costs) else 2  # before frozen layers there may be no gradients
        others = [bandwidth for one in topology.differing for bandwidth in one.bandwidth.values()]
        self._bandwidth = max([level.bandwidth for level in topology.levels] + others)
        self._latency = min(level.latency for level in topology.levels)
        self._stage = cache(self._costs)

    def seconds(self, candidate: Candidate) -> float:
        """Return the bound for a candidate."""
        flushes, ends = jpipe.schedules.SCHEDULES[candidate.schedule].flushes, (*candidate.starts[1:], self._count)
        stages = [self._stage(*stage) for stage in zip(candidate.starts, ends, candidate.policies, strict=True)]
        longest = before = 0.0
        for (work, sending, summing), replicas in zip(stages, candidate.replicas, strict=True):
            each = candidate.microbatches / replicas
            summed = 2 * (replicas - 1) / replicas * summing if candidate.agree is None else 0.0
            longest = max(longest, before + each * work, each * sending + summed)
            before += work if flushes else 0.0
        return longest if flushes else max(longest, self._in_flight(candidate, [work for work, _, _ in stages]))

    def _costs(self, start: int, end: int, policy: str) -> tuple[float, float, float]:
        """Return the seconds that a stage computes and sends for a microbatch, and in which its gradients are sent once."""
        again = self._forward[end] - self._forward[start] if repeats_forward(policy) else 0.0
        work = self._both[end] - self._both[start] + again + self._dispatch
        sent = (self._outputs[end - 1] if end < self._count else 0) + (self._ways - 1) * (self._outputs[start - 1] if start else 0)
        return work, sent / self._bandwidth, (self._summed[end] - self._summed[start]) / self._bandwidth

    def _in_flight(self, candidate: Candidate, works: Sequence[float]) -> float:
        """Return the bound of how many microbatches are in flight: each goes from a stage to the last one and back."""
        under_way, longest, trip = _under_way(candidate.shape), 0.0, 0.0
        for s in reversed(range(candidate.depth)):
            if s < candidate.depth - 1:
                trip += 2 * self._latency + self._ways * self._outputs[candidate.starts[s + 1] - 1] / self._bandwidth
            trip += works[s]
            longest = max(longest, candidate.microbatches / under_way[s] * trip)
        return longest


@lru_cache(maxsize=4096)
def _under_way(shape: PlainShape) -> tuple[int, ...]:
    """Return how many microbatches are in flight at each stage, over all its replicas."""
    rules = jpipe.schedules.SCHEDULES[shape.schedule]
    return tuple(rules.in_flight(shape, s) * replicas for s, replicas in enumerate(shape.replicas))
