"""Analytic profiles: the costs of a model on any device, from XLA's analysis and the device's figures."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from jpipe import InputError
from jpipe.context import tracing_for, without_mesh
from jpipe_planner.machine.compiling import compiling_for
from jpipe_planner.machine.device import Device
from jpipe_planner.profile.compose import profile_of
from jpipe_planner.profile.flops import count_flops
from jpipe_planner.profile.model import POLICIES, Batch, Costs, Meter, Model, Progress, count_bytes, parts_of_bytes
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.scratch import KINDS, Kind, ScratchPrograms, compiling_threads
from jpipe_planner.profile.sizes import count_at

Name = Literal["forward", "backward", "update"]
PROGRAMS: tuple[Name, ...] = ("forward", "backward", "update")


@without_mesh()
def analyze(
    stack: jpipe.LayerStack,
    batch: Batch,
    loss: Callable[[Any, Any], tuple[jax.Array, jax.Array]],
    optimizer: optax.GradientTransformation,
    sizes: Sequence[int],
    device: Device,
    *,
    policies: Sequence[str] = POLICIES,
    ema_decay: float | None = None,
    delay_correction: str | float | None = None,
    progress: Progress | None = None,
    precision: jpipe.Precision | None = None,
) -> Profile:
    """Profile a model for a device, without allocating its arrays.

    The time of a program is its FLOPs divided by `device.flops` times `device.efficiency`, or its memory traffic divided by
    `device.memory_bandwidth`, whichever is longer. XLA counts the FLOPs before it optimizes, with one iteration of each loop; the other
    iterations of scans are added. The traffic consists of the bytes that move even if everything is fused: weights, inputs, outputs,
    residuals, gradients and optimizer state, each once. If FLOPs and traffic grow linearly with the rows, they are counted at only a few
    sizes (`count_at`).

    For the temporaries, the forward and backward of each distinct layer and of each distinct pair of neighbours are compiled at the
    smallest and the largest size, and interpolated between. If "full" is among the policies, the backwards of layers, pairs and triples
    with full recomputation are compiled as well. An update is assumed to need no temporaries. Programs are compiled for the target of the
    device, or for this machine if the device has no target or XLA cannot compile for it here.

    The profile does not know that GPUs are slow with few rows: if the smallest microbatches look best, use a measured profile.

    Args:
        stack, loss, optimizer, sizes, policies, ema_decay, delay_correction, progress, precision: as in `measure`.
        batch: `rows -> (inputs, labels)`, the shapes and dtypes of a microbatch of `rows` rows.
        device: the device, with FLOP/s for the dtypes in which the layers compute, or for other dtypes with the same number of bits.

    Raises:
        InputError: the device's figures are missing, or layers, batch, loss and optimizer do not fit together.
    """
    model = Model(stack, batch, loss, optimizer, tuple(sizes), precision or jpipe.Precision(), ema_decay, delay_correction)
    compiling = compiling_for(device, unlimited=True)
    compiled_for = compiling.devices[0]
    with tracing_for(compiled_for.platform), compiling_threads() as pool:
        meter = Meter(progress, parts_of_bytes(model) + len(model.distinct))
        programs = ScratchPrograms(model, policies, compiled_for, pool, meter)
        costs = _costs(model, device, compiled_for, programs, meter)
        programs.begin_neighbours()
        stage_costs = count_bytes(model, policies, meter)  # while XLA compiles
        fields = {"source": "analytic", "device": device.name, "compiled_for": compiling.kind}
        return profile_of(model, costs, stage_costs, programs.scratch, **fields)


def _costs(model: Model, device: Device, compiled_for: jax.Device, programs: ScratchPrograms, meter: Meter) -> dict[tuple[str, int], Costs]:
    """Return the costs of each distinct layer at each size, and begin to compile its programs for their scratch memory."""
    costs, on_this_device = {}, compiled_for == jax.local_devices()[0]
    for layer_id in model.distinct:
        counted, lowered = _counted(model, layer_id)
        programs.begin((layer_id,), lowered if on_this_device else None)
        rate = _rate(device, layer_id, model.stage([layer_id], model.sizes[0]).specs[layer_id], model.precision.compute)
        for rows, (flops, traffic) in counted.items():
            moving = {name: moved / device.memory_bandwidth if device.memory_bandwidth else 0.0 for name, moved in traffic.items()}
            forward, backward, update = (max(flops[name] / rate, moving[name]) for name in PROGRAMS)
            costs[layer_id, rows] = Costs(forward, backward, update, flops["forward"])
        meter.step()
    return costs


def _counted(
    model: Model, layer_id: str
) -> tuple[dict[int, tuple[dict[str, float], dict[str, int]]], dict[int, dict[Kind, jax.stages.Lowered]]]:
    """Count the FLOPs and the traffic of each program of a layer at all sizes.

    Returns:
        FLOPs and traffic by program and rows; the lowered forward and backward by the rows at which they were lowered.
    """
    lowered: dict[int, dict[Kind, jax.stages.Lowered]] = {}
    of_update = count_flops(*_lower(model.stage([layer_id], model.sizes[0]), layer_id, "update"))  # the same at all sizes

    def count(rows: int) -> tuple[dict[str, float], dict[str, int]]:
        stage = model.stage([layer_id], rows)
        programs = {kind: _lower(stage, layer_id, kind) for kind in KINDS}
        lowered[rows] = {kind: program for kind, (_, program) in programs.items()}
        return {"update": of_update} | {kind: count_flops(*program) for kind, program in programs.items()}, _traffic(stage.cost)

    return count_at(model.sizes, count)[0], lowered


def _lower(stage: jpipe.stages.StandaloneStage, layer_id: str, name: Name) -> tuple[jax.stages.Traced, jax.stages.Lowered]:
    """Trace and lower a program of a layer for this machine, to count its operations."""
    traced = stage.trace(name, jax.local_devices()[0])
    try:
        return traced, traced.lower()
    except (NotImplementedError, ValueError) as error:  # the latter for kernels of Pallas
        raise InputError(
            f"layer '{layer_id}': its operations cannot be counted, because JAX does not compile it for CPUs: {error}; profile it with "
            "another implementation, such as model.attention: xla"
        ) from None


def _traffic(cost: jpipe.programs.StageCost) -> dict[str, int]:
    """Return the bytes that each program must at least read and write."""
    backward = cost.weights + cost.residuals + cost.message + cost.gradient + 2 * cost.accumulators
    return {
        "forward": cost.weights + cost.inputs + cost.labels + cost.outputs + cost.residuals - cost.kept_outputs,
        "backward": backward if cost.backward else 0,  # 0 units: all parameters up to here are frozen
        "update": 2 * (cost.trained + cost.optimizer + cost.accumulators),
    }


def _rate(device: Device, layer_id: str, spec: jpipe.model.LayerSpec, compute: str | None) -> float:
    """Return the FLOP/s for the dtype `compute`; None: for the dtype of the inputs, or of the outputs if the inputs are integers."""
    floats = (
        [jnp.dtype(compute)]
        if compute
        else [leaf.dtype for leaf in jax.tree.leaves((spec.x, spec.output)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    )
    if not device.flops:
        raise InputError(
            f"topology: device '{device.name}' has no flops, which analytic profiles need; add them, such as float32: 14 TFLOP/s"
        )
    if not floats:
        return max(device.flops.values()) * device.efficiency
    same_size = [name for name in device.flops if np.dtype(jnp.dtype(name)).itemsize == floats[0].itemsize]
    name = floats[0].name if floats[0].name in device.flops else next(iter(same_size), None)
    if name is None:
        known = ", ".join(sorted(device.flops))
        raise InputError(
            f"topology: device '{device.name}' has flops for {known}, layer '{layer_id}' computes in {floats[0].name}; add them"
        )
    return device.flops[name] * device.efficiency
