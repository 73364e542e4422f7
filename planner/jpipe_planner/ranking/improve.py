"""Improve the best plans of a ranking step by step, judged by simulation.

The searches find cuts and replicas that are best by closed forms, which ignore how messages and sums wait. Of plans that are nearly equal
by them, a simulation may prefer another one. So the neighbours of the best plans are tried: plans with a cut moved, with a replica moved
from one stage to another, with another number of microbatches in flight, or with sums in parts.
"""

import dataclasses
import heapq
from collections.abc import Iterator, Sequence
from itertools import accumulate, permutations

import jpipe
from jpipe import InputError
from jpipe_planner.cost.bound import busy_seconds, has_bounds, port_seconds, unhindered_seconds
from jpipe_planner.cost.simulated import MOST_FORWARDS, forwards, network, simulate_plan, window
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.ranking.choose import Choice, Ranked
from jpipe_planner.ranking.sum_parts import with_sum_parts
from jpipe_planner.ranking.variants import priced
from jpipe_planner.search.candidate import Candidate

GAIN = 0.002  # relative gain of a step: smaller ones are not worth a simulation
EQUAL = 1e-6  # relative difference of plans that are equally fast
STARTS = 3  # plans of different kinds that are improved
MOST_EXTRA = 4  # additional microbatches in flight
NEAR = 0.05  # relative amount by which such a plan may be slower than the fastest one
MOST_IN_ALL = 20_000  # forwards of all simulations, with the bounds in forwards: some seconds
_FREE_FORWARDS = 12  # forwards in `unhindered_seconds` that cost as much as one


def improve(choice: Choice, tried: dict[Candidate, Ranked], max_delay: float | None = None) -> Choice:
    """Replace the best plans of a ranking by faster neighbours, until no neighbour is faster by `GAIN` or the simulations take too long.

    Args:
        choice: the ranking.
        tried: the results of simulations; new ones are added.
        max_delay: the largest mean delay of a plan in updates, see `Candidate.delay`; None: any.

    Returns:
        The ranking with the plans that were found. Those of a new kind are added, and others replace the plan of their kind.
    """
    run = _Improvement(choice, tried, max_delay)
    near = [one for one in choice.ranked if one.samples_per_second * (1 + NEAR) >= choice.ranked[0].samples_per_second]
    found = [run.climb(one) for one in near[:STARTS] if one.simulated is not None]
    return choice.with_more(found, run.count)


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
    if "extra_in_flight" in rules.options and candidate.depth > 1:
        for extra in (candidate.extra_in_flight + more for more in (-2, -1, 1, 2)):
            if 0 <= extra <= MOST_EXTRA:
                yield dataclasses.replace(candidate, extra_in_flight=extra)
    if not rules.flushes and candidate.update_every == "batch" and candidate.keep_together == "replicas":
        work = [0.0, *accumulate(cost.forward + cost.backward for cost in profile.costs(candidate.rows).values())]
        for source, target in permutations(range(candidate.depth), 2):
            replicas = [count - (s == source) + (s == target) for s, count in enumerate(candidate.replicas)]
            if replicas[source] and not any(candidate.microbatches % count for count in replicas):
                moved = dataclasses.replace(candidate, replicas=tuple(replicas))
                yield moved
                if abs(source - target) == 1:
                    yield _balanced(moved, max(source, target), work)


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


class _Improvement:
    """The search for faster neighbours, which simulates them while all simulations together take some seconds.

    Attributes:
        count: the number of neighbours that were looked at.
    """

    def __init__(self, choice: Choice, tried: dict[Candidate, Ranked], max_delay: float | None) -> None:
        self.count = 0
        self._choice, self._tried, self._max_delay, self._spent = choice, tried, max_delay, 0
        limit = choice.topology.device.limit
        self._limit = float("inf") if limit is None else limit
        self._seen = {candidate.without_costs for candidate in tried}

    def climb(self, ranked: Ranked) -> Ranked:
        """Return the plan that is reached by steps to faster neighbours."""
        plan = self._choice.plan(ranked)
        if not has_bounds(plan) or forwards(plan) > MOST_IN_ALL:
            return ranked
        while (better := self._step(ranked)) is not None:
            ranked = better
        return ranked

    def _step(self, ranked: Ranked) -> Ranked | None:
        """Return the first faster neighbour in the order of their bounds; None: there is none, or it would take too long."""
        profile, topology = self._choice.meshes.of(ranked.candidate.degrees)
        queue = list[tuple[float, int, Candidate]]()
        near = self._near(ranked.candidate, profile, topology)
        for candidate in _faster_by_work(near, profile, ranked.seconds):
            if candidate.without_costs in self._seen or not candidate.is_within(self._max_delay):
                continue
            enough = _enough(candidate, ranked)
            bound = self._bound(candidate, enough)
            if bound < enough:
                heapq.heappush(queue, (bound, len(queue), candidate))
        while queue and self._spent < MOST_IN_ALL:
            candidate = heapq.heappop(queue)[2]
            plan = candidate.plan(profile.ids)
            costs = profile.stage_costs(plan, candidate.rows)
            self._spent += forwards(plan)
            self._seen.add(candidate.without_costs)
            simulation = simulate_plan(plan, costs, topology, self._choice.global_norm)
            if simulation is None:
                continue
            found = Ranked(priced(candidate, plan, costs, simulation, topology), simulation)
            self._tried[found.candidate] = found
            if found.seconds < _enough(candidate, ranked) and max(found.memory) <= self._limit:
                return found
        return None

    @staticmethod
    def _near(candidate: Candidate, profile: Profile, topology: Topology) -> Iterator[Candidate]:
        """Yield the neighbours of a plan; sums in parts are cut anew, and a plan without them is also tried with them."""
        for near in neighbours(dataclasses.replace(candidate, sum_parts=()), profile):
            yield (with_sum_parts(near, profile, topology) or near) if candidate.sum_parts else near
        if not candidate.sum_parts and (in_parts := with_sum_parts(candidate, profile, topology)) is not None:
            yield in_parts

    def _bound(self, candidate: Candidate, enough: float) -> float:
        """Return the largest of the bounds on the seconds of a batch, cheapest first, up to the first one that is too large."""
        profile, topology = self._choice.meshes.of(candidate.degrees)
        try:
            plan = candidate.plan(profile.ids)
        except InputError:  # too few microbatches for the schedule
            return float("inf")
        self.count += 1
        costs, link = profile.stage_costs(plan, candidate.rows), network(plan, topology)
        bound = max(busy_seconds(plan, costs, topology.cores, link, topology.device.overlap), port_seconds(plan, costs, link))
        if bound < enough and self._spent < MOST_IN_ALL and forwards(plan) <= MOST_FORWARDS:
            self._spent += forwards(plan) // _FREE_FORWARDS
            bound = max(bound, unhindered_seconds(plan, costs, link, *window(plan)))
        return bound


def _enough(candidate: Candidate, ranked: Ranked) -> float:
    """Return the seconds below which a neighbour is better: with fewer microbatches in flight it only has to be as fast."""
    return ranked.seconds * (1 + EQUAL if candidate.extra_in_flight < ranked.candidate.extra_in_flight else 1 - GAIN)


def _faster_by_work(candidates: Iterator[Candidate], profile: Profile, enough: float) -> Iterator[Candidate]:
    """Yield the candidates of which no worker computes for longer than that in a batch. It takes much less time than a plan's bounds."""
    works: dict[int, tuple[list[float], list[float]]] = {}
    for candidate in candidates:
        if candidate.rows not in works:
            costs = profile.costs(candidate.rows).values()
            forward = [0.0, *accumulate(cost.forward for cost in costs)]
            works[candidate.rows] = forward, [0.0, *accumulate(cost.forward + cost.backward for cost in costs)]
        forward, both = works[candidate.rows]
        ends = (*candidate.starts[1:], len(profile.ids))
        for start, end, replicas, policy in zip(candidate.starts, ends, candidate.replicas, candidate.policies, strict=True):
            recomputation = 0.0 if policy == "none" else forward[end] - forward[start]
            if candidate.microbatches / replicas * (both[end] - both[start] + recomputation + 2 * profile.dispatch) > enough * (1 + EQUAL):
                break
        else:
            yield candidate
