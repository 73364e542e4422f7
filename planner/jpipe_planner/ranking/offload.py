"""Plans that keep parts of their state in host memory, derived from plans that do not fit.

Each rank that lacks memory gets the first of `LEVELS` with which it fits. Parts that move least often come first. The memory of a rank
depends neither on times nor on other ranks, so the same simulations decide for all ranks. The time of the moves follows from a simulation
of the whole plan, with the links to host memory.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence

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
"""The parts of the state in host memory at each level: nothing, then more and more."""
BASES = 12  # the most plans that are tried
MOST_IN_ALL = 48_000  # forwards in all simulations, after which no further plan is tried


def offload_bases(candidates: Iterable[Candidate], lacks_in_host: Callable[[Candidate], bool] = lambda _: False) -> list[Candidate]:
    """Return plans to try with host memory: plans that lack memory, or that recompute so that they fit.

    For each kind these are the plan that lacks least, and the fastest plan with equally many rows in a microbatch. Plans that do not fit
    even with host memory come last.
    """
    tight = [candidate for candidate in candidates if lacks_memory(candidate)]
    fastest = {
        (one.kind, one.rows): one
        for one in sorted(tight, key=lambda one: (lacks_in_host(one), one.seconds / one.batch, one.rank), reverse=True)
    }
    leanest = first_of_kinds(sorted(tight, key=lambda one: one.rank))
    bases = dict.fromkeys(base for one in leanest for base in (one, fastest[one.kind, one.rows]))
    return sorted(bases, key=lacks_in_host)[:BASES]


def find_offloads(choice: Choice, bases: Sequence[Candidate], share: float = 1.0) -> list[Ranked]:
    """Return plans that fit into a share of the memory with parts in host memory, with their recomputation and with the fastest policy."""
    found, spent, cheapest = list[Ranked](), 0, choice.profile.cheapest_policy(choice.topology)
    for base in bases:
        for policies in dict.fromkeys((base.policies, (cheapest,) * base.depth)):
            if spent <= MOST_IN_ALL:
                more, forwards = _offloads_of(choice, dataclasses.replace(base, policies=policies, over=None, offload=None), share)
                found += more
                spent += forwards
    return found


def _offloads_of(choice: Choice, candidate: Candidate, share: float) -> tuple[list[Ranked], int]:
    """Return the plan with the fewest parts in host memory that fits, the one with most parts there, and the simulated forwards."""
    profile, topology = choice.meshes.of(candidate.degrees)
    plan, found, forwards, spent = candidate.plan(profile.ids), list[Ranked](), choice.forwards(candidate), 0
    limits, host_limits = [share * limit for limit in limits_of(plan, topology)], host_limits_of(plan, topology)
    costs = profile.stage_costs(plan, candidate.rows)

    def simulated(offload: jpipe.plan.HostMemory | None) -> tuple[Ranked, tuple[int, ...]]:
        nonlocal spent
        spent += forwards
        one = choice.simulate(dataclasses.replace(candidate, offload=offload))
        return one, candidate.most_of_replicas(one.simulated.host_bytes if one.simulated else (0,) * candidate.num_ranks)

    if not any(host_limits):
        return found, spent
    on_device, _ = simulated(None)
    # for each pipeline rank the first level with which it fits; below 0: not found yet
    levels, last = [0 if size <= limit else -1 for size, limit in zip(on_device.memory, limits, strict=True)], None
    if on_device.simulated is None or min(levels) >= 0:
        return found, spent
    for level in range(1, len(LEVELS)):
        offload = _offload(plan, costs, [level if known < 0 else 0 for known in levels])
        if min(levels) >= 0 or offload == last:  # the same parts as at the level before
            continue
        last, (one, waiting) = offload, simulated(offload)
        for p, known in enumerate(levels):
            if known < 0 and one.memory[p] <= limits[p] and waiting[p] <= host_limits[p]:
                levels[p] = level
    if min(levels) < 0:
        return found, spent
    deepest = [len(LEVELS) - 1 if level else 0 for level in levels]
    for offload in dict.fromkeys(_offload(plan, costs, chosen) for chosen in (levels, deepest)):
        one, waiting = simulated(offload)
        if lacking(one.memory, limits)[1] <= 0 and lacking(waiting, host_limits)[1] <= 0:
            seconds = min(on_device.seconds, one.seconds)  # moves never save time, but times are rounded
            found.append(dataclasses.replace(one, candidate=dataclasses.replace(one.candidate, on_device=seconds)))
    return found, spent


def _offload(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], levels: Sequence[int]) -> jpipe.plan.HostMemory | None:
    """Return the parts in host memory for these levels of the ranks, except parts that the plan lacks or cannot move."""
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
    """Return whether a stage has the part `what` of the state, and the plan can move this part to host memory."""
    rules = jpipe.schedules.SCHEDULES[plan.schedule]
    exists = {
        "optimizer": cost.optimizer > 0,
        "versions": rules.versions_alive(plan.counted, s) > 1,
        "residuals": cost.residuals > 0 and not rules.begins_fused(plan.counted, s),
        "stash": cost.stash > 0 and rules.splits(plan.counted, s),
    }
    moved = jpipe.plan.HostMemory.model_validate({what: [s]})
    return exists[what] and not excluded(plan.model_copy(update={"offload": moved}))
