"""Improve the best plans of a ranking step by step, judged by simulation.

The searches find cuts and replicas that are best by closed forms, which ignore how messages and sums wait. Of plans that are nearly equal
by them, a simulation may prefer another one. So the neighbours of the best plans are tried: plans with a cut moved, with a replica moved
from one stage to another, with another number of microbatches in flight, or with sums in parts.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable

import jpipe
from jpipe_planner.cost.bound import busy_seconds, has_bounds, port_seconds, unhindered_seconds
from jpipe_planner.cost.copies import Part, part_of
from jpipe_planner.cost.devices import slowed
from jpipe_planner.cost.simulated import MOST_FORWARDS, forwards, simulate_plan, window
from jpipe_planner.machine.topology import Topology
from jpipe_planner.ranking.choose import Choice, Ranked
from jpipe_planner.ranking.loads import least_loaded
from jpipe_planner.ranking.neighbours import QuickBound, neighbours, pairs, recut
from jpipe_planner.ranking.sum_parts import with_sum_parts
from jpipe_planner.ranking.variants import priced
from jpipe_planner.search.candidate import Candidate
from jpipe_planner.search.parallel import EXTRA

GAIN = 0.002  # relative gain of a step: smaller ones are not worth a simulation
EQUAL = 1e-6  # relative difference of plans that are equally fast
MOST_NEAR = 200  # plans with several changes whose bounds are computed
MOST_DEPTHS = 6  # numbers of stages that are tried with stages by load
STARTS = 3  # plans of different kinds that are improved
NEAR = 0.05  # relative amount by which such a plan may be slower than the fastest one
MOST_IN_ALL = 90_000  # forwards of all simulations, with the bounds in forwards: some seconds
MOST_BY_BOUNDS = MOST_IN_ALL // 6  # of them, up to which steps by bounds are made
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


class _Improvement:
    """The search for faster neighbours, which simulates them while all simulations together take some seconds.

    Attributes:
        count: the number of neighbours that were looked at.
    """

    def __init__(self, choice: Choice, tried: dict[Candidate, Ranked], max_delay: float | None) -> None:
        self.count = 0
        self._choice, self._tried, self._max_delay, self._spent = choice, tried, max_delay, 0
        self._seen = {candidate.without_costs for candidate in tried}
        self._bounds: dict[Candidate, float] = {}

    def climb(self, ranked: Ranked) -> Ranked:
        """Return the plan that is reached by steps to faster neighbours."""
        plan = self._choice.plan(ranked)
        _, topology = self._choice.meshes.of(ranked.candidate.degrees)
        if not has_bounds(plan) or forwards(self._part(plan, topology).plan) > MOST_IN_ALL:
            return ranked
        ranked = self._by_bounds(self._from_loads(ranked) or ranked)
        while (better := self._step(ranked)) is not None:
            ranked = better
        return ranked

    def _by_bounds(self, ranked: Ranked) -> Ranked:
        """Return the plan that is reached by steps to neighbours with a better bound, if it is faster, or the one given.

        A bound takes much less time than a simulation, and most of its steps are right.
        """
        candidate = ranked.candidate
        best = first = Ranked(dataclasses.replace(candidate, seconds=self._bound(candidate, math.inf)))
        profile, _ = self._choice.meshes.of(candidate.degrees)
        while self._spent < MOST_BY_BOUNDS:
            in_parts, whole = bool(best.candidate.sum_parts), dataclasses.replace(best.candidate, sum_parts=())
            better = self._fastest(((one, in_parts) for one in neighbours(whole, profile)), best, by_bounds=True)
            if better is None:
                break
            best = better
        found = None if best is first else self._simulated(best.candidate, best.seconds)
        return found if found is not None and self._is_better(found, ranked) else ranked

    def _from_loads(self, ranked: Ranked) -> Ranked | None:
        """Return a faster plan with other stages, whose busiest device has less to do; None: there is none."""
        profile, topology = self._choice.meshes.of(ranked.candidate.degrees)
        stages = list(itertools.islice(least_loaded(ranked.candidate, profile, topology), MOST_DEPTHS))
        near = [one.with_options(extra_in_flight=extra) for one in stages for extra in EXTRA]
        return self._fastest(((one, False) for one in near), ranked)

    def _step(self, ranked: Ranked) -> Ranked | None:
        """Return a faster plan near another one, with one change or else with more; None: there is none, or it would take too long."""
        profile, _ = self._choice.meshes.of(ranked.candidate.degrees)
        candidate, in_parts = dataclasses.replace(ranked.candidate, sum_parts=()), bool(ranked.candidate.sum_parts)
        near = [(one, kept) for one in neighbours(candidate, profile) for kept in {False, in_parts}] + [(candidate, not in_parts)]
        found = self._fastest(near, ranked)
        for plans in (recut, pairs):
            found = found or self._fastest(((one, in_parts) for one in plans(candidate, profile)), ranked)
        return found

    def _is_better(self, found: Ranked, ranked: Ranked) -> bool:
        return found.seconds < _enough(found.candidate, ranked) and found.candidate.over is None

    def _fastest(self, near: Iterable[tuple[Candidate, bool]], ranked: Ranked, by_bounds: bool = False) -> Ranked | None:
        """Return the first faster one of some plans, in the order of their bounds.

        Args:
            near: plans with whole sums, and whether they are to have sums in parts, which are cut anew.
            ranked: the plan that they have to beat.
            by_bounds: whether they are compared by their bounds and not simulated.
        """
        profile, topology = self._choice.meshes.of(ranked.candidate.degrees)
        quick = QuickBound(profile, topology, ranked.candidate.rows, ranked.candidate.asked)
        fast = [(least, n, *one) for n, one in enumerate(near) if (least := quick.seconds(one[0])) < _enough(one[0], ranked)]
        queue = [(least, n, candidate, in_parts, False) for least, n, candidate, in_parts in heapq.nsmallest(MOST_NEAR, fast)]
        while queue and self._spent < MOST_IN_ALL:
            least, n, candidate, in_parts, is_bounded = heapq.heappop(queue)
            if is_bounded and by_bounds:
                return Ranked(dataclasses.replace(candidate, seconds=least))
            if is_bounded:
                found = self._simulated(candidate, least)
                if found is not None and self._is_better(found, ranked):
                    return found
                continue
            if in_parts:
                candidate = with_sum_parts(candidate, profile, topology) or candidate
            if candidate.without_costs in self._seen or not candidate.is_within(self._max_delay):
                continue
            enough = _enough(candidate, ranked)
            bound = max(least, self._bound(candidate, enough))
            if bound < enough:
                heapq.heappush(queue, (bound, n, candidate, in_parts, True))
        return None

    def _simulated(self, candidate: Candidate, least: float) -> Ranked | None:
        """Return a plan, whose bound is known, with its simulation; None if that would take too long."""
        profile, topology = self._choice.meshes.of(candidate.degrees)
        plan = candidate.plan(profile.ids)
        costs = profile.stage_costs(plan, candidate.rows)
        is_whole = topology.cores is None and self._spent < MOST_IN_ALL  # later `_bound` leaves out one of the bounds
        self._spent += forwards(self._part(plan, topology).plan)
        self._seen.add(candidate.without_costs)
        simulation = simulate_plan(plan, costs, topology, self._choice.global_norm, least if is_whole else None)
        if simulation is None:
            return None
        found = Ranked(priced(candidate, plan, costs, simulation, topology), simulation)
        self._tried[found.candidate] = found
        return found

    def _bound(self, candidate: Candidate, enough: float) -> float:
        """Return the largest of the bounds on the seconds of a batch, cheapest first, up to the first one that is too large."""
        if (known := self._bounds.get(candidate.without_costs)) is not None:
            return known
        profile, topology = self._choice.meshes.of(candidate.degrees)
        try:
            plan = candidate.plan(profile.ids)
        except jpipe.InputError:  # too few microbatches for the schedule
            return math.inf
        self.count += 1
        costs = slowed(plan, profile.stage_costs(plan, candidate.rows), topology)
        plan, link, *_ = self._part(plan, topology)
        bound = max(busy_seconds(plan, costs, topology.cores, link, topology.device.overlap), port_seconds(plan, costs, link))
        if bound < enough and self._spent < MOST_IN_ALL and forwards(plan) <= MOST_FORWARDS:
            self._spent += forwards(plan) // _FREE_FORWARDS
            bound = max(bound, unhindered_seconds(plan, costs, link, *window(plan)))
        self._bounds[candidate.without_costs] = bound
        return bound

    def _part(self, plan: jpipe.Plan, topology: Topology) -> Part:
        return part_of(plan, topology, self._choice.global_norm or bool(self._choice.profile.shared))


def _enough(candidate: Candidate, ranked: Ranked) -> float:
    """Return the seconds below which a neighbour is better: with fewer microbatches in flight it only has to be as fast."""
    return ranked.seconds * (1 + EQUAL if candidate.options.extra_in_flight < ranked.candidate.options.extra_in_flight else 1 - GAIN)
