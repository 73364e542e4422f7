"""Decide which candidates to simulate: the one with the best bound first, until the fastest simulated one beats all other bounds."""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import jpipe
from jpipe_planner.cost.bound import busy_seconds, has_bounds, port_seconds, unhindered_seconds
from jpipe_planner.cost.copies import part_of
from jpipe_planner.cost.devices import slowed
from jpipe_planner.cost.simulated import MOST_FORWARDS, forwards, window
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.sharded import Meshes
from jpipe_planner.search.candidate import Candidate

SLACK = 0.005  # relative amount by which a plan that is not simulated might be faster; plans within it count as equally fast
MOST_SIMULATED = 40
MOST_IN_ALL = 16_000  # forwards of all simulations, with the cost of bounds in forwards: about two seconds
_FOR_SHOW = 0.25  # share of it after which only candidates that could win are simulated
_FREE_FORWARDS, _FREE_WORKERS = 12, 20  # forwards in `unhindered_seconds`, and workers in `port_seconds`, that cost as much as one
_OF_A_KIND = 0.05  # relative amount by which a bound has to beat the best of its kind, if the kind cannot win


_Bound = Callable[["_Planned", Topology], float]


class Outcome(NamedTuple):
    """The result of a simulation: seconds per batch, and whether the plan fits."""

    seconds: float
    fits: bool


class _Entry(NamedTuple):
    """A candidate in the queue: those with the best bounds come first, but later the longer their simulations take."""

    order: float  # the bound, the larger the longer the simulation takes
    number: int  # among the candidates, sorted by place in the ranking
    bounds: int  # how many of the bounds are known
    seconds_per_row: float  # the lower bound


class _Planned(NamedTuple):
    """What is simulated of a candidate: a plan, the costs of its stages on their devices, and its links."""

    plan: jpipe.Plan
    costs: Sequence[jpipe.programs.StageCost]
    link: jpipe.programs.Network


class Race:
    """Simulates candidates in the order of their bounds until none can be faster.

    Attributes:
        finished: candidates that were simulated and fit.
        too_large: candidates that were simulated and do not fit.
        remaining: candidates that were not simulated, with lower bounds on their seconds per batch.
        open: the number of remaining candidates that could be faster than the fastest simulated one, because the limit was reached.
    """

    def __init__(
        self,
        profile: Profile,
        topology: Topology,
        candidates: Sequence[Candidate],
        simulate: Callable[[Candidate, float | None], Outcome],
        known: Mapping[Candidate, Outcome],
        kinds: int,
        waits: bool = False,
    ) -> None:
        """Simulate until no other candidate can be the fastest and `kinds` kinds are simulated, or until the limit is reached.

        Args:
            profile: the profile of the model.
            topology: the topology.
            candidates: candidates, sorted by place in the ranking.
            simulate: simulates one candidate, with the largest of its bounds if they are known.
            known: outcomes of earlier simulations.
            kinds: the number of kinds of which one candidate is simulated, for comparison.
            waits: whether updates wait for other stages, as in `part_of`.
        """
        self.finished: list[Candidate] = []
        self.too_large: list[Candidate] = []
        self._meshes, self._candidates, self._known = Meshes(profile, topology), candidates, known
        self._has_equal_devices, self._cores, self._waits = not topology.differing, topology.cores, waits
        self._simulate, self._count, self._spent = simulate, 0, 0
        self._fastest = math.inf  # seconds per row
        self._best_of_kind: dict[tuple[object, ...], float] = {}
        self._speeds: list[tuple[float, Candidate]] = []  # seconds per row of the finished ones
        self._planned = lru_cache(maxsize=256)(self._plan)
        # The best candidate by closed form is simulated first, as a reference for the remaining ones.
        self._queue = [_Entry(0.0, number, 0 if number else len(_BOUNDS), 0.0) for number in range(len(candidates))]
        passed: list[_Entry] = []
        while self._queue and self._count < MOST_SIMULATED and self._spent < MOST_IN_ALL:
            entry = heapq.heappop(self._queue)
            could_win = entry.seconds_per_row * (1 + SLACK) < self._fastest or self._is_less_stale(entry)
            if could_win or self._is_improvement(entry, kinds):
                self._advance(entry)
            else:
                passed.append(entry)
        remaining = sorted([*self._queue, *passed], key=lambda entry: entry.number)
        self.remaining = [(candidates[entry.number], entry.seconds_per_row * candidates[entry.number].batch) for entry in remaining]
        self.open = sum(entry.seconds_per_row * (1 + SLACK) < self._fastest for entry in remaining)

    def _is_less_stale(self, entry: _Entry) -> bool:
        """Return whether a candidate could be as fast as the fastest one, and has a smaller delay than all that are."""
        if entry.seconds_per_row * (1 - SLACK) > self._fastest:
            return False
        equal = [candidate.delay for seconds_per_row, candidate in self._speeds if seconds_per_row * (1 - SLACK) <= self._fastest]
        return min(equal, default=0.0) > self._candidates[entry.number].delay

    def _is_improvement(self, entry: _Entry, kinds: int) -> bool:
        """Return whether a candidate that cannot be the fastest is of a kind to show, and could be the fastest known one of its kind."""
        best = self._best_of_kind.get(self._candidates[entry.number].kind)
        if len(self._best_of_kind) >= kinds or self._spent > _FOR_SHOW * MOST_IN_ALL:
            return False
        return best is None or entry.seconds_per_row * (1 + _OF_A_KIND) < best

    def _advance(self, entry: _Entry) -> None:
        """Compute the next bound of a candidate, or simulate it if all its bounds are known."""
        candidate = self._candidates[entry.number]
        outcome = self._known.get(candidate)
        if outcome is None and entry.bounds < len(_BOUNDS) and has_bounds(self._planned(candidate).plan):
            seconds = max(self._bound(candidate, entry.bounds) / candidate.batch, entry.seconds_per_row)
            order = seconds * (1 + forwards(self._planned(candidate).plan) / MOST_IN_ALL)
            heapq.heappush(self._queue, _Entry(order, entry.number, entry.bounds + 1, seconds))
            return
        is_larger = (other.kind == candidate.kind and max(other.memory) <= max(candidate.memory) for other in self.too_large)
        if self._has_equal_devices and any(is_larger):
            return  # it would not fit either
        if outcome is None:
            self._count += 1
            count = forwards(self._planned(candidate).plan)
            self._spent += count if count <= MOST_FORWARDS else 0  # it is not simulated
            is_bounded = entry.bounds == len(_BOUNDS) and entry.seconds_per_row > 0 and not self._cores
            outcome = self._simulate(candidate, entry.seconds_per_row * candidate.batch if is_bounded else None)
        if not outcome.fits:
            self.too_large.append(candidate)
            return
        self.finished.append(candidate)
        seconds_per_row = outcome.seconds / candidate.batch
        self._speeds.append((seconds_per_row, candidate))
        self._fastest = min(self._fastest, seconds_per_row)
        self._best_of_kind[candidate.kind] = min(self._best_of_kind.get(candidate.kind, math.inf), seconds_per_row)

    def _plan(self, candidate: Candidate) -> _Planned:
        profile, topology = self._meshes.of(candidate.degrees)
        plan = candidate.plan(profile.ids)
        costs = slowed(plan, profile.stage_costs(plan, candidate.rows), topology)
        part = part_of(plan, topology, self._waits)
        return _Planned(part.plan, costs, part.link)

    def _bound(self, candidate: Candidate, which: int) -> float:
        planned, (bound, cost) = self._planned(candidate), _BOUNDS[which]
        self._spent += cost(planned)
        return bound(planned, self._meshes.of(candidate.degrees)[1])


def _unhindered(planned: _Planned, topology: Topology) -> float:
    plan, costs, link = planned
    return 0.0 if forwards(plan) > MOST_FORWARDS else unhindered_seconds(plan, costs, link, *window(plan))


def _busy(planned: _Planned, topology: Topology) -> float:
    return busy_seconds(planned.plan, planned.costs, topology.cores, planned.link, topology.device.overlap)


def _port(planned: _Planned, topology: Topology) -> float:
    return port_seconds(*planned)


_BOUNDS: tuple[tuple[_Bound, Callable[[_Planned], int]], ...] = (
    (_busy, lambda planned: 0),
    (_port, lambda planned: len(planned.plan.workers) // _FREE_WORKERS),
    (_unhindered, lambda planned: min(forwards(planned.plan), MOST_FORWARDS) // _FREE_FORWARDS),
)
"""The bounds, cheapest first, with their costs."""
