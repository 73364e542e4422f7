"""Send tokens to their chosen experts, and outputs back, on a mesh in which each device has some of the experts.

Letters in shapes: n tokens of a device, k experts of a token, w width, d devices, r rows of a buffer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jpipe.context import traced_platform
from jpipe_train.losses.cross_entropy import wider

Compute = Callable[[Any, Any, Any], Any]
"""Computes tokens with the experts of this device, from (tokens, their weights, the numbers of the experts that they chose)."""


def by_platform() -> Callable[..., Any]:
    """Return `sent`, or `gathered` on CPUs, for which XLA does not compile `jax.lax.ragged_all_to_all`."""
    return gathered if traced_platform() == "cpu" else sent


def gathered(
    compute: Compute,
    x: Float[Array, "n w"],
    weights: Float[Array, "n k"],
    chosen: Int[Array, "n k"],
    *,
    over: str,
    rows: tuple[str, ...],
    count: int,
) -> Float[Array, "n w"]:
    """Gather the tokens of all devices, compute those for this device's experts, and reduce-scatter the outputs.

    Args:
        compute: computes the experts of this device.
        x, weights, chosen: the tokens of this device, the weights of the experts that they chose, and their numbers.
        over: the axis of the mesh over which experts and tokens are sharded.
        rows: the axes over which tokens are sharded, `over` among them.
        count: the experts of a device.
    """
    everything = (jax.lax.all_gather(array, over, tiled=True) for array in (x, weights, chosen))
    return jax.lax.psum_scatter(compute(*everything), over, tiled=True)


def sent(
    compute: Compute,
    x: Float[Array, "n w"],
    weights: Float[Array, "n k"],
    chosen: Int[Array, "n k"],
    *,
    over: str,
    rows: tuple[str, ...],
    count: int,
) -> Float[Array, "n w"]:
    """Send each token once to each device with experts that it chose, and sum the outputs that they return.

    First the devices gather the choices, a few numbers per token, so that each knows which tokens go from where to where. No token is
    dropped: a device has room for the tokens of all devices, and to send each token to as many devices as it chooses experts, or to all.

    Args:
        compute, x, weights, chosen, over, rows, count: as in `gathered`.
    """
    (n, k), devices = chosen.shape, jax.lax.axis_size(over)
    most = devices * n, n * min(k, devices)  # rows that a device receives and sends
    all_weights, all_chosen = (jax.lax.all_gather(array, over, tiled=True) for array in (weights, chosen))
    goes, mine = (
        (numbers[:, :, None] // count == jnp.arange(devices, dtype=numbers.dtype)[None, None]).any(1) for numbers in (all_chosen, chosen)
    )
    sizes = goes.reshape(devices, n, devices).sum(1, dtype=jnp.int32)
    outgoing = jnp.flatnonzero(mine.T, size=most[1], fill_value=devices * n)  # by device, then by token
    token = jnp.where(outgoing < devices * n, outgoing % n, n)
    incoming = jnp.flatnonzero(goes[:, jax.lax.axis_index(over)], size=most[0], fill_value=devices * n)
    received = exchanged(over, rows, (most[1], most[0]), _rows_of(x, token, 0), sizes)
    y = compute(received, _rows_of(all_weights, incoming, 0), _rows_of(all_chosen, incoming, devices * count))
    returned = exchanged(over, rows, most, y, sizes.T).astype(wider(x.dtype))
    return jnp.zeros_like(x, returned.dtype).at[token].add(returned, mode="drop").astype(x.dtype)


def _rows_of(array: Any, numbers: Int[Array, " r"], otherwise: int) -> Any:
    """Return rows of an array, and `otherwise` for numbers without a row."""
    return array.at[numbers].get(mode="fill", fill_value=otherwise)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def exchanged(over: str, rows: tuple[str, ...], most: tuple[int, int], x: Float[Array, "r w"], sizes: Int[Array, "d d"]) -> Any:
    """Exchange rows with the devices of an axis.

    Its transpose is the exchange with `most` and `sizes` transposed; rows that are not sent have gradients of 0.

    Args:
        over: the axis.
        rows: the axes over which x is sharded.
        most: the rows that are sent and received at most.
        x: the rows for each device, one device after the other; rows after them are not sent.
        sizes: (from, to), how many rows each device sends to each.

    Returns:
        The rows from each device, one device after the other, then zeros.
    """
    this, starts, ends_there = jax.lax.axis_index(over), sizes.cumsum(1, sizes.dtype) - sizes, sizes.cumsum(0, sizes.dtype)
    empty = jax.lax.pcast(jnp.zeros((most[1], x.shape[1]), x.dtype), rows, to="varying")
    at = starts[this], sizes[this], (ends_there - sizes)[this], sizes[:, this]
    return jax.lax.ragged_all_to_all(x, empty, *at, axis_name=over)


def _forward(over: str, rows: tuple[str, ...], most: tuple[int, int], x: Any, sizes: Any) -> tuple[Any, Any]:
    return exchanged(over, rows, most, x, sizes), sizes


def _backward(over: str, rows: tuple[str, ...], most: tuple[int, int], sizes: Any, gradient: Any) -> tuple[Any, None]:
    return exchanged(over, rows, most[::-1], gradient, sizes.T), None


exchanged.defvjp(_forward, _backward)
