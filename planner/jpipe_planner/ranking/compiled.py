"""The memory of a plan from its compiled stages, instead of the sum over layers."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import jpipe
from jpipe_planner.cost.devices import lacking, limits_of
from jpipe_planner.cost.memory import stage_bytes, waiting_gradients, waiting_inputs
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.machine.compiling import bytes_beyond_memory
from jpipe_planner.ranking.choose import Choice, Ranked

__all__ = ["Compiled", "compile_stages"]

_AT_ONCE = 8  # stages that are compiled at once, without the fullest pipeline rank first
_TIMES = ("forward", "backward", "backward_input", "backward_weight", "update")


@dataclass(frozen=True)
class Compiled:
    """The memory of a plan's compiled stages.

    Attributes:
        ranked: the plan, simulated with the exact bytes of its stages and the scratch memory that XLA reports for its programs.
        estimated: bytes of each pipeline rank, simulated with the profile.
        lacking: the most bytes that a pipeline rank lacks, 0 or less if the plan fits; None if memory is not limited.
        ranks: the pipeline ranks whose stages are compiled; the memory of the other ranks is estimated.
    """

    ranked: Ranked
    estimated: tuple[int, ...]
    lacking: float | None
    ranks: tuple[int, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        """The relative error of the estimate for each pipeline rank; above 0 if it was too high."""
        return tuple(estimate / true - 1 for estimate, true in zip(self.estimated, self.ranked.memory, strict=True))

    @property
    def fits(self) -> bool:
        """Whether all pipeline ranks fit."""
        return self.lacking is None or self.lacking <= 0


Programs = dict[Any, Any]
"""Compiled programs, as `jpipe.Pipeline.costs` keeps them."""


def compile_stages(
    choice: Choice,
    ranked: Ranked,
    pipe: jpipe.Pipeline,
    batch: Any,
    devices: jax.Device | Sequence[jax.Device],
    programs: Programs | None = None,
) -> Compiled:
    """Compile the stages of a plan, run nothing, and simulate the plan again with the exact memory.

    Of a plan of many stages those of the fullest pipeline rank are compiled first, and the other stages only if these fit. The stages of a
    plan on meshes take longer to compile and are mostly equal, so the other ranks are not compiled: their memory is estimated.

    Args:
        choice: the ranking from which the plan comes.
        ranked: the plan.
        pipe: a pipeline of that plan.
        batch: specs of a whole batch, (inputs, labels).
        devices: what to compile for, as `compiled_for` of `jpipe.Pipeline.costs`; scratch memory is that of their kind, even if the
            topology has another kind.
        programs: programs compiled for other plans of the model; new ones are added.
    """
    programs = {} if programs is None else programs
    plan = choice.plan(ranked)
    every, fullest = tuple(range(plan.depth)), plan.pipeline_ranks[max(range(len(ranked.memory)), key=ranked.memory.__getitem__)]
    on_meshes = any(stage.mesh for stage in plan.stages)
    if on_meshes or plan.depth > _AT_ONCE:
        first = _with_compiled(choice, ranked, pipe, batch, devices, fullest, programs)
        if on_meshes or not first.fits:
            return first
    return _with_compiled(choice, ranked, pipe, batch, devices, every, programs)


def _with_compiled(
    choice: Choice,
    ranked: Ranked,
    pipe: jpipe.Pipeline,
    batch: Any,
    devices: jax.Device | Sequence[jax.Device],
    stages: Collection[int],
    programs: Programs,
) -> Compiled:
    """Do the work of `compile_stages` with only these stages compiled."""
    plan = choice.plan(ranked)
    profile, topology = choice.meshes.of(ranked.candidate.degrees)
    limits = limits_of(plan, topology)
    costs, estimates = [], profile.stage_costs(plan, ranked.candidate.rows)
    try:
        sizes = pipe.costs(batch, compiled_for=devices, stages=stages, programs=programs)
    except jax.errors.JaxRuntimeError as error:
        if math.inf in limits or bytes_beyond_memory(error) is None:
            raise
        return _rejected_by_compiler(ranked, limits, plan, lambda s: pipe.costs(batch, compiled_for=devices, stages=[s], programs=programs))
    for s, (size, estimate) in enumerate(zip(sizes, estimates, strict=True)):
        names = _TIMES if s in stages else (*_TIMES, "residuals", "stash", "temporary")
        costs.append(dataclasses.replace(size, **{name: getattr(estimate, name) for name in names}))
    exact = dataclasses.replace(ranked, simulated=simulate_plan(plan, costs, topology, choice.global_norm))
    if exact.simulated is None:  # too long to simulate: the closed form, with the exact bytes
        exact = Ranked(dataclasses.replace(ranked.candidate, memory=closed_form_bytes(plan, costs)))
    compiled_ranks = tuple(p for p, pipeline_ranks in enumerate(plan.pipeline_ranks) if set(pipeline_ranks) <= set(stages))
    return Compiled(exact, ranked.candidate.memory, None if math.inf in limits else lacking(exact.memory, limits)[1], compiled_ranks)


def _rejected_by_compiler(ranked: Ranked, limits: Sequence[float], plan: jpipe.Plan, compile: Callable[[int], object]) -> Compiled:
    """Return the result for a plan of which XLA does not compile a program, because it exceeds the memory, as XLA says of TPUs.

    The first rank of which `compile` fails for a stage lacks what the program does; the memory of the other ranks is estimated.
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


def closed_form_bytes(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost]) -> tuple[int, ...]:
    """Return the peak bytes of a device of each stage, in a pipeline whose stages are about equally fast."""
    rules, shared, sizes = jpipe.schedules.SCHEDULES[plan.schedule], jpipe.programs.uses_by_costs(costs).get("shared_parameters", ()), []
    for s, (cost, replicas) in enumerate(zip(costs, plan.replicas, strict=True)):
        ahead = rules.in_flight(plan, s)
        sent = rules.in_flight(plan, s - 1) * plan.replicas[s - 1] if s else 0
        fused = rules.fuses(plan, s)  # residuals are scratch memory of the one program
        sizes.append(
            stage_bytes(
                weights=cost.trained,
                optimizer=cost.optimizer + cost.kept,
                state=cost.state + cost.frozen,
                residuals=0 if fused else cost.residuals,
                inputs=cost.inputs,
                outputs=cost.outputs,
                temporary=cost.temporary,
                labels=cost.labels,
                versions=rules.versions_alive(plan, s),
                in_flight=ahead,
                waiting=waiting_inputs(ahead, replicas, sent),
                accumulators=cost.accumulators,
                replicas=replicas,
                gradients=waiting_gradients(replicas, plan.replicas[s + 1] if s + 1 < plan.depth else 0),
                exchanged=sum(len(stages) * size for stages, size in zip(shared, cost.shared, strict=True) if s in stages),
            )
        )
    return tuple(int(size) for size in sizes)
