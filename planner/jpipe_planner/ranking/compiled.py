"""The memory of a plan from its compiled stages, instead of estimates from the layers."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

import jpipe
from jpipe_planner.cost.devices import TIMES, lacking, limits_of
from jpipe_planner.cost.shape import schedule_facts
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.machine.compiling import bytes_beyond_memory
from jpipe_planner.ranking.choose import Choice, Ranked
from jpipe_planner.ranking.find import Compiled
from jpipe_planner.search.candidate import Candidate
from jpipe_planner.search.estimate import memory_of
from jpipe_planner.search.stages import Stages

__all__ = ["compile_stages"]

SURE = 0.8  # a rank with an estimate below this share of the memory fits for sure: estimates are at most 17% too low
_DECIDED = ("residuals", "stash", "temporary")  # costs that only the compiler determines: temporaries, and on meshes all three
_OF_STAGES = [field.name for field in dataclasses.fields(Stages) if field.name in jpipe.programs.StageCost.__dataclass_fields__]


def compile_stages(
    choice: Choice,
    ranked: Ranked,
    pipe: jpipe.Pipeline,
    batch: Any,
    devices: jax.Device | Sequence[jax.Device],
    programs: dict[Any, Any] | None = None,
) -> Compiled:
    """Compile the stages of a plan without running them, and simulate the plan again with the exact memory.

    The stages of the fullest pipeline rank are compiled first. If they fit, the stages of all ranks with estimates above the share `SURE`
    of the memory are compiled. Of equal stages only the first is compiled. Stages on meshes take longer to compile, so there only the
    fullest rank is compiled. The memory of the other ranks is estimated.

    Args:
        choice: the ranking from which the plan comes.
        ranked: the plan.
        pipe: a pipeline of that plan.
        batch: specs of a whole batch, (inputs, labels).
        devices: the devices to compile for, as `compiled_for` of `jpipe.Pipeline.costs`. The scratch memory is correct for this kind of
            devices, even if the topology has another kind.
        programs: programs compiled for other plans of the model; new ones are added.
    """
    plan, rows, programs = choice.plan(ranked), ranked.candidate.rows, {} if programs is None else programs
    (profile, topology), compiled = choice.meshes.of(ranked.candidate.degrees), dict[int, jpipe.programs.StageCost]()
    limits, estimates = limits_of(plan, topology), profile.stage_costs(plan, rows)
    like, on_meshes = equal_stages(plan, profile.costs(rows), profile.shared_costs), any(stage.mesh for stage in plan.stages)
    compile = partial(pipe.costs, batch, compiled_for=devices, programs=programs)
    fullest = plan.pipeline_ranks[max(range(len(ranked.memory)), key=ranked.memory.__getitem__)]
    needs = zip(plan.pipeline_ranks, ranked.memory, limits, strict=True)
    others = [] if on_meshes else [s for stages, size, limit in needs for s in stages if size > SURE * limit]
    for stages in (fullest, others):
        try:
            sizes = compile(stages=sorted({like[s] for s in stages} - compiled.keys()))
        except jax.errors.JaxRuntimeError as error:
            if math.inf in limits or bytes_beyond_memory(error) is None:
                raise
            return _rejected_by_compiler(ranked, limits, plan, lambda s: compile(stages=[s]))
        compiled |= {s: sizes[s] for s in {like[s] for s in stages} - compiled.keys()}
        decided = [compiled.get(first, estimate) for first, estimate in zip(like, estimates, strict=True)]
        costs = [*map(_exact, sizes, estimates, decided)]
        exact = dataclasses.replace(ranked, simulated=simulate_plan(plan, costs, topology, choice.global_norm))
        if exact.simulated is None:  # too long to simulate: the closed form, with the exact bytes
            exact = Ranked(dataclasses.replace(ranked.candidate, memory=closed_form_bytes(ranked.candidate, costs)))
        ranks = tuple(p for p, of_rank in enumerate(plan.pipeline_ranks) if compiled.keys() >= {like[s] for s in of_rank})
        found = Compiled(exact, ranked.candidate.memory, None if math.inf in limits else lacking(exact.memory, limits)[1], ranks)
        if not found.fits or compiled.keys() >= {like[s] for s in others}:
            break
    return found


def _exact(
    size: jpipe.programs.StageCost, estimate: jpipe.programs.StageCost, decided: jpipe.programs.StageCost
) -> jpipe.programs.StageCost:
    """Return the cost of a stage with its exact bytes, the estimated times, and what the compiler decided."""
    times, compiled = ({name: getattr(cost, name) for name in names} for cost, names in ((estimate, TIMES), (decided, _DECIDED)))
    slices = tuple(map(_exact, size.by_slice, estimate.by_slice, decided.by_slice))
    return dataclasses.replace(size, **times, **compiled, by_slice=slices)


def equal_stages(
    plan: jpipe.Plan, costs: Mapping[str, jpipe.programs.LayerCost], shared: Sequence[jpipe.programs.SharedCost] = ()
) -> tuple[int, ...]:
    """Return for each stage of a plan the first stage that has the same programs, possibly the stage itself.

    Equal stages compute the same ops, keep the same number of versions, and have layers with the same costs. The first and the last stage
    are equal to no other stage, and a layer that shares a parameter is equal to no other layer.

    Args:
        plan: the plan.
        costs: the costs of each layer.
        shared: the parameters that layers share.
    """
    plan = plan.counted
    rules, shares = jpipe.schedules.SCHEDULES[plan.schedule], {layer_id for parameter in shared for layer_id in parameter.layers}
    actions = (action for p in range(len(plan.pipeline_ranks)) for action in rules.computations(plan, p, 0, 0, 1))
    ops = {(action.stage, action.op) for action in actions}

    def kind(s: int) -> tuple[Any, ...]:
        stage, end = plan.stages[s], s if s in (0, plan.depth - 1) else None
        layers = [(layer_id if layer_id in shares else None, costs[layer_id]) for layer_id in stage.layers]
        computed = {op for computing, op in ops if computing == s}
        return end, computed, rules.versions_alive(plan, s), stage.model_copy(update={"layers": ()}), layers

    kinds = [kind(s) for s in range(plan.depth)]
    return tuple(map(kinds.index, kinds))


def _rejected_by_compiler(ranked: Ranked, limits: Sequence[float], plan: jpipe.Plan, compile: Callable[[int], object]) -> Compiled:
    """Return the result for a plan that XLA cannot compile because a program exceeds the memory, as on TPUs.

    The first rank with a stage that `compile` rejects lacks as many bytes as the program. The memory of the other ranks is estimated.
    """
    memory = list(ranked.memory)
    for p, stages in enumerate(plan.pipeline_ranks):
        try:
            for s in stages:
                compile(s)
        except jax.errors.JaxRuntimeError as error:
            if (sizes := bytes_beyond_memory(error)) is None:
                raise
            memory[p] = math.ceil(max(memory[p], limits[p]) + sizes[0] - sizes[1])
            break
    exact = Ranked(dataclasses.replace(ranked.candidate, memory=tuple(memory)))
    return Compiled(exact, ranked.candidate.memory, lacking(memory, limits)[1], tuple(range(len(memory))))


def closed_form_bytes(candidate: Candidate, costs: Sequence[jpipe.programs.StageCost]) -> tuple[int, ...]:
    """Return for each stage the peak bytes of a device, from the costs of the stages, if all stages are about equally fast."""
    facts, shared = schedule_facts(candidate.shape), jpipe.programs.uses_by_costs(costs).get("shared_parameters", ())
    assert facts is not None, "a candidate is legal"
    exchanged = [
        sum(len(holders) * size for holders, size in zip(shared, cost.shared, strict=True) if s in holders) for s, cost in enumerate(costs)
    ]
    known: dict[str, Any] = {name: np.array([getattr(cost, name) for cost in costs]) for name in _OF_STAGES}
    known["optimizer"] += np.array([cost.kept for cost in costs])
    stages = Stages(**known, ahead=0, fusing=1.0, fused=known["temporary"], exchanged=np.array(exchanged))
    return tuple(map(int, memory_of(stages, facts, np.array(candidate.replicas))))
