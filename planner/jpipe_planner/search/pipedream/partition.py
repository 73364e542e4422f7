"""The problem of the PipeDream search, its solutions, and a straightforward evaluation of any solution.

Devices are numbered innermost first. Stages take contiguous ranges of devices without gaps, from device 0 on; the last devices may stay
idle. A sum over the replicas of a stage uses the slowest link of all levels that its range crosses; a cut uses the slowest link of all
levels that the ranges of both its stages cross together. Where devices differ, a stage is as slow as its slowest device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

import jpipe
from jpipe.plan import repeats_forward
from jpipe.schedules import NO_OPTIONS, PlainShape, PlanOptions
from jpipe_planner.cost.devices import DeviceRanges, Kind, lacking
from jpipe_planner.cost.memory import stage_bytes, temporary_bytes, waiting_gradients, waiting_inputs
from jpipe_planner.cost.price import Number, all_reduce_seconds, cut_seconds, stage_seconds
from jpipe_planner.machine.topology import Topology

SCHEDULE = jpipe.schedules.SCHEDULES["pipedream"]
"""The schedule of all solutions."""


@dataclass(frozen=True)
class Problem:
    """The layers to cut, and the machines.

    Attributes:
        layers: the costs of each layer for one microbatch.
        topology: the devices.
        microbatches: M, microbatches per update over all replicas, a multiple of the replicas of every stage; "replicas": each stage
            updates after one microbatch of each of its replicas, whose number is free.
        inputs: bytes of one microbatch's inputs.
        labels: bytes of its labels.
        dispatch: seconds for each forward, backward and update of a stage, in addition to its layers.
        memory: bytes of a device, where devices differ of the usual one; None: not limited.
        policies: recomputation policies that a stage may have. Each stage takes the cheapest that fits; ties go to the first.
        sync_state: as in `jpipe.Plan`.
        options: the options of the schedule, except `update_every`, which follows from `microbatches`; only `evaluate_partition` reads
            them, the searches do not.

    Raises:
        InputError: there is no policy, or memory is limited and a layer has no residual bytes for a policy.
    """

    layers: Sequence[jpipe.programs.LayerCost]
    topology: Topology
    microbatches: int | Literal["replicas"] = "replicas"
    inputs: int = 0
    labels: int = 0
    dispatch: float = 0.0
    memory: float | None = None
    policies: tuple[str, ...] = ("none",)
    sync_state: bool = True
    options: PlanOptions = NO_OPTIONS

    def __post_init__(self) -> None:
        if not self.policies:
            raise jpipe.InputError("policies: expected at least one recomputation policy, found none; 'none' is one")
        for n, layer in enumerate(self.layers) if self.memory is not None else ():
            for policy in set(self.policies) - {"full", *layer.residuals}:
                raise jpipe.InputError(
                    f"layer costs: layer {n} has no residual bytes for '{policy}', found {sorted(layer.residuals)}; leave out this policy"
                )

    @cached_property
    def ranges(self) -> DeviceRanges:
        """The kinds of all ranges of devices."""
        return DeviceRanges(self.topology)

    def kind(self, stage: "Placed") -> Kind:
        """Return the kind of the devices of a stage."""
        return self.ranges.kind(stage.first, stage.first + stage.replicas - 1)

    def limit(self, stage: "Placed") -> float:
        """Return the bytes of the device of a stage with the least memory; infinity: not limited."""
        return math.inf if self.memory is None else self.memory * self.kind(stage).share

    def microbatches_per_update(self, replicas: Number) -> Number:
        """Return M_s of a stage."""
        return replicas if self.microbatches == "replicas" else self.microbatches

    def versions(self, in_flight: Number, replicas: Number) -> Number:
        """Return the weight versions alive at a stage; for arrays too."""
        return jpipe.schedules.pipedream_versions(in_flight, replicas, replicas > 1, self.microbatches_per_update(replicas))

    def shape(self, replicas: tuple[int, ...]) -> PlainShape:
        """Return the part of a solution that the schedule reads, for these numbers of replicas."""
        if self.microbatches == "replicas":
            options = self.options.model_copy(update={"update_every": "replicas"})
            return PlainShape(SCHEDULE.name, math.lcm(*replicas), replicas, options)
        return PlainShape(SCHEDULE.name, self.microbatches, replicas, self.options)


class Placed(NamedTuple):
    """A stage and its devices.

    Attributes:
        start: its first layer.
        stop: one past its last layer.
        first: its first device.
        replicas: its number of devices.
        recompute: its recomputation policy.
    """

    start: int
    stop: int
    first: int
    replicas: int
    recompute: str = "none"


@dataclass(frozen=True)
class Partition:
    """A way to cut and place the layers.

    Attributes:
        stages: the stages in order.
        seconds: seconds per microbatch, in steady state.
        bound: what limits the speed: ("stage", s), or ("cut", s) for the cut after stage s.
        memory: peak bytes of a device of each stage.
        over: the stage that lacks most memory and how many bytes; None: it fits.
    """

    stages: tuple[Placed, ...]
    seconds: float
    bound: tuple[Literal["stage", "cut"], int]
    memory: tuple[int, ...]
    over: tuple[int, int] | None = None

    @property
    def devices(self) -> int:
        """The number of devices that it uses."""
        return self.stages[-1].first + self.stages[-1].replicas

    def plan(self, ids: Sequence[str], problem: Problem) -> jpipe.Plan:
        """Return the partition as a `jpipe.Plan`.

        Args:
            ids: the layer ids, in order.
            problem: the problem that it solves.
        """
        shape = problem.shape(tuple(s.replicas for s in self.stages))
        stages = [{"layers": tuple(ids[s.start : s.stop]), "replicas": s.replicas, "recompute": s.recompute} for s in self.stages]
        return jpipe.Plan(
            schedule=shape.schedule,
            microbatches=shape.microbatches,
            stages=stages,
            sync_state=problem.sync_state,
            **dict(shape.options),
        )


def evaluate_partition(problem: Problem, stages: Sequence[Placed]) -> Partition:
    """Price any stages and count their memory, one by one: the reference for the searches.

    Args:
        problem: the costs and the devices.
        stages: all layers in order, on devices without a gap.
    """
    times: list[tuple[float, tuple[Literal["stage", "cut"], int]]] = []
    times += [(placed_seconds(problem, stage), ("stage", s)) for s, stage in enumerate(stages)]
    for s, (before, after) in enumerate(pairwise(stages)):
        link = problem.ranges.kind(before.first, after.first + after.replicas - 1).link
        times.append((cut_seconds(problem.layers[before.stop - 1].outputs, link), ("cut", s)))
    seconds, bound = max(times, key=lambda time: time[0])
    memory = memory_of(problem, stages)
    worst, lacks = lacking(memory, [problem.limit(stage) for stage in stages])
    return Partition(tuple(stages), seconds, bound, memory, (worst, math.ceil(lacks)) if lacks > 0 else None)


def placed_seconds(problem: Problem, stage: Placed) -> float:
    """Return the seconds per microbatch of one stage.

    Args:
        problem: the costs and the devices.
        stage: its layers and its devices.
    """
    layers = problem.layers[stage.start : stage.stop]
    recomputation = sum(layer.forward for layer in layers) if repeats_forward(stage.recompute) else 0.0
    compute = sum(layer.forward + layer.backward for layer in layers) + recomputation + 2 * problem.dispatch
    kind = problem.kind(stage)
    summed = all_reduce_seconds(sum(layer.summed for layer in layers), stage.replicas, kind.link)
    update = sum(layer.update for layer in layers) + problem.dispatch
    return float(
        stage_seconds(
            kind.slowness * compute, kind.slowness * update, summed, stage.replicas, problem.microbatches_per_update(stage.replicas)
        )
    )


def memory_of(problem: Problem, stages: Sequence[Placed]) -> tuple[int, ...]:
    """Return the peak bytes of a device of each stage.

    Args:
        problem: the costs.
        stages: all layers in order.
    """
    shape = problem.shape(tuple(stage.replicas for stage in stages))
    in_flight = [SCHEDULE.in_flight(shape, s) for s in range(len(stages))]
    sizes = []
    for s, (stage, ahead) in enumerate(zip(stages, in_flight, strict=True)):
        layers = problem.layers[stage.start : stage.stop]
        last = stage.stop == len(problem.layers)
        inputs = problem.layers[stage.start - 1].outputs if stage.start else problem.inputs
        unchanged = _residuals(layers, "none")
        residuals = inputs if stage.recompute == "full" else _residuals(layers, stage.recompute)
        scratch = max(layer.temporary for layer in layers) + sum(layer.temporary_more for layer in layers[:-1])
        everything = _everything(layers)
        residuals = 0 if last and ahead == 1 else residuals  # forward and backward are one program
        sent = in_flight[s - 1] * stages[s - 1].replicas if s else 0
        sizes.append(
            stage_bytes(
                weights=sum(layer.trained for layer in layers),
                optimizer=sum(layer.optimizer for layer in layers),
                state=sum(layer.state + layer.frozen for layer in layers),
                residuals=residuals,
                inputs=inputs,
                outputs=0 if last else layers[-1].outputs,
                temporary=scratch if residuals == unchanged else temporary_bytes(scratch, everything, unchanged, residuals, inputs),
                labels=problem.labels if last else 0,
                versions=SCHEDULE.versions_alive(shape, s),
                in_flight=ahead,
                waiting=waiting_inputs(ahead, stage.replicas, sent),
                accumulators=sum(layer.summed for layer in layers),
                replicas=stage.replicas,
                gradients=waiting_gradients(stage.replicas, 0 if last else stages[s + 1].replicas),
                ahead=sum(layer.ahead for layer in layers),
            )
        )
    return tuple(int(size) for size in sizes)


def _everything(layers: Sequence[jpipe.programs.LayerCost]) -> int | None:
    """Return the scratch memory of a backward that makes all residuals of these layers itself; None: not known."""
    if layers[-1].remaking is None:
        return None
    return layers[-1].remaking + sum(layer.remaking_next for layer in layers[-2:-1]) + sum(layer.remaking_more for layer in layers[:-2])


def _residuals(layers: Sequence[jpipe.programs.LayerCost], policy: str) -> int:
    return sum(layer.residuals.get(policy, 0) for layer in layers) - sum(layer.shared.get(policy, 0) for layer in layers[:-1])
