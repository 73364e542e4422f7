"""Compile the best plans until one fits. Estimates are not exact, so a plan that lacks memory is tried again with recomputation."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from jpipe_planner.cost.devices import lacking
from jpipe_planner.ranking.choose import Choice, Ranked, best_of_kinds, in_order, of_other_kinds, preferred
from jpipe_planner.ranking.compiled import closed_form_bytes
from jpipe_planner.ranking.find import Attempt, Compiled, Plans
from jpipe_planner.ranking.offload import find_offloads
from jpipe_planner.search.candidate import Candidate
from jpipe_planner.search.stages import Layers

__all__ = ["confirm"]

MOST_COMPILED = 16  # the most plans that are compiled in the order of their speed
MOST_LEAN = 4  # the most plans with full recomputation that are compiled if no other plan fits
MOST_EQUAL = 3  # number of compiled plans that fit: the first one, and others that may be as fast
MOST_NEAR = 4  # the most plans that are simulated and compiled although their estimates lack a little memory
NEAR = 0.1  # share of the memory that a plan's estimate may lack if it is still compiled
ERROR = 0.02  # relative error of predicted times: plans that differ by less are compiled, too

Compile = Callable[[Choice, Ranked], Compiled]


def confirm(plans: Plans, compile: Compile, report: Callable[[Attempt], None]) -> Plans:
    """Compile simulated plans in the order of their speed until one fits, and then other plans that may be as fast.

    If the compiled stages of a plan do not fit, it is reported, and two more plans are added: the plan with more recomputation at the
    stages that lack memory, and a smaller plan of its kind. Plans that lack little memory are compiled as well, because estimates may be
    too high. If none of the first `MOST_COMPILED` plans fits, a few plans with full recomputation are compiled. If none of these fits, the
    plans that lack least are compiled with parts of their state in host memory.

    Return a new ranking: first the compiled plans that fit, then plans of other kinds, which were not compiled.
    """
    run = _Confirm(plans, compile, report)
    run.fastest()
    if not run.fitting:
        run.leanest()
    if not run.fitting:
        run.offloading()
    ranked = run.ranked() if run.fitting else ()
    choice = dataclasses.replace(plans.choice, ranked=ranked, rejected=of_other_kinds(plans.choice.rejected, ranked))
    return dataclasses.replace(plans, choice=choice, tried=run.tried, compiled=tuple(run.fitting), attempts=tuple(run.attempts))


class _Confirm:
    """A confirmation in progress; its attributes are as in `Plans`, `fitting` are the compiled plans."""

    def __init__(self, plans: Plans, compile: Compile, report: Callable[[Attempt], None]) -> None:
        self.fitting, self.attempts, self.tried = list[Compiled](), list[Attempt](), dict(plans.tried)
        self._choice, self._candidates, self._compile, self._report = plans.choice, plans.candidates, compile, report
        self._compiled = set[Candidate]()
        misses = (one for one in _fastest_first(plans.candidates) if one.over and one not in plans.tried)
        nearly = itertools.islice((one for one in misses if self._nearly_fits(Ranked(one))), MOST_NEAR)
        self._queue = [one for one in (*plans.tried.values(), *map(self._simulated, nearly)) if self._nearly_fits(one)]

    def _nearly_fits(self, one: Ranked) -> bool:
        """Return whether a plan fits or lacks little memory by its estimate. On meshes it must fit: there estimates are rather too low."""
        over, near = one.candidate.over, NEAR if one.candidate.degrees.size == 1 else 0.0
        return over is None or over[1] <= near * self._choice.limits(one.candidate)[over[0]]

    def fastest(self) -> None:
        """Compile plans in the order of their speed until one fits."""
        while self._queue and len(self.attempts) < MOST_COMPILED and not self.fitting:
            self._try(preferred(in_order(self._queue))[0])

    def leanest(self) -> None:
        """Compile the plan of each kind that needs the least memory with full recomputation: only the fastest few and the smallest."""
        lean: dict[tuple[object, ...], Candidate] = {}
        for candidate in self._candidates:
            if candidate.chunks > 1:
                continue
            full = dataclasses.replace(candidate, policies=("full",) * candidate.depth, over=None)
            plan, profile = full.plan(self._choice.profile.ids), self._choice.meshes.of(candidate.degrees)[0]
            costs = [dataclasses.replace(cost, temporary=0) for cost in profile.stage_costs(plan, full.rows)]  # they are estimates
            full = dataclasses.replace(full, memory=closed_form_bytes(full, costs))
            best = lean.get(candidate.kind)
            if lacking(full.memory, self._choice.limits(full))[1] <= 0 and (best is None or max(full.memory) < max(best.memory)):
                lean[candidate.kind] = full
        untried = [full for full in lean.values() if full not in self._compiled]
        fastest = sorted(untried, key=lambda full: full.seconds / full.batch)[: MOST_LEAN - 1]
        smallest = [full for full in sorted(untried, key=lambda full: max(full.memory)) if full not in fastest][:1]
        for full in (*fastest, *smallest):
            if not self.fitting:
                self._try(self._simulated(full))

    def offloading(self) -> None:
        """Compile the plans that lack least. They keep in host memory what they lack, plus the possible error of their estimates."""
        nearest = sorted(self.attempts, key=lambda attempt: attempt.compiled.lacking or 0)
        for attempt in [one for one in nearest if one.ranked.candidate.offload is None][:MOST_LEAN]:
            candidate, true = attempt.ranked.candidate, attempt.compiled.ranked.memory
            errors = [max(actual - estimate, 0) for actual, estimate in zip(true, attempt.ranked.memory, strict=True)]
            share = min(limit / (limit + error) for limit, error in zip(self._choice.limits(candidate), errors, strict=True))
            for ranked in find_offloads(self._choice, [candidate], share):
                if not self.fitting:
                    self._try(ranked)

    def ranked(self) -> tuple[Ranked, ...]:
        """Compile plans of other kinds that are predicted to be as fast as the first plan that fits, and return the new ranking."""
        first = self.fitting[0].ranked
        more = MOST_EQUAL - 1 if first.candidate.slices is None else 0  # each slice has programs of its own, which take long to compile
        for compilations_left in range(more, -1, -1):
            kinds = {one.ranked.candidate.kind for one in self.fitting}
            others = best_of_kinds(one for one in self._queue if one.candidate.over is None and one.candidate.kind not in kinds)
            near = others and others[0].samples_per_second * (1 + ERROR) >= first.samples_per_second
            if not near or not compilations_left:
                break
            self._try(others[0])
        by_plan, fitting = {id(one.ranked): one for one in self.fitting}, preferred(in_order([one.ranked for one in self.fitting]))
        self.fitting = [by_plan[id(ranked)] for ranked in fitting]
        return *fitting, *others

    def _try(self, ranked: Ranked) -> None:
        """Compile a plan. If it does not fit, queue the plan with more recomputation, and a smaller plan of its kind."""
        candidate = ranked.candidate
        compiled = self._compile(self._choice, ranked)
        self._compiled.add(candidate)
        self._queue = [other for other in self._queue if other.candidate != candidate]
        self.tried[candidate] = compiled.ranked
        if compiled.fits:
            fitting = dataclasses.replace(compiled.ranked, candidate=dataclasses.replace(candidate, over=None))
            self.tried[candidate] = fitting
            self.fitting.append(dataclasses.replace(compiled, ranked=fitting))
            return
        raised = self._raised(ranked, compiled)
        attempt = Attempt(ranked, compiled, None if raised is None else raised.candidate)
        self.attempts.append(attempt)
        self._report(attempt)
        self._queue = [one for one in self._queue if one.candidate.kind != candidate.kind or _may_be_smaller(one.candidate, candidate)]
        alike = (one for one in self._candidates if one.kind == candidate.kind and _may_be_smaller(one, candidate))
        smaller = next((one for one in _fastest_first(alike) if one.over is None and one not in self.tried), None)
        for one in (raised, None if smaller is None else self._simulated(smaller)):
            if one is not None and self._nearly_fits(one):
                self._queue.append(one)

    def _simulated(self, candidate: Candidate) -> Ranked:
        """Return a plan with its simulation or, if a simulation takes too long, with its memory in closed form."""
        one = self._choice.simulate(candidate)
        if one.simulated is None:
            plan, profile = candidate.plan(self._choice.profile.ids), self._choice.meshes.of(candidate.degrees)[0]
            memory = closed_form_bytes(candidate, profile.stage_costs(plan, candidate.rows))
            one = Ranked(dataclasses.replace(candidate, memory=memory))
        elif candidate.offload is not None:  # moves never save time, but times are rounded
            on_device = self._choice.simulate(dataclasses.replace(candidate, offload=None))
            one = dataclasses.replace(one, candidate=dataclasses.replace(one.candidate, on_device=min(on_device.seconds, one.seconds)))
        self.tried[candidate] = one
        return one

    def _raised(self, ranked: Ranked, compiled: Compiled) -> Ranked | None:
        """Return the plan with more recomputation at the stages that lack memory, or None if these already recompute everything.

        The errors of the estimates are assumed to stay the same with more recomputation. Pipeline ranks without compiled stages are assumed
        to have the largest error of the compiled ranks.
        """
        candidate, true = ranked.candidate, compiled.ranked.memory
        order = Layers(self._choice.meshes.of(candidate.degrees)[0]).policies
        errors = [actual - estimate for actual, estimate in zip(true, ranked.memory, strict=True)]
        compiled_ranks = compiled.ranks or range(len(true))
        errors = [error if p in compiled_ranks else max(errors[q] for q in compiled_ranks) for p, error in enumerate(errors)]
        pipeline_ranks, raised, limits = self._choice.plan(ranked).pipeline_ranks, ranked, self._choice.limits(candidate)
        while over := [p for p, estimate in enumerate(raised.memory) if estimate + errors[p] > limits[p]]:
            policies = list(raised.candidate.policies)
            for s in [s for p in over for s in pipeline_ranks[p]]:
                policies[s] = order[min(order.index(policies[s]) + 1, len(order) - 1)]
            if tuple(policies) == raised.candidate.policies:
                break
            raised = self._simulated(dataclasses.replace(candidate, policies=tuple(policies), over=None))
        return None if raised.candidate in self._compiled else raised


def _may_be_smaller(other: Candidate, candidate: Candidate) -> bool:
    """Return whether a plan may fit although another of its kind does not: its estimate is smaller, or it has fewer rows."""
    return max(other.memory) < max(candidate.memory) or other.rows < candidate.rows


def _fastest_first(candidates: Iterable[Candidate]) -> Sequence[Candidate]:
    return sorted(candidates, key=lambda one: (one.seconds / one.batch, one.rank))
