"""Compile the best plans until one fits: the estimates of a profile are not exact, so a plan that lacks memory recomputes more."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jpipe_planner.cost.bound import computing_seconds
from jpipe_planner.cost.devices import lacking, slowed
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.machine.topology import Topology
from jpipe_planner.profile.profile import Profile
from jpipe_planner.ranking.choose import Choice, Ranked, choose, in_order
from jpipe_planner.ranking.compiled import Compiled, closed_form_bytes
from jpipe_planner.ranking.saving.offload import find_offloads
from jpipe_planner.search.candidate import Candidate
from jpipe_planner.search.candidates import closed_form
from jpipe_planner.search.stages import Layers

MOST_COMPILED = 16  # plans, in the order of their speed
MOST_LEAN = 4  # plans with full recomputation, which are compiled when none of those fits
MOST_EQUAL = 3  # plans that are compiled because they may be as fast as the first one that fits, that one included
NEAR = 0.1  # share of the memory that a plan may lack by its estimate, to be compiled nevertheless
ERROR = 0.02  # relative error of predicted times: plans that differ by less are all compiled

Compile = Callable[[Choice, Ranked], Compiled]


@dataclass(frozen=True)
class Attempt:
    """A plan whose compiled stages do not fit.

    Attributes:
        ranked: the plan, as estimated.
        compiled: the memory of its compiled stages.
        raised: the same plan with more recomputation, which is tried instead; None if it recomputes all that it can.
    """

    ranked: Ranked
    compiled: Compiled
    raised: Candidate | None

    @property
    def rank(self) -> int:
        """The pipeline rank that lacks most memory."""
        memory = self.compiled.ranked.memory
        return max(range(len(memory)), key=memory.__getitem__)


@dataclass
class Confirmation:
    """The result of `confirm`.

    Attributes:
        fitting: the plans whose compiled stages fit, best first; the first one is the choice.
        attempts: the plans whose compiled stages do not fit, in the order in which they were compiled.
        known: the results of simulating or compiling, by candidate.
        added: candidates with more recomputation than the search gave them.
        uncompiled: plans of other kinds that were not compiled, ranked by their estimates.
    """

    fitting: list[Compiled] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    known: dict[Candidate, Ranked] = field(default_factory=dict)
    added: list[Candidate] = field(default_factory=list)
    uncompiled: tuple[Ranked, ...] = ()


def confirm(
    choice: Choice,
    candidates: Sequence[Candidate],
    known: dict[Candidate, Ranked],
    compile: Compile,
    report: Callable[[Attempt], None],
) -> Confirmation:
    """Compile plans in the order of their predicted speed until one fits, and then those that may be as fast.

    A plan whose compiled stages do not fit is tried again with more recomputation at the stages that lack memory, and so are those of its
    kind with smaller microbatches, in the order of their speed. Near misses are compiled as well, because estimates may be too high. If
    none of the first `MOST_COMPILED` plans fits, a few with full recomputation are compiled, and if none of these does, those that lack
    least with parts of their state in host memory.

    Args:
        choice: the ranking by estimates.
        candidates: all candidates.
        known: the results of simulations.
        compile: compiles the stages of a plan.
        report: called with each plan that does not fit.
    """
    run = _Confirm(choice, candidates, known, compile, report)
    run.fastest()
    if not run.result.fitting:
        run.leanest()
    if not run.result.fitting:
        run.offloading()
    if run.result.fitting:
        run.as_fast()
    return run.result


class _Confirm:
    """A confirmation in progress."""

    def __init__(
        self,
        choice: Choice,
        candidates: Sequence[Candidate],
        known: dict[Candidate, Ranked],
        compile: Compile,
        report: Callable[[Attempt], None],
    ) -> None:
        self.result = Confirmation(known=dict(known))
        self._choice, self._compile, self._report = choice, compile, report
        self._roomy = choice.topology.with_memory(1 + NEAR)
        self._candidates = list(candidates)
        # The original of each candidate; near misses are marked as plans that fit.
        self._originals = {_assumed_to_fit(candidate, self._limits(candidate)): candidate for candidate in candidates}
        self._remaining = list(self._originals)
        self._tried: set[Candidate] = set()
        self._estimates = self.result.known | {
            assumed: dataclasses.replace(known[original], candidate=assumed)
            for assumed, original in self._originals.items()
            if original in known
        }

    def _limits(self, candidate: Candidate) -> tuple[float, ...]:
        """Return the bytes that each pipeline rank of a plan may use."""
        return candidate.limits(*self._choice.meshes.of(candidate.degrees))

    def fastest(self) -> None:
        """Compile in the order of speed until a plan fits."""
        while len(self.result.attempts) < MOST_COMPILED and not self.result.fitting:
            ranked = self._ranked(self._roomy, self._remaining, self._estimates)
            if not ranked:
                return
            self._try(ranked[0])

    def leanest(self) -> None:
        """Compile plans with full recomputation: of each kind the one that needs least memory, the fastest few, and the smallest of all."""
        lean: dict[tuple[object, ...], Candidate] = {}
        for candidate in self._candidates:
            if candidate.chunks > 1:
                continue
            full = dataclasses.replace(candidate, policies=("full",) * candidate.depth, over=None)
            full = dataclasses.replace(full, memory=_bytes_without_temporaries(self._choice.meshes.of(candidate.degrees)[0], full))
            best = lean.get(candidate.kind)
            if lacking(full.memory, self._limits(full))[1] <= 0 and (best is None or max(full.memory) < max(best.memory)):
                lean[candidate.kind] = full
        untried = [full for full in lean.values() if full.without_costs not in self._tried]
        fastest = sorted(untried, key=lambda full: full.seconds / full.batch)[: MOST_LEAN - 1]
        smallest = [full for full in sorted(untried, key=lambda full: max(full.memory)) if full not in fastest][:1]
        for full in (*fastest, *smallest):
            ranked = None if self.result.fitting else _with_policies(self._choice, full, full.policies)
            if ranked is not None:
                self._add(ranked)
                self._try(ranked)

    def offloading(self) -> None:
        """Compile the plans that lack least, with what they lack, and the error of their estimates, in host memory."""
        nearest = sorted(self.result.attempts, key=lambda attempt: attempt.compiled.lacking or 0)
        for attempt in [one for one in nearest if one.ranked.candidate.offload is None][:MOST_LEAN]:
            candidate, true = attempt.ranked.candidate, attempt.compiled.ranked.memory
            limits = self._limits(candidate)
            errors = [max(actual - estimate, 0) for actual, estimate in zip(true, attempt.ranked.memory, strict=True)]
            share = min(limit / (limit + error) for limit, error in zip(limits, errors, strict=True))
            smaller = dataclasses.replace(self._choice, topology=self._choice.topology.with_memory(share))
            for ranked in find_offloads(smaller, [candidate]):
                if self.result.fitting:
                    return
                self._add(ranked)
                self._try(ranked)

    def as_fast(self) -> None:
        """Compile the plans of other kinds that are predicted to be as fast as the one that fits, and rank those that fit."""
        choice, first = self._choice, self.result.fitting[0]
        for compilations_left in range(MOST_EQUAL - 1, -1, -1):
            kinds = {one.ranked.candidate.kind for one in self.result.fitting}
            remaining = [candidate for candidate in self._remaining if candidate.kind not in kinds]
            self.result.uncompiled = uncompiled = self._ranked(choice.topology, remaining, self._estimates)
            near = uncompiled and uncompiled[0].samples_per_second * (1 + ERROR) >= first.ranked.samples_per_second
            if not near or not compilations_left:
                break
            self._try(uncompiled[0])
        by_plan = {id(one.ranked): one for one in self.result.fitting}
        self.result.fitting = [by_plan[id(ranked)] for ranked in in_order([one.ranked for one in self.result.fitting])]

    def _ranked(self, topology: Topology, candidates: Sequence[Candidate], known: dict[Candidate, Ranked]) -> tuple[Ranked, ...]:
        return choose(self._choice.profile, topology, candidates, global_norm=self._choice.global_norm, tried=known).ranked

    def _add(self, ranked: Ranked) -> None:
        """Add a plan that is not among the candidates."""
        self._originals[ranked.candidate] = ranked.candidate
        self._estimates[ranked.candidate] = self.result.known[ranked.candidate] = ranked
        self.result.added.append(ranked.candidate)

    def _try(self, ranked: Ranked) -> None:
        """Compile a plan; if it does not fit, queue the same with more recomputation and smaller plans of its kind."""
        candidate = ranked.candidate
        compiled = self._compile(self._choice, ranked)
        self._tried.add(candidate.without_costs)
        self.result.known[self._originals[candidate]] = compiled.ranked
        if compiled.fits:
            self.result.fitting.append(compiled)
            return
        raised = self._raised(ranked, compiled)
        attempt = Attempt(ranked, compiled, None if raised is None else raised.candidate)
        self.result.attempts.append(attempt)
        self._report(attempt)
        self._remaining = [other for other in self._remaining if other.kind != candidate.kind or _may_be_smaller(other, candidate)]
        if raised is not None:
            self._add(raised)
            self._remaining.append(raised.candidate)

    def _raised(self, ranked: Ranked, compiled: Compiled) -> Ranked | None:
        """Return the plan with more recomputation at the stages that lack memory; None if they recompute all that they can.

        The errors of the estimates are assumed to be the same with more recomputation, and at pipeline ranks whose stages are not compiled
        those of the compiled ones.
        """
        candidate, true = ranked.candidate, compiled.ranked.memory
        order = Layers(self._choice.meshes.of(candidate.degrees)[0]).policies
        errors = [actual - estimate for actual, estimate in zip(true, ranked.memory, strict=True)]
        compiled_ranks = compiled.ranks or range(len(true))
        errors = [error if p in compiled_ranks else max(errors[q] for q in compiled_ranks) for p, error in enumerate(errors)]
        pipeline_ranks, raised, limits = self._choice.plan(ranked).pipeline_ranks, ranked, self._limits(candidate)
        while over := [p for p, estimate in enumerate(raised.memory) if estimate + errors[p] > limits[p]]:
            policies = list(raised.candidate.policies)
            for s in [s for p in over for s in pipeline_ranks[p]]:
                policies[s] = order[min(order.index(policies[s]) + 1, len(order) - 1)]
            more = None if tuple(policies) == raised.candidate.policies else _with_policies(self._choice, candidate, tuple(policies))
            if more is None:
                break
            raised = more
        return None if raised.candidate.without_costs in self._tried else raised


def _with_policies(choice: Choice, candidate: Candidate, policies: tuple[str, ...]) -> Ranked | None:
    """Return the plan with other recomputation, simulated with the estimates; None if it has no closed form and is too long to simulate."""
    profile, topology = choice.meshes.of(candidate.degrees)
    candidate = dataclasses.replace(candidate, policies=policies, over=None)
    plan = candidate.plan(profile.ids)
    costs = profile.stage_costs(plan, candidate.rows)
    simulation, has_closed_form = (
        simulate_plan(plan, costs, topology, choice.global_norm),
        candidate.has_whole_backwards and candidate.chunks == 1,
    )
    if simulation is None and not has_closed_form:
        return None
    seconds = closed_form(profile, topology, candidate) if has_closed_form or simulation is None else simulation.batch_seconds
    computing = computing_seconds(plan, slowed(plan, costs, topology))
    bubble = max(1 - computing / (candidate.num_ranks * seconds), 0.0)
    memory = closed_form_bytes(plan, costs) if simulation is None else Ranked(candidate, simulation).memory
    if candidate.offload is not None:
        on_device = simulate_plan(plan.model_copy(update={"offload": None}), costs, topology, choice.global_norm)
        times = [one.batch_seconds for one in (on_device, simulation) if one is not None]  # moves never gain time, but times are rounded
        candidate = dataclasses.replace(candidate, on_device=0.0 if on_device is None else min(times))
    return Ranked(dataclasses.replace(candidate, seconds=seconds, bubble=bubble, memory=memory), simulation)


def _bytes_without_temporaries(profile: Profile, candidate: Candidate) -> tuple[int, ...]:
    """Return the bytes of each stage without temporaries, which are the part that is estimated."""
    plan = candidate.plan(profile.ids)
    costs = profile.stage_costs(plan, candidate.rows)
    return closed_form_bytes(plan, [dataclasses.replace(cost, temporary=0) for cost in costs])


def _may_be_smaller(other: Candidate, candidate: Candidate) -> bool:
    """Return whether a plan may fit where another one of its kind does not: by its estimate, or with fewer rows and smaller temporaries."""
    return max(other.memory) < max(candidate.memory) or other.rows < candidate.rows


def _assumed_to_fit(candidate: Candidate, limits: Sequence[float]) -> Candidate:
    """Return the candidate as one that fits, if it is a near miss."""
    near = candidate.over is not None and candidate.over[1] <= NEAR * limits[candidate.over[0]]
    return dataclasses.replace(candidate, over=None) if near else candidate
