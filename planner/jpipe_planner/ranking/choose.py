"""Rank candidates: simulate the candidates with the best estimates, and sort them by speed, fastest first."""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import jpipe
from jpipe_planner.cost.devices import kinds_of, lacking, limits_of, slowed
from jpipe_planner.cost.simulated import MOST_FORWARDS, Simulated, forwards, simulate_plan
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.sharded import Degrees, Meshes
from jpipe_planner.search.candidate import Candidate, Extras
from jpipe_planner.search.estimate import Estimates

__all__ = ["Choice", "Ranked", "choose"]

MOST_SIMULATED = 20  # the most candidates that are simulated
MOST_ALIKE = 3  # the most simulated candidates with the same schedule, replicas and mesh
MOST_IN_ALL = 12_000  # forwards, for some seconds, after which a step of the search begins no further simulation
FIRST = 2  # the candidates that are simulated even beyond this number of forwards, each with at most `LONGEST`
LONGEST = 45_000
DOUBT = 1.3  # a plan that is too large to simulate counts only if its estimate is this many times as fast
MOST_COMPARED = 1_000  # forwards in the simulations that are only for comparison
ALIKE = 0.03  # relative difference up to which estimates count as equal
EQUAL = 0.005  # relative difference up to which plans count as equally fast
PAYS = 0.03  # how much faster than one device several devices must be, because predictions are not more exact


@dataclass(frozen=True)
class Ranked:
    """A candidate with its simulation.

    Attributes:
        candidate: the candidate; if it was simulated, with the seconds, bubble, memory and bytes of the simulation.
        simulated: the simulation; None if it would take too long, so that the candidate keeps its estimate.
    """

    candidate: Candidate
    simulated: Simulated | None = None

    @property
    def seconds(self) -> float:
        """Seconds per batch."""
        return self.candidate.seconds if self.simulated is None else self.simulated.batch_seconds

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they do not compute."""
        return self.candidate.bubble if self.simulated is None else self.simulated.bubble

    @property
    def samples_per_second(self) -> float:
        """Rows per second."""
        return self.candidate.batch / self.seconds

    @property
    def memory(self) -> tuple[int, ...]:
        """The peak memory of a device of each pipeline rank, in bytes."""
        return self.candidate.memory if self.simulated is None else self.candidate.most_of_replicas(self.simulated.peak_bytes)


@dataclass(frozen=True)
class Choice:
    """A ranking of plans.

    Attributes:
        profile: the profile of the model.
        topology: the topology.
        ranked: for each `Candidate.kind` the best simulated plan that fits, fastest first.
        rejected: for each kind the best plan that does not fit, sorted by the memory that it lacks.
        considered: the number of candidates.
        global_norm: whether gradients are clipped by their norm over all stages.
    """

    profile: Profile
    topology: Topology
    ranked: tuple[Ranked, ...]
    rejected: tuple[Candidate, ...]
    considered: int
    global_norm: bool = False

    @property
    def needs(self) -> dict[str, bool]:
        """What updates need of all stages, as arguments of `jpipe.plan.excluded`."""
        return {"skip_nonfinite": self.global_norm, "ties": bool(self.profile.shared)}

    @cached_property
    def meshes(self) -> Meshes:
        """The profile and topology for plans on meshes."""
        return Meshes(self.profile, self.topology)

    def plan(self, ranked: Ranked) -> jpipe.Plan:
        """Return the plan of a ranked candidate, with its prediction."""
        plan, (profile, topology) = ranked.candidate.plan(self.profile.ids), self.meshes.of(ranked.candidate.degrees)
        costs = slowed(plan, profile.stage_costs(plan, ranked.candidate.rows), topology)
        predicted = jpipe.plan.Predicted(
            batch_seconds=ranked.seconds,
            bubble=min(max(ranked.bubble, 0.0), 1.0),
            peak_bytes=ranked.memory,
            delay=ranked.candidate.delay,
            stage_seconds=tuple(float(cost.forward + cost.backward) * ranked.candidate.num_slices for cost in costs),
            devices=kinds_of(plan, topology),
        )
        return plan.model_copy(update={"predicted": predicted})

    def forwards(self, candidate: Candidate) -> int:
        """Return the number of forwards in the simulation of a candidate."""
        profile, topology = self.meshes.of(candidate.degrees)
        return forwards(_plan(candidate, profile.ids), topology)

    def computing(self, candidate: Candidate) -> list[float]:
        """Return for each pipeline rank of a candidate the seconds per batch for which a device computes: no plan is faster than these."""
        profile, topology = self.meshes.of(candidate.degrees)
        plan = _plan(candidate, profile.ids)
        costs = slowed(plan, profile.stage_costs(plan, candidate.rows), topology)
        return [
            sum(plan.counted.microbatches / plan.replicas[s] * (costs[s].forward + costs[s].backward) for s in of)
            for of in plan.pipeline_ranks
        ]

    def rival(self, candidate: Candidate) -> float:
        """Return the rows per second of the fastest ranked plan, or of the fastest one that flushes if the candidate flushes."""
        rules = jpipe.schedules.SCHEDULES
        flushes = rules[candidate.schedule].flushes
        return max((one.samples_per_second for one in self.ranked if rules[one.candidate.schedule].flushes >= flushes), default=0.0)

    def limits(self, candidate: Candidate) -> tuple[float, ...]:
        """Return for each pipeline rank of a candidate the bytes that it may use on a device; infinity: not limited."""
        profile, topology = self.meshes.of(candidate.degrees)
        if not topology.differing:
            return (math.inf if topology.device.limit is None else topology.device.limit,) * candidate.num_pipeline_ranks
        return limits_of(candidate.plan(profile.ids), topology)

    @cached_property
    def estimates(self) -> Callable[[Degrees, tuple[int, ...] | None, Extras], Estimates]:
        """A function that returns the estimates for meshes, an order of the devices, and requested options."""

        @lru_cache(maxsize=8)
        def of(degrees: Degrees, placed_on: tuple[int, ...] | None, extras: Extras) -> Estimates:
            profile, topology = self.meshes.of(degrees)
            return Estimates(profile, topology.ordered(placed_on), extras)

        return of

    def lacks_in_host(self, candidate: Candidate) -> bool:
        """Return whether a plan's estimate does not fit even with the large and seldom needed parts of its state in host memory."""
        estimates = self.estimates(candidate.degrees, candidate.placed_on, candidate.extras)
        return candidate.has_one_stage_each and estimates.lacks_in_host(candidate)

    def simulate(self, candidate: Candidate) -> Ranked:
        """Return a candidate with its simulation. If the simulated plan does not fit, `Candidate.over` is set."""
        profile, topology = self.meshes.of(candidate.degrees)
        plan = _plan(candidate, profile.ids)
        simulated = simulate_plan(plan, profile.stage_costs(plan, candidate.rows), topology, self.global_norm)
        if simulated is None:
            return Ranked(candidate)
        memory, busy = candidate.most_of_replicas(simulated.peak_bytes), self.computing(candidate)
        worst, lacks = lacking(memory, limits_of(plan, topology))
        priced = dataclasses.replace(
            candidate,
            seconds=simulated.batch_seconds,
            bubble=simulated.bubble,
            memory=memory,
            sent=sum(simulated.sent_bytes) * candidate.degrees.size / candidate.batch,
            bound=candidate.bound or f"rank {max(range(len(busy)), key=busy.__getitem__)} computes",
            over=(worst, round(lacks)) if lacks > 0 else None,
        )
        return Ranked(priced, simulated)

    def with_more(self, found: Iterable[Ranked], considered: int = 0) -> "Choice":
        """Return the ranking with further plans, and more considered candidates. Only the best plan of each kind is kept."""
        found = list(found)
        ranked = best_of_kinds([*(one for one in found if one.candidate.over is None), *self.ranked])
        lacking = [*self.rejected, *(one.candidate for one in found if one.candidate.over is not None)]
        rejected = of_other_kinds(sorted(lacking, key=lambda candidate: candidate.rank), ranked)
        return dataclasses.replace(self, ranked=ranked, rejected=rejected, considered=self.considered + considered)


def choose(
    profile: Profile,
    topology: Topology,
    candidates: Iterable[Candidate],
    *,
    most: int = MOST_SIMULATED,
    global_norm: bool = False,
    tried: dict[Candidate, Ranked] | None = None,
) -> Choice:
    """Rank candidates. Simulate the fitting candidates with the best estimates and, for comparison, the best of other kinds.

    The estimates of similar candidates (a family, such as one schedule with equal replicas) are wrong by about the same factor. So
    simulations of some candidates of a family correct the estimates of its other candidates. At most `most` candidates are simulated, half
    of them for comparison. New simulations are added to `tried`.
    """
    by_rank, tried = sorted(candidates, key=lambda candidate: candidate.rank), {} if tried is None else tried
    rejected = of_other_kinds((candidate for candidate in by_rank if candidate.over is not None), ())
    choice = Choice(profile, topology, (), rejected, len(by_rank), global_norm)
    run = _Simulations(choice, [candidate for candidate in by_rank if candidate.over is None], tried, most)
    run.compared(one for one in run.fitting if one.depth == 1 and one.degrees.size == 1)  # as a baseline
    run.fastest()
    run.compared(run.fitting)
    return choice.with_more(tried.values())


class _Simulations:
    """Simulations of candidates that fit by their estimates, the best first, up to a number of candidates and of simulated forwards."""

    def __init__(self, choice: Choice, fitting: Sequence[Candidate], tried: dict[Candidate, Ranked], most: int) -> None:
        self.found, self.fitting = list[Ranked](), fitting
        self._choice, self._tried, self._most, self._spent = choice, tried, most, 0

    def fastest(self) -> None:
        """Simulate the candidates with the best expected speed, as long as a candidate may be faster than the simulated plans."""
        known = {one.candidate for one in self.found}
        self._spent, waiting = 0, self._that_could_win([one for one in self.fitting if one not in known])
        alike, taken, first = Counter[object](), defaultdict[object, list[float]](list), FIRST
        while waiting and len(self.found) < (self._most + 1) // 2:
            candidate = min(waiting, key=lambda one: _turn(one, taken[_family(one)]))
            one = self._simulated(candidate, max(MOST_IN_ALL, self._spent + LONGEST if first else 0))
            if one is not None:
                first = max(first - 1, 0)
                alike[_replicated(candidate)] += one.candidate.over is None
                taken[_family(candidate)].append(_row_seconds(one.candidate) / _row_seconds(candidate))
            waiting = [one for one in waiting if one is not candidate and alike[_replicated(one)] < MOST_ALIKE]
            waiting = self._that_could_win(waiting)

    def compared(self, candidates: Iterable[Candidate]) -> None:
        """Simulate the best candidate of each other kind if its simulation is short; of equal estimates the one with most in flight."""
        self._spent, kinds = 0, {one.candidate.kind for one in self.found}
        for candidate in first_of_kinds(sorted(candidates, key=lambda one: _turn(one, ()))):
            if candidate.kind not in kinds and len(self.found) < self._most:
                self._simulated(candidate, MOST_COMPARED)

    def _that_could_win(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the candidates with estimates faster than the best simulated plan, or as fast and better in their other properties."""
        if not self.found:
            return [*candidates]
        best = in_order(self.found)[0]
        fastest, rank = _row_seconds(best.candidate), best.candidate.rank

        def could_win(one: Candidate) -> bool:
            share = _row_seconds(one) / fastest
            if (share * (1 - one.bubble) if one.bound.startswith("sum") else share) < 1 - EQUAL:  # a sum in parts takes less time
                return True
            return share <= 1 + EQUAL and dataclasses.replace(one, seconds=one.batch / best.samples_per_second).rank < rank

        return [*filter(could_win, candidates)]

    def _simulated(self, candidate: Candidate, limit: int) -> Ranked | None:
        """Return a candidate with its simulation, or None if all simulations together would take too long."""
        effort = 0 if candidate in self._tried else self._choice.forwards(candidate)
        if effort > MOST_FORWARDS:  # it is not simulated and keeps its estimate
            best = min((_row_seconds(one.candidate) for one in self.found), default=math.inf)
            effort = 0 if DOUBT * _row_seconds(candidate) < best else effort
        if self.found and self._spent + effort > limit:
            return None
        self._spent += effort
        if candidate not in self._tried:
            self._tried[candidate] = self._choice.simulate(candidate)
        one = self._tried[candidate]
        self.found += [one] if one.candidate.over is None else []
        return one


@lru_cache(maxsize=256)
def _plan(candidate: Candidate, ids: tuple[str, ...]) -> jpipe.Plan:
    """Return the plan of a candidate, which is counted before it is simulated."""
    return candidate.plan(ids)


def _row_seconds(candidate: Candidate) -> float:
    """Return the seconds per row, to compare plans with different batches."""
    return candidate.seconds / candidate.batch


def _turn(candidate: Candidate, taken: Sequence[float]) -> tuple[int, int, int]:
    """Return the key for the order of simulations. `taken` are seconds of simulations of its family, relative to their estimates."""
    expected = _row_seconds(candidate) * (sum(taken) / len(taken) if taken else 1.0)
    return round(math.log(expected) / ALIKE), -candidate.options.extra_in_flight, candidate.depth


def _replicated(candidate: Candidate) -> tuple[object, ...]:
    """Return the properties that count for `MOST_ALIKE`: at most that many fitting plans that share them are simulated."""
    return candidate.schedule, candidate.replicas, candidate.degrees


def _family(candidate: Candidate) -> tuple[object, ...]:
    """Return the properties of a family: candidates with the same properties have estimates that are wrong by about the same factor."""
    is_even = len(set(candidate.replicas)) == 1
    return candidate.schedule, is_even, candidate.depth == 1, candidate.keep_together


def first_of_kinds(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the first candidate of each kind."""
    first = dict[tuple[object, ...], Candidate]()
    for candidate in candidates:
        first.setdefault(candidate.kind, candidate)
    return list(first.values())


def best_of_kinds(plans: Iterable[Ranked]) -> tuple[Ranked, ...]:
    """Return the best plan of each kind, `preferred` first."""
    best = dict[tuple[object, ...], Ranked]()
    for one in in_order(list(plans)):
        best.setdefault(one.candidate.kind, one)
    return preferred(list(best.values()))


def preferred(ordered: Sequence[Ranked]) -> tuple[Ranked, ...]:
    """Return plans that are in order with the plans for one device first that are nearly as fast as the best (`PAYS`)."""
    alone = [one for one in ordered if one.candidate.devices == 1 and (1 + PAYS) * one.samples_per_second >= ordered[0].samples_per_second]
    return (*alone, *(one for one in ordered if one not in alone))


def in_order(ranked: Sequence[Ranked]) -> list[Ranked]:
    """Sort plans, fastest first. Plans that are equally fast, within `EQUAL`, are sorted by their other properties."""
    remaining = sorted(ranked, key=lambda one: (-one.samples_per_second, one.candidate.rank))
    ordered: list[Ranked] = []
    while remaining:
        speed = remaining[0].samples_per_second
        equal = [one for one in remaining if one.samples_per_second >= speed * (1 - EQUAL)]
        remaining = remaining[len(equal) :]
        merits = {id(one): dataclasses.replace(one.candidate, seconds=one.candidate.batch / speed).rank for one in equal}
        ordered += sorted(equal, key=lambda one: merits[id(one)])
    return ordered


def of_other_kinds(candidates: Iterable[Candidate], ranked: Iterable[Ranked]) -> tuple[Candidate, ...]:
    """Return the first candidate of each kind that is not ranked."""
    kinds = {one.candidate.kind for one in ranked}
    return tuple(candidate for candidate in first_of_kinds(candidates) if candidate.kind not in kinds)
