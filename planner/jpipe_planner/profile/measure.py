"""Measured profiles: every distinct layer compiled as a pipeline compiles it, and timed on a device of this process.

Weights and most inputs are noise, so host callbacks that no result needs are left out.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import jpipe
from jpipe.context import without_mesh
from jpipe_planner.profile.analyze import PROGRAMS
from jpipe_planner.profile.bench import IN_ONE, Bench, ByProgram, Programs, Together, neighbours
from jpipe_planner.profile.compose import profile_of
from jpipe_planner.profile.model import POLICIES, Batch, Costs, Meter, Model, Progress, count_bytes, parts_of_bytes
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.scratch import ScratchPrograms, compiling_threads

FEWEST = 3  # repetitions, even if the time is over
SHORT = 2e-4  # seconds; shorter programs are timed in groups


@without_mesh()
def measure(
    stack: jpipe.LayerStack,
    batch: Batch,
    loss: Callable[[Any, Any], tuple[jax.Array, jax.Array]],
    optimizer: optax.GradientTransformation,
    sizes: Sequence[int],
    *,
    policies: Sequence[str] = POLICIES,
    device: jax.Device | None = None,
    ema_decay: float | None = None,
    delay_correction: str | float | None = None,
    repetitions: int = 15,
    seconds: float = 20.0,
    progress: Progress | None = None,
    precision: jpipe.Precision | None = None,
    in_slices: bool = False,
) -> Profile:
    """Profile a model on a device of this process.

    Each distinct layer is compiled as a separate stage. The stages of all sizes run in turns, so that a slow moment of the machine affects
    all of them. So the device must hold each layer at each size, with its gradients, optimizer state and residuals. Each time is a median
    minus the time of a stage without work, which is the profile's `dispatch`. Neighbours that are too short to be timed alone are timed as
    one stage, and this time is split among them in proportion to their FLOPs.

    A program that is waited for takes longer than one in a pipeline. So three neighbours, if possible equal ones, also run as one stage,
    microbatch after microbatch, at the smallest and the largest size, with and without recomputation. All times are scaled to theirs.

    Example:
        ```python
        profile = measure(stack, lambda rows: (inputs[:rows], labels[:rows]), loss, optax.adamw(1e-3), sizes=(1, 4, 16))
        plans = find_plans(profile, local_topology(), batch=64)
        ```

    Args:
        stack: the model.
        batch: `rows -> (inputs, labels)` of a microbatch. If these are arrays, the first layer and the loss get their values.
        loss: `(outputs, labels) -> (sum, weight)`.
        optimizer: any optimizer that `jpipe.Pipeline` accepts.
        sizes: the microbatch sizes, in rows.
        policies: the recomputation policies for which residuals are counted.
        device: the device; by default the first of this process.
        repetitions: the most repetitions of each program; at least 3.
        seconds: the total time for all sizes, without compiling, after which no further repetition begins.
        ema_decay, delay_correction, precision: as in `jpipe.Pipeline`. The first two add to the optimizer state.
        in_slices: whether the plans cut rows into slices, as in `Model`.
        progress: called with the number of finished parts of the work, and their total number.

    Raises:
        InputError: layers, batch, loss and optimizer do not fit together.
    """
    model = Model(stack, batch, loss, optimizer, tuple(sizes), precision or jpipe.Precision(), ema_decay, delay_correction, in_slices)
    device, single_layers = device or jax.local_devices()[0], [(layer_id,) for layer_id in model.distinct]
    meter = Meter(progress, parts_of_bytes(model) + len(model.sizes))
    with compiling_threads() as pool:
        programs = Programs(model, device, pool, meter)
        for rows in model.sizes:
            programs.begin(single_layers, rows)
        stage_costs = count_bytes(model, policies, meter)  # while XLA compiles
        meter.wait()  # nothing else runs while stages are timed
        single, groups = {rows: Bench(programs, single_layers, rows) for rows in model.sizes}, {}
        for rows, bench in single.items():
            bench.time(FEWEST)
            meter.step()
            groups[rows] = short_groups(model.stack.ids, model.first_equal, bench.medians()[0])
            programs.begin(groups[rows], rows)
        meter.wait()
    benches = {rows: single[rows] if groups[rows] == single_layers else Bench(programs, groups[rows], rows) for rows in model.sizes}
    together = {rows: _Neighbours(model, rows, device, single[rows].medians()[0]) for rows in {model.sizes[0], model.sizes[-1]}}
    end = time.perf_counter() + seconds
    for n in range(repetitions):  # all sizes in turns, because a machine may be slow for several seconds
        if n >= FEWEST and time.perf_counter() > end:
            break
        meter.expect(len(benches))
        for rows, bench in benches.items():
            bench.time(1)
            if rows in together:
                together[rows].time()
            meter.step()
    costs = dict[tuple[str, int], Costs]()
    for rows, bench in benches.items():
        costs |= _layer_costs(model, rows, bench.medians()[0], single[rows].flops)
    dispatch = statistics.median(bench.medians()[1] for bench in benches.values())
    costs = _as_together(costs, {rows: each.ratios(costs, dispatch) for rows, each in together.items()})
    temporaries = {(layer_id, rows): bench.temporary[layer_id,] for layer_id in model.distinct for rows, bench in single.items()}
    fields = {"source": "measured", "dispatch": dispatch, "device": device.device_kind, "compiled_for": device.device_kind}
    with compiling_threads() as pool:
        programs_of_neighbours = ScratchPrograms(model, policies, device, pool, meter)
        programs_of_neighbours.begin_neighbours()
        return profile_of(model, lambda: costs, stage_costs, lambda costs: programs_of_neighbours.scratch(costs, temporaries), **fields)


def _layer_costs(
    model: Model, rows: int, times: Mapping[tuple[str, ...], ByProgram], flops: Mapping[tuple[str, ...], ByProgram]
) -> dict[tuple[str, int], Costs]:
    """Return the costs of each distinct layer at one size, from the seconds of each group's programs and the layers' FLOPs."""
    shares = [share for ids, seconds in times.items() for share in split(seconds, {i: flops[model.first_equal[i],] for i in ids}).items()]
    costs = {}
    for layer_id in model.distinct:
        times_of_layer = [seconds for other, seconds in shares if model.first_equal[other] == layer_id]
        means = {name: statistics.fmean(seconds[name] for seconds in times_of_layer) for name in PROGRAMS}
        costs[layer_id, rows] = Costs(**means, flops=flops[layer_id,]["forward"])
    return costs


class Ratios(NamedTuple):
    """How long neighbours took together.

    Attributes:
        apart: the seconds of a forward and a backward, divided by the sum over the single layers.
        in_one: the seconds of both as one program, divided by the seconds of two programs.
        again: the seconds that full recomputation adds, divided by the seconds of a forward and a backward.
        update: the seconds of an update, divided by the sum over the single layers.
    """

    apart: float
    in_one: float
    again: float
    update: float


class _Neighbours:
    """Three neighbours at one size, with and without recomputation. `times` are about the seconds of each distinct layer's programs."""

    def __init__(self, model: Model, rows: int, device: jax.Device, times: Mapping[tuple[str, ...], ByProgram]) -> None:
        alone = {i: times[equal,]["forward"] + times[equal,]["backward"] for i, equal in model.first_equal.items()}
        ids = neighbours(model.stack.ids, model.first_equal, alone)
        self._keys = [(model.first_equal[layer_id], rows) for layer_id in ids]
        stage = model, ids, rows, sum(alone[i] for i in ids), [device]
        self._kept, self._remade = Together(*stage, programs=(*PROGRAMS, *IN_ONE)), Together(*stage, recompute="full")
        self._rounds = list[tuple[float, ...]]()

    def time(self) -> None:
        """Time a forward and a backward, both as one program, both with recomputation, and an update."""
        apart, in_one, update = (self._kept.seconds(names) for names in (PROGRAMS[:2], IN_ONE, PROGRAMS[2:]))
        self._rounds.append((apart, in_one, self._remade.seconds(), update))

    def ratios(self, costs: Mapping[tuple[str, int], Costs], dispatch: float) -> Ratios:
        """Return the medians of all rounds as ratios. Times no longer than a start of a program (`dispatch`) are noise, and give none."""

        def share(part: float, whole: float, otherwise: float = 1.0) -> float:
            return part / whole if min(part, whole) > dispatch else otherwise

        medians, starts = map(statistics.median, zip(*self._rounds, strict=True)), (2, 1, 2, 1)
        apart, in_one, remade, update = (seconds - n * dispatch for seconds, n in zip(medians, starts, strict=True))
        forwards, backwards, updates = (sum(getattr(costs[key], name) for key in self._keys) for name in PROGRAMS)
        alone = forwards + backwards
        again = share(min(remade - apart, apart), apart, forwards / alone if alone else 0.0)
        return Ratios(share(apart, alone), share(in_one, apart), again, share(update, updates))


def _as_together(costs: Mapping[tuple[str, int], Costs], ratios: Mapping[int, Ratios]) -> dict[tuple[str, int], Costs]:
    """Return the costs of layers in a pipeline, from single layers, and what neighbours took together at the smallest and the largest size.

    Between these sizes the ratio is taken to be linear in 1 / rows, because what is not alike is the time of each program, not of each row.
    """
    ends = sorted(ratios, reverse=True)
    mean = Ratios(*(statistics.fmean(each) for each in zip(*ratios.values(), strict=True)))

    def cost(rows: int, alone: Costs) -> Costs:
        ratio = float(np.interp(1 / rows, [1 / end for end in ends], [ratios[end].apart for end in ends]))
        forward, backward = ratio * alone.forward, ratio * alone.backward
        both = forward + backward
        return Costs(forward, backward, mean.update * alone.update, alone.flops, mean.in_one * both, mean.again * both)

    return {(layer_id, rows): cost(rows, alone) for (layer_id, rows), alone in costs.items()}


def short_groups(ids: Sequence[str], first_equal: Mapping[str, str], times: Mapping[tuple[str, ...], ByProgram]) -> list[tuple[str, ...]]:
    """Choose which layers to time together: short neighbours in groups that are long enough, each other layer alone."""

    def seconds(layer_id: str) -> float:
        alone = times[first_equal[layer_id],]
        return alone["forward"] + alone["backward"]

    groups: list[list[str]] = []
    for layer_id in ids:
        joins = groups and all(seconds(other) < 2 * SHORT for other in (layer_id, groups[-1][-1]))
        if joins and sum(map(seconds, groups[-1])) < 4 * SHORT:
            groups[-1].append(layer_id)
        else:
            groups.append([layer_id])
    kinds: dict[tuple[str, ...], tuple[str, ...]] = {}
    for group in groups:
        kinds.setdefault(tuple(first_equal[layer_id] for layer_id in group), tuple(group))
    together = {layer_id for kind in kinds if len(kind) > 1 for layer_id in kind}
    return [group for kind, group in kinds.items() if len(kind) > 1 or kind[0] not in together]


def split(group_seconds: ByProgram, flops: Mapping[str, ByProgram]) -> dict[str, ByProgram]:
    """Split the time of a group among its layers in proportion to their FLOPs; evenly for programs without FLOPs."""
    split_seconds: dict[str, dict[str, float]] = {layer_id: {} for layer_id in flops}
    for name, seconds in group_seconds.items():
        total = sum(layer_flops[name] for layer_flops in flops.values())
        for layer_id, layer_flops in flops.items():
            split_seconds[layer_id][name] = seconds * (layer_flops[name] / total if total else 1 / len(flops))
    return dict(split_seconds)
