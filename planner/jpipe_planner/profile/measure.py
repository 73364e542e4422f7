"""Measured profiles: every distinct layer compiled as a pipeline compiles it, and timed on a device of this process.

Weights and most inputs are noise, so host callbacks that no result needs are left out.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import optax

import jpipe
from jpipe.context import without_mesh
from jpipe_planner.profile.bench import MEASURED, Bench, ByProgram, Programs
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
    """Profile a model on a device of this process. The device must hold each layer with its gradients, optimizer state and residuals.

    Each distinct layer is compiled as a separate stage. The stages of all sizes run in turns, so that a slow moment of the machine affects
    all of them; the arrays of all sizes are in memory at the same time. Each time is a median minus the time of a stage without work, which
    is the profile's `dispatch`. Neighbours that are too short to be timed alone are timed as one stage, and this time is split among them
    in proportion to their FLOPs.

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
    end = time.perf_counter() + seconds
    for n in range(repetitions):  # all sizes in turns, because a machine may be slow for several seconds
        if n >= FEWEST and time.perf_counter() > end:
            break
        meter.expect(len(benches))
        for bench in benches.values():
            bench.time(1)
            meter.step()
    costs = dict[tuple[str, int], Costs]()
    for rows, bench in benches.items():
        costs |= _layer_costs(model, rows, bench.medians()[0], single[rows].flops)
    costs = _with_one_share(costs)
    temporaries = {(layer_id, rows): bench.temporary[layer_id,] for layer_id in model.distinct for rows, bench in single.items()}
    dispatch = statistics.median(bench.medians()[1] for bench in benches.values())
    fields = {"source": "measured", "dispatch": dispatch, "device": device.device_kind, "compiled_for": device.device_kind}
    with compiling_threads() as pool:
        neighbours = ScratchPrograms(model, policies, device, pool, meter)
        neighbours.begin_neighbours()
        return profile_of(model, lambda: costs, stage_costs, lambda costs: neighbours.scratch(costs, temporaries), **fields)


def _layer_costs(
    model: Model, rows: int, times: Mapping[tuple[str, ...], ByProgram], flops: Mapping[tuple[str, ...], ByProgram]
) -> dict[tuple[str, int], Costs]:
    """Return the costs of each distinct layer at one size, from the seconds of each group's programs and the layers' FLOPs."""
    shares = [share for ids, seconds in times.items() for share in split(seconds, {i: flops[model.first_equal[i],] for i in ids}).items()]
    costs = {}
    for layer_id in model.distinct:
        times_of_layer = [seconds for other, seconds in shares if model.first_equal[other] == layer_id]
        means = {name: statistics.fmean(seconds[name] for seconds in times_of_layer) for name in MEASURED}
        costs[layer_id, rows] = Costs(**means, flops=flops[layer_id,]["forward"])
    return costs


def _with_one_share(costs: Mapping[tuple[str, int], Costs]) -> dict[tuple[str, int], Costs]:
    """Return costs in which one program has the same share of the time of both at all sizes of a layer, because few runs are not exact."""
    apart, in_one = defaultdict[str, float](float), defaultdict[str, float](float)
    for (layer_id, _), cost in costs.items():
        apart[layer_id] += cost.forward + cost.backward
        in_one[layer_id] += cost.forward_backward or 0.0
    return {
        (layer_id, rows): cost._replace(forward_backward=(cost.forward + cost.backward) * in_one[layer_id] / (apart[layer_id] or 1.0))
        for (layer_id, rows), cost in costs.items()
    }


def short_groups(ids: Sequence[str], first_equal: Mapping[str, str], times: Mapping[tuple[str, ...], ByProgram]) -> list[tuple[str, ...]]:
    """Choose which layers to time together. Short neighbours form groups that are long enough; each other layer is timed alone.

    Args:
        ids: the model's layers.
        first_equal: for each layer the first layer that equals it.
        times: the seconds of each distinct layer alone.

    Returns:
        Groups of layer ids, without duplicates. Each distinct layer or an equal layer is in at least one group.
    """

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
