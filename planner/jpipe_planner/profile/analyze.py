"""Analytic profiles: the costs of a model on any device, from its operations, its compiled programs and the device's figures."""

from collections.abc import Callable, Mapping, Sequence
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
from jpipe_planner.machine.roofline import Rates
from jpipe_planner.profile.compose import profile_of
from jpipe_planner.profile.model import POLICIES, Batch, Costs, Meter, Model, Progress, count_bytes, parts_of_bytes
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.scratch import KINDS, ScratchPrograms, compiling_threads
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
    in_slices: bool = False,
) -> Profile:
    """Profile a model for a device, without allocating its arrays.

    The time of a program is its matrix products and convolutions at `device.flops` times `device.efficiency`, or its memory traffic at
    `device.memory_bandwidth`, whichever is longer. The traffic consists of the bytes that move even if everything is fused: weights,
    inputs, outputs, residuals, gradients and optimizer state, each once. If both grow linearly with the rows, they are counted at only a
    few sizes (`count_at`).

    If XLA compiles for the device's target, the time of forwards and backwards is the roofline of their kernels instead (`read_kernels`),
    in which less is fused. It is read at the smallest and the largest size, and counted times between them are corrected by its ratio to
    theirs.

    For the temporaries, the forward and backward of each distinct layer and of each distinct pair of neighbours are compiled at the
    smallest and the largest size, and interpolated between. If "full" is among the policies, the backwards of layers, pairs and (except for
    GPUs) triples with full recomputation are compiled as well. An update is assumed to need no temporaries. Programs are compiled for the
    target of the device, or for this machine if the device has no target or XLA cannot compile for it here.

    Example:
        ```python
        tokens = lambda rows: jax.ShapeDtypeStruct((rows, 1024), np.int32)
        profile = analyze(stack, lambda rows: (tokens(rows), tokens(rows)), loss, optax.adamw(1e-3), (1, 4), Device(target="h100-80gb"))
        ```

    The profile does not know that products of few rows are slow on GPUs: if the smallest microbatches look best, use a measured profile.

    Args:
        stack, loss, optimizer, sizes, policies, ema_decay, delay_correction, progress, precision, in_slices: as in `measure`.
        batch: `rows -> (inputs, labels)`, the shapes and dtypes of a microbatch of `rows` rows.
        device: the device, with FLOP/s by dtype, as in `Rates`.

    Raises:
        InputError: the device has no FLOP/s for a dtype, or layers, batch, loss and optimizer do not fit together.
    """
    if not device.flops:
        raise InputError(
            f"topology: device '{device.name}' has no flops, which analytic profiles need; add them, such as float32: 14 TFLOP/s"
        )
    model = Model(stack, batch, loss, optimizer, tuple(sizes), precision or jpipe.Precision(), ema_decay, delay_correction, in_slices)
    compiling, rates = compiling_for(device, unlimited=True), Rates.of(device)
    compiled_for = compiling.devices[0]
    with tracing_for(compiled_for.platform), compiling_threads() as pool:
        meter = Meter(progress, parts_of_bytes(model) + len(model.distinct))
        programs = ScratchPrograms(model, policies, compiled_for, pool, meter, None if compiling.missing else rates)
        counted = dict[tuple[str, int], Costs]()
        for layer_id in model.distinct:
            counted |= _counted(model, layer_id, device, compiled_for)
            programs.begin((layer_id,))
            meter.step()
        programs.begin_neighbours()
        stage_costs = count_bytes(model, policies, meter)  # while XLA compiles
        fields = {"source": "analytic", "device": device.name, "compiled_for": compiling.kind}
        return profile_of(model, lambda: _corrected(model, counted, programs), stage_costs, programs.scratch, **fields)


def _counted(model: Model, layer_id: str, device: Device, traced_for: jax.Device) -> dict[tuple[str, int], Costs]:
    """Return the costs of a layer at all sizes, from its products and its traffic."""
    rates = Rates.of(device)

    def count(rows: int) -> dict[str, tuple[dict[str, float], int]]:
        stage = model.stage([layer_id], rows)
        traffic = _traffic(stage.cost)
        counts = {name: jpipe.model.count_products(stage.trace(name, traced_for).jaxpr.jaxpr) for name in PROGRAMS}
        if (compute := model.precision.compute) is not None:  # a layer may still compute in another dtype on this machine
            counts = {name: {compute: sum(products.values())} if products else {} for name, products in counts.items()}
        return {name: (products, traffic[name]) for name, products in counts.items()}

    costs = {}
    for rows, counts in count_at(model.sizes, count)[0].items():
        _check_rates(layer_id, device, [dtype for products, _ in counts.values() for dtype in products])
        seconds = {name: rates.seconds(moved, [(n, dtype) for dtype, n in products.items()]) for name, (products, moved) in counts.items()}
        costs[layer_id, rows] = Costs(**seconds, flops=sum(counts["forward"][0].values()))
    return costs


def _check_rates(layer_id: str, device: Device, dtypes: Sequence[str]) -> None:
    """Check that the device has a rate for factors of as many bits; float8 has the highest rate if it has none."""
    known = {jnp.dtype(name).itemsize for name in device.flops}
    for dtype in map(jnp.dtype, dtypes):
        if jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize > 1 and dtype.itemsize not in known:
            rates = ", ".join(sorted(device.flops))
            raise InputError(
                f"topology: device '{device.name}' has flops for {rates}, layer '{layer_id}' computes in {dtype.name}; add them"
            )


def _corrected(model: Model, counted: Mapping[tuple[str, int], Costs], programs: ScratchPrograms) -> dict[tuple[str, int], Costs]:
    """Correct counted seconds of forwards and backwards by the rooflines of the compiled programs, where these are known."""
    costs = dict(counted)
    for layer_id in model.distinct:
        for kind in KINDS:
            known = programs.seconds(layer_id, kind)
            ratios = {rows: known[rows] / before for rows in known if (before := getattr(counted[layer_id, rows], kind))}
            for rows in model.sizes if ratios else ():
                seconds = getattr(counted[layer_id, rows], kind) * float(np.interp(rows, [*ratios], [*ratios.values()]))
                costs[layer_id, rows] = costs[layer_id, rows]._replace(**{kind: seconds})
    return costs


def _traffic(cost: jpipe.programs.StageCost) -> dict[str, int]:
    """Return the bytes that each program must at least read and write."""
    backward = cost.weights + cost.residuals + cost.message + cost.gradient + 2 * cost.accumulators
    return {
        "forward": cost.weights + cost.inputs + cost.labels + cost.outputs + cost.residuals - cost.kept_outputs,
        "backward": backward if cost.backward else 0,  # 0 units: all parameters up to here are frozen
        "update": 2 * (cost.trained + cost.optimizer + cost.accumulators),
    }
