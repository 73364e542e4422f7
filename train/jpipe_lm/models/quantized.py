"""Kernels quantized by qwix to 8-bit integers or to NF4, with two numbers in a byte."""

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from jpipe import InputError

Kind = Literal["int8", "nf4"]
_BLOCK = 64  # numbers along the inputs that share a scale, at most


def quantize(kernel: Float[Array, "i o"], kind: Kind) -> tuple[Integer[Array, "j o"], Float[Array, "k o"]]:
    """Quantize a kernel.

    For each output, each block of 64 inputs has its own scale: its largest number gets the largest code. If 64 does not divide the number
    of inputs, the size of a block is their greatest common divisor.

    Args:
        kernel: the kernel of a linear layer, (inputs, outputs).
        kind: the kind of the numbers.

    Returns:
        The codes, of shape (inputs, outputs) or, for "nf4", (inputs / 2, outputs), and the scales of the blocks.

    Raises:
        InputError: qwix is not installed, or the kernel has an odd number of inputs, which "nf4" cannot pair.
    """
    inputs = kernel.shape[0]
    if kind == "nf4" and inputs % 2:
        raise InputError(f"tune.quantize: nf4 keeps inputs in pairs, found a kernel with {inputs}; use int8, or leave it out")
    with _promotion():
        array = _qwix().quantize(kernel, kind, channelwise_axes=(1,), tiled_axes={0: math.gcd(inputs, _BLOCK)})
    if kind == "int8":
        return array.qvalue, array.scale
    codes = array.qvalue.astype(jnp.uint8)
    return codes[0::2] | (codes[1::2] << 4), array.scale


def dequantize(codes: Integer[Array, "j o"], scale: Float[Array, "k o"], kind: Kind) -> Float[Array, "i o"]:
    """Return the kernel, in the dtype of the scales.

    Raises:
        InputError: qwix is not installed.
    """
    values: Any = codes
    if kind == "nf4":
        pairs = jnp.stack([codes & jnp.uint8(15), codes >> jnp.uint8(4)], axis=1)
        values = pairs.reshape(2 * codes.shape[0], codes.shape[1]).astype(jnp.uint4)
    with _promotion():
        return _qwix().dequantize(_qwix().QArray(values, scale, None, kind))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def multiply(x: Float[Array, "*n i"], codes: Integer[Array, "j o"], scale: Float[Array, "k o"], kind: Kind) -> Float[Array, "*n o"]:
    """Multiply by a quantized kernel, in the dtype of `x`; the kernel has no gradient.

    Args:
        x: the inputs of a linear layer.
        codes, scale: as `quantize` returns them.
        kind: the kind of the numbers.
    """
    return x @ _dequantized_after(x, codes, scale, kind)


def _forward(x: Any, codes: Any, scale: Any, kind: Kind) -> tuple[Any, Any]:
    return multiply(x, codes, scale, kind), (codes, scale)


def _backward(kind: Kind, arrays: tuple[Any, Any], gradient: Any) -> tuple[Any, None, None]:
    return gradient @ _dequantized_after(gradient, *arrays, kind).T, None, None


multiply.defvjp(_forward, _backward)


def _dequantized_after(x: Any, codes: Any, scale: Any, kind: Kind) -> Any:
    """Return the kernel in the dtype of `x`.

    It depends on `x`, through a number that is zero unless `x` is NaN: otherwise XLA may dequantize all kernels of a stage at its start,
    and keep them. A barrier does not prevent that on a CPU.
    """
    zero = jnp.isnan(x[(0,) * x.ndim]).astype(codes.dtype)
    return dequantize(codes + zero, scale, kind).astype(x.dtype)


@contextlib.contextmanager
def _promotion() -> Iterator[None]:
    """Allow implicit promotion for qwix, which mixes dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _qwix() -> Any:
    try:
        import qwix
    except ImportError:
        raise InputError("tune.quantize: qwix is not installed; install it with pip install qwix, or leave it out") from None
    return qwix
