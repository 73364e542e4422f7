"""Plans that keep parts of their state in host memory, derived from plans that do not fit.

Each rank that lacks memory gets the first of `LEVELS` with which it fits: what is moved least often comes first. The memory of a rank
depends neither on the times of a run nor on other ranks, so the same simulations decide all ranks. What the moves cost follows from a
simulation of the whole, with the links to host memory.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

import jpipe
from jpipe.plan import excluded
from jpipe_planner.cost.devices import host_limits_of, lacking, limits_of
from jpipe_planner.ranking.choose import Choice, Ranked, first_of_kinds
from jpipe_planner.ranking.variants import lacks_memory
from jpipe_planner.search.candidate import Candidate

LEVELS: tuple[tuple[jpipe.plan.Kept, ...], ...] = (
    (),
    ("optimizer",),
    ("optimizer", "versions"),
    ("optimizer", "residuals", "stash"),
    ("optimizer", "versions", "residuals", "stash"),
)
"""What waits in host memory: nothing, then more and more."""
BASES = 12  # plans that are tried
MOST_IN_ALL = 48_000  # forwards of all simulations, after which no further plan is tried


def offload_bases(candidates: Iterable[Candidate], lacks_in_host: Callable[[Candidate], bool] = lambda _: False) -> list[Candidate]:
    """Return the plans that lack memory, or recompute so that they fit, for which host memory may suffice.

    Of each kind these are the one that lacks least, and the fastest.

    Args:
        candidates: the plans.
        lacks_in_host: whether a plan does not fit even with host memory; those are tried last.
    """
    tight = [candidate for candidate in candidates if lacks_memory(candidate)]
    fastest = {
        (one.kind, one.rows): one
        for one in sorted(tight, key=lambda one: (lacks_in_host(one), one.seconds / one.batch, one.rank), reverse=True)
    }
    leanest = first_of_kinds(sorted(tight, key=lambda one: one.rank))
    bases = dict.fromkeys(base for one in leanest for base in (one, fastest[one.kind, one.rows]))
    return sorted(bases, key=lacks_in_host)[:BASES]


def find_offloads(choice: Choice, bases: Sequence[Candidate]) -> list[Ranked]:
    """Return plans that fit because parts of their state wait in host memory, with their simulations.

    Each plan is tried with the recomputation that it has, and without any.

    Args:
        choice: the ranking, for its profile, its topology and whether updates wait for a norm.
        bases: plans that do not fit, or do not without recomputation.
    """
    found, spent = list[Ranked](), 0
    for base in bases:
        for policies in dict.fromkeys((base.policies, ("none",) * base.depth)):
            run = _OfPlan(choice, dataclasses.replace(base, policies=policies, over=None, offload=None))
            if spent <= MOST_IN_ALL and any(run.host_limits):
                found += run.found()
                spent += run.spent
    return found


class _OfPlan:
    """A plan that does not fit, and what it may keep in host memory.

    Attributes:
        host_limits: the bytes of host memory that each pipeline rank may use.
        spent: the number of forwards that were simulated.
    """

    def __init__(self, choice: Choice, candidate: Candidate) -> None:
        profile, topology = choice.meshes.of(candidate.degrees)
        self._choice, self._candidate, self._plan = choice, candidate, candidate.plan(profile.ids)
        self._costs = profile.stage_costs(self._plan, candidate.rows)
        self._limits, self.host_limits = limits_of(self._plan, topology), host_limits_of(self._plan, topology)
        self._forwards, self.spent = choice.forwards(candidate), 0

    def found(self) -> Iterator[Ranked]:
        """Yield the plan with as little in host memory as it needs to fit, and then with as much as possible from the same ranks."""
        on_device = self._simulated(None)
        levels = None if on_device.simulated is None else self._levels(on_device)
        if levels is None:
            return
        deepest = tuple(len(LEVELS) - 1 if level else 0 for level in levels)
        for offload in dict.fromkeys(_offload(self._plan, self._costs, chosen) for chosen in (levels, deepest)):
            one = self._simulated(offload)
            if one.candidate.over is None and lacking(self._in_host(one), self.host_limits)[1] <= 0:
                seconds = min(on_device.seconds, one.seconds)  # moves never gain time, but times are rounded
                yield dataclasses.replace(one, candidate=dataclasses.replace(one.candidate, on_device=seconds))

    def _levels(self, on_device: Ranked) -> tuple[int, ...] | None:
        """Return the first level with which each pipeline rank fits; None if a rank fits with none of them, or all fit without."""
        levels = [0 if size <= limit else -1 for size, limit in zip(on_device.memory, self._limits, strict=True)]
        if min(levels) >= 0:
            return None
        last = None
        for level in range(1, len(LEVELS)):
            offload = _offload(self._plan, self._costs, [level if known < 0 else 0 for known in levels])
            if offload == last:  # nothing more than at the level before
                continue
            last, one = offload, self._simulated(offload)
            sizes, waiting = one.memory, self._in_host(one)
            for p, known in enumerate(levels):
                if known < 0 and sizes[p] <= self._limits[p] and waiting[p] <= self.host_limits[p]:
                    levels[p] = level
            if min(levels) >= 0:
                return tuple(levels)
        return None

    def _simulated(self, offload: jpipe.plan.HostMemory | None) -> Ranked:
        self.spent += self._forwards
        return self._choice.simulate(dataclasses.replace(self._candidate, offload=offload))

    def _in_host(self, one: Ranked) -> tuple[int, ...]:
        return one.candidate.most_of_replicas(one.simulated.host_bytes if one.simulated else (0,) * one.candidate.num_ranks)


def _offload(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], levels: Sequence[int]) -> jpipe.plan.HostMemory | None:
    """Return what waits in host memory at these levels of the pipeline ranks, if the plan has it and may move it."""
    stages: dict[jpipe.plan.Kept, list[int]] = {}
    for level, of_rank in zip(levels, plan.pipeline_ranks, strict=True):
        for s in of_rank:
            for what in LEVELS[level]:
                if _may_wait(plan, s, costs[s], what):
                    stages.setdefault(what, []).append(s)
    every = list(range(plan.depth))
    fields = {what: "all" if sorted(numbers) == every else sorted(numbers) for what, numbers in stages.items()}
    return jpipe.plan.HostMemory.model_validate(fields) if fields else None


def _may_wait(plan: jpipe.Plan, s: int, cost: jpipe.programs.StageCost, what: jpipe.plan.Kept) -> bool:
    """Return whether a stage has something that may wait in host memory, and the plan can move it."""
    rules = jpipe.schedules.SCHEDULES[plan.schedule]
    match what:
        case "optimizer":
            exists = cost.optimizer > 0
        case "versions":
            exists = rules.versions_alive(plan, s) > 1
        case "residuals":
            exists = cost.residuals > 0 and not rules.begins_fused(plan, s)
        case "stash":
            exists = cost.stash > 0 and rules.splits(plan, s)
    moved = jpipe.plan.HostMemory.model_validate({what: [s]})
    return exists and not excluded(plan.model_copy(update={"offload": moved}))
