"""The memory of a plan from its compiled stages, instead of estimates from the layers."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import numpy as np

import jpipe
from jpipe import InputError
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
LONG, FEW = 16, (4, 8)  # a stage that repeats layers this many times is compiled with these numbers of repetitions instead
MOST_PERIOD = 4  # the most layers that are repeated together
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
    fullest rank is compiled. The memory of the other ranks is estimated. A stage of many equal layers is compiled with fewer of them
    (`compile_repeated`).

    `batch` has the specs of a whole batch, (inputs, labels). The scratch memory is correct for this kind of `devices`, even if the topology
    has another kind. New programs are added to `programs`, which other plans of the model can use.
    """
    plan, rows, programs = choice.plan(ranked), ranked.candidate.rows, {} if programs is None else programs
    (profile, topology), compiled = choice.meshes.of(ranked.candidate.degrees), dict[int, jpipe.programs.StageCost]()
    limits, estimates = limits_of(plan, topology), profile.stage_costs(plan, rows)
    like, on_meshes = equal_stages(plan, profile.costs(rows), profile.shared_costs), any(stage.mesh for stage in plan.stages)
    kinds = _kinds_of_layers(profile.costs(rows), profile.shared_costs)
    of_stages = [find_repeats([kinds[layer_id] for layer_id in stage.layers]) for stage in plan.stages if pipe.stack.traced is None]
    repeats = {s: repeated for s, repeated in enumerate(of_stages) if repeated is not None and not plan.stages[s].sum_parts}
    compile = partial(compile_repeated, pipe, repeats, batch, compiled_for=devices, programs=programs)
    fullest = plan.pipeline_ranks[max(range(len(ranked.memory)), key=ranked.memory.__getitem__)]
    needs = zip(plan.pipeline_ranks, ranked.memory, limits, strict=True)
    others = [] if on_meshes else [s for stages, size, limit in needs for s in stages if size > SURE * limit]
    for stages in (fullest, others):
        try:
            sizes = compile(stages={like[s] for s in stages} - compiled.keys())
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
        lacks = None if math.inf in limits else lacking(exact.memory, limits)[1]
        found = Compiled(exact, ranked.candidate.memory, lacks, ranks, bool(compiled.keys() & repeats.keys()))
        if not found.fits or compiled.keys() >= {like[s] for s in others}:
            break
    return found


@dataclasses.dataclass(frozen=True)
class Repeats:
    """The longest part of a stage that repeats: its first layer in the stage, the layers that are repeated, and how often they are."""

    first: int
    period: int
    count: int

    def fewer(self, layers: tuple[str, ...], count: int) -> tuple[str, ...]:
        """Return the layers of the stage with `count` repetitions. The first and the last ones stay, because their neighbours differ."""
        kept = self.first + (count - count // 2) * self.period
        return layers[:kept] + layers[kept + (self.count - count) * self.period :]


def find_repeats(kinds: Sequence[int]) -> Repeats | None:
    """Return the longest part of a stage that repeats, from the kinds of its layers; None if it is repeated less than `LONG` times."""
    found = Repeats(0, 1, 0)
    for period in range(1, MOST_PERIOD + 1):
        first = 0
        for end in range(period, len(kinds) + 1):
            if end == len(kinds) or kinds[end] != kinds[end - period]:
                found = max(found, Repeats(first, period, (end - first) // period), key=lambda one: one.period * one.count)
                first = end - period + 1
    return found if found.count >= LONG else None


def compile_repeated(
    pipe: jpipe.Pipeline, repeats: Mapping[int, Repeats], batch: Any, *, stages: Collection[int], **options: Any
) -> tuple[jpipe.programs.StageCost, ...]:
    """Return the costs of the stages of a pipeline. Some `stages` are compiled with other `options` of `jpipe.Pipeline.costs`.

    Stages that repeat layers are compiled with `FEW` repetitions. What XLA decides grows by equal bytes with each further repetition, so it
    is extrapolated. All other bytes follow from shapes.
    """
    long = {s: repeats[s] for s in stages if s in repeats}
    try:
        few = [_with_fewer(pipe, long, count).costs(batch, stages=sorted(long), **options) for count in FEW if long]
    except InputError:  # equal costs, but other shapes
        few, long = [], {}
    sizes = list(pipe.costs(batch, stages=sorted(set(stages) - long.keys()), **options))
    for s, repeated in long.items():
        sizes[s] = _extrapolated(sizes[s], [costs[s] for costs in few], repeated.count)
    return tuple(sizes)


def _with_fewer(pipe: jpipe.Pipeline, repeats: Mapping[int, Repeats], count: int) -> jpipe.Pipeline:
    """Return the pipeline of the model without some of the repetitions of its stages."""
    fewer = {s: repeated.fewer(pipe.plan.stages[s].layers, count) for s, repeated in repeats.items()}
    stages = [stage.model_copy(update={"layers": fewer.get(s, stage.layers)}) for s, stage in enumerate(pipe.plan.stages)]
    layers = {layer_id: pipe.stack.layers[layer_id] for stage in stages for layer_id in stage.layers}
    names = ("clip_global_norm", "clip_stage_norm", "skip_nonfinite", "ema_decay", "precision")
    options = {name: getattr(pipe, name) for name in names} | {"delay_correction": pipe.delay_factor}
    plan = pipe.plan.model_copy(update={"stages": tuple(stages)})
    return jpipe.Pipeline(pipe.stack.with_layers(layers), plan, pipe.loss, pipe.optimizer, **options)


def _extrapolated(size: jpipe.programs.StageCost, few: Sequence[jpipe.programs.StageCost], count: int) -> jpipe.programs.StageCost:
    """Return the cost of a stage with what XLA decides for `count` repetitions, from the costs of the stage with `FEW` repetitions."""
    share = Fraction(count - FEW[0], FEW[1] - FEW[0])
    low, high = few
    decided = {name: getattr(low, name) + math.ceil((getattr(high, name) - getattr(low, name)) * share) for name in _DECIDED}
    slices = (_extrapolated(of_slice, parts, count) for of_slice, *parts in zip(size.by_slice, low.by_slice, high.by_slice, strict=True))
    return dataclasses.replace(size, **decided, by_slice=tuple(slices))


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
    """
    plan, of_layers = plan.counted, _kinds_of_layers(costs, shared)
    rules = jpipe.schedules.SCHEDULES[plan.schedule]
    actions = (action for p in range(len(plan.pipeline_ranks)) for action in rules.computations(plan, p, 0, 0, 1))
    ops = {(action.stage, action.op) for action in actions}

    def kind(s: int) -> tuple[Any, ...]:
        stage, end = plan.stages[s], s if s in (0, plan.depth - 1) else None
        layers = [of_layers[layer_id] for layer_id in stage.layers]
        computed = {op for computing, op in ops if computing == s}
        return end, computed, rules.versions_alive(plan, s), stage.model_copy(update={"layers": ()}), layers

    kinds = [kind(s) for s in range(plan.depth)]
    return tuple(map(kinds.index, kinds))


def _kinds_of_layers(costs: Mapping[str, jpipe.programs.LayerCost], shared: Sequence[jpipe.programs.SharedCost]) -> dict[str, int]:
    """Return a number for each layer, which equal layers have in common. A layer that shares a parameter is equal to no other layer."""
    shares = {layer_id for parameter in shared for layer_id in parameter.layers}
    keys = [(layer_id if layer_id in shares else None, cost) for layer_id, cost in costs.items()]
    return dict(zip(costs, map(keys.index, keys), strict=True))


def _rejected_by_compiler(ranked: Ranked, limits: Sequence[float], plan: jpipe.Plan, compile: Callable[[int], object]) -> Compiled:
    """Return the result if XLA rejects a program: the first rank with such a stage lacks as many bytes; the others are estimated."""
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
