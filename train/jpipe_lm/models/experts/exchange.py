"""Send tokens to the experts that they chose, and send the outputs back, on a mesh in which each device has some of the experts.

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
"""Computes the experts of this device. The arguments are tokens, the weights of their experts, and the numbers of their experts."""


def by_platform() -> Callable[..., Any]:
    """Return `sent`; on CPUs return `gathered`, because XLA does not compile `jax.lax.ragged_all_to_all` for CPUs."""
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
    """Gather the tokens of all devices, compute this device's experts for them, and reduce-scatter the outputs.

    Tokens come with the weights and numbers of the experts that they chose; a device has `count` experts. Experts and tokens are sharded
    over the mesh axis `over`, and tokens over all axes in `rows`.
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
    """Send each token once to each device that has experts which the token chose, and sum the outputs that these devices return.

    First the devices gather the choices of all tokens, so that each device knows which tokens every device sends to every other device.
    No token is dropped: each device has room to receive the tokens of all devices, and to send each token to `k` devices, or to all if
    there are fewer.
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
    """Return the rows of an array with these numbers. Rows that do not exist are filled with `otherwise`."""
    return array.at[numbers].get(mode="fill", fill_value=otherwise)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def exchanged(over: str, rows: tuple[str, ...], most: tuple[int, int], x: Float[Array, "r w"], sizes: Int[Array, "d d"]) -> Any:
    """Exchange rows between the devices along an axis: return those from each device, one device after the other, then zeros.

    The gradient is the exchange with `most` reversed and `sizes` transposed. Rows that are not sent have gradient 0.

    Args:
        most: the largest numbers of rows that a device sends and receives.
        x: first the rows for each device, one device after the other, then rows that are not sent.
        sizes: (from, to), the number of rows that each device sends to each device.
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
