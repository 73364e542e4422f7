"""PipeDream's problem as its paper states it, its solutions, and their evaluation, with the price of the paper.

Devices are numbered innermost first. Stages take contiguous ranges of devices without gaps, from device 0 on; the last devices may stay
idle. A sum over the replicas of a stage uses the slowest link of all levels that its range crosses; a cut uses the slowest link of all
levels that the ranges of both its stages cross together. Where devices differ, a stage is as slow as its slowest device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

import jpipe
from jpipe.plan import repeats_forward
from jpipe.schedules import PlainShape, PlanOptions
from jpipe_planner import Topology
from jpipe_planner.cost.devices import DeviceRanges, Kind
from jpipe_planner.cost.memory import stage_bytes, temporary_bytes, waiting_gradients, waiting_inputs
from jpipe_planner.cost.price import all_reduce_seconds
from jpipe_planner.search.pipedream import fastest_stages

Number = Any  # float or array

SCHEDULE = jpipe.schedules.SCHEDULES["pipedream"]
"""The schedule of all solutions."""

TIE = 1e-9
"""Relative difference below which times count as equal."""


def cut_seconds(size: Number, link: jpipe.Link) -> Number:
    """Return the seconds in which the outputs of a microbatch cross a cut, or their gradients return: links are full duplex.

    The latency is not included: it does not slow the pipeline down as long as enough microbatches are in flight.
    """
    return size / link.bandwidth


def stage_seconds(compute: Number, update: Number, all_reduce: Number, replicas: Number, microbatches: Number) -> Number:
    """Return the seconds per microbatch that a stage of a pipeline in steady state needs, divided among its replicas.

    Per update each replica computes M_s / r_s microbatches and updates once. The sum of the gradients overlaps with the forward and
    backward after it, and the stage waits for what remains of it. With M_s = r_s that is the larger of compute and all-reduce, as in
    PipeDream (SOSP 2019), section 3.1.

    Args:
        compute: seconds of the forward and backward of one microbatch.
        update: seconds of an update.
        all_reduce: seconds to sum the gradients over the replicas.
        replicas: r_s.
        microbatches: M_s, microbatches per update over all replicas.
    """
    microbatches_per_replica = microbatches / replicas
    return (microbatches_per_replica * compute + update + np.maximum(all_reduce - compute, 0.0)) / microbatches


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
    """

    layers: Sequence[jpipe.programs.LayerCost]
    topology: Topology
    microbatches: int | Literal["replicas"] = "replicas"
    inputs: int = 0
    labels: int = 0
    dispatch: float = 0.0

    @cached_property
    def ranges(self) -> DeviceRanges:
        """The kinds of all ranges of devices."""
        return DeviceRanges(self.topology)

    def kind(self, stage: "Placed") -> Kind:
        """Return the kind of the devices of a stage."""
        return self.ranges.kind(stage.first, stage.first + stage.replicas - 1)

    def microbatches_per_update(self, replicas: Number) -> Number:
        """Return M_s of a stage."""
        return replicas if self.microbatches == "replicas" else self.microbatches

    def shape(self, replicas: tuple[int, ...]) -> PlainShape:
        """Return the part of a solution that the schedule reads, for these numbers of replicas."""
        if self.microbatches == "replicas":
            return PlainShape(SCHEDULE.name, math.lcm(*replicas), replicas, PlanOptions(update_every="replicas"))
        return PlainShape(SCHEDULE.name, self.microbatches, replicas)


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
    """

    stages: tuple[Placed, ...]
    seconds: float
    bound: tuple[Literal["stage", "cut"], int]
    memory: tuple[int, ...]

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
    return Partition(tuple(stages), seconds, bound, memory_of(problem, stages))


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


def search_pipedream(problem: Problem) -> Partition:
    """Return the fastest stages; of equally fast ones those with the fewest stages, then devices.

    Args:
        problem: the costs and the devices.
    """
    layers, devices = problem.layers, problem.topology.num_devices
    first, end = np.triu_indices(len(layers) + 1, 1)
    compute, update, summed = (
        np.concatenate([[0.0], np.cumsum(values)])
        for values in (
            [layer.forward + layer.backward for layer in layers],
            [layer.update for layer in layers],
            [float(layer.summed) for layer in layers],
        )
    )
    outputs = np.array([0, *(layer.outputs for layer in layers[:-1]), 0])

    def seconds(device: int, replicas: int) -> Any:
        last, kind = device + replicas - 1, problem.ranges.kind(device, device + replicas - 1)
        sums = all_reduce_seconds(summed[end] - summed[first], replicas, kind.link)
        computes = kind.slowness * (compute[end] - compute[first] + 2 * problem.dispatch)
        updates = kind.slowness * (update[end] - update[first] + problem.dispatch)
        times = stage_seconds(computes, updates, sums, replicas, problem.microbatches_per_update(replicas))
        for cut, ends in ((first, (device - 1, last)), (end, (device, last + 1))):
            if ends[0] >= 0 and ends[1] < devices:
                times = np.maximum(times, cut_seconds(outputs[cut], problem.ranges.kind(*ends).link))
        matrix = np.full((len(layers) + 1, len(layers) + 1), np.inf)
        matrix[first, end] = times
        return matrix

    every = problem.microbatches
    counts = [r for r in range(1, devices + 1) if every == "replicas" or every % r == 0]
    found = fastest_stages(seconds, len(layers), devices, counts, min(devices, len(layers)))
    best = min(one.seconds for one in found)
    chosen = next(one for one in found if one.seconds <= best * (1 + TIE))
    firsts = np.cumsum([0, *chosen.replicas]).tolist()
    stops = (*chosen.starts[1:], len(layers))
    return evaluate_partition(problem, list(map(Placed, chosen.starts, stops, firsts, chosen.replicas)))
