"""Kernels quantized by qwix: to 8-bit integers, or to NF4 with two numbers in a byte."""

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
_BLOCK = 64  # the largest number of inputs that share a scale


def quantize(kernel: Float[Array, "i o"], kind: Kind) -> tuple[Integer[Array, "j o"], Float[Array, "k o"]]:
    """Quantize a kernel (inputs, outputs).

    For each output, each block of 64 inputs has its own scale, so that the number with the largest magnitude gets the largest code. If the
    number of inputs is not a multiple of 64, the size of a block is the greatest common divisor of 64 and this number.

    Return the codes, (inputs, outputs) or (inputs / 2, outputs) for "nf4", and the scales of the blocks. Raise InputError if qwix is not
    installed, or the kind is "nf4" and the kernel has an odd number of inputs.
    """
    inputs = kernel.shape[0]
    if kind == "nf4" and inputs % 2:
        raise InputError(
            f"tune.quantize: nf4 needs kernels with an even number of inputs, found {inputs}; use int8, or remove tune.quantize"
        )
    with promotion():
        array = import_qwix("tune.quantize").quantize(kernel, kind, channelwise_axes=(1,), tiled_axes={0: math.gcd(inputs, _BLOCK)})
    if kind == "int8":
        return array.qvalue, array.scale
    codes = array.qvalue.astype(jnp.uint8)
    return codes[0::2] | (codes[1::2] << 4), array.scale


def dequantize(codes: Integer[Array, "j o"], scale: Float[Array, "k o"], kind: Kind) -> Float[Array, "i o"]:
    """Return the kernel in the dtype of the scales. Raise InputError if qwix is not installed."""
    values: Any = codes
    if kind == "nf4":
        pairs = jnp.stack([codes & jnp.uint8(15), codes >> jnp.uint8(4)], axis=1)
        values = pairs.reshape(2 * codes.shape[0], codes.shape[1]).astype(jnp.uint4)
    with promotion():
        library = import_qwix("tune.quantize")
        return library.dequantize(library.QArray(values, scale, None, kind))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def multiply(x: Float[Array, "*n i"], codes: Integer[Array, "j o"], scale: Float[Array, "k o"], kind: Kind) -> Float[Array, "*n o"]:
    """Multiply `x` by a quantized kernel, in the dtype of `x`. The kernel has no gradient."""
    return x @ _dequantized_after(x, codes, scale, kind)


def _forward(x: Any, codes: Any, scale: Any, kind: Kind) -> tuple[Any, Any]:
    return multiply(x, codes, scale, kind), (codes, scale)


def _backward(kind: Kind, arrays: tuple[Any, Any], gradient: Any) -> tuple[Any, None, None]:
    return gradient @ _dequantized_after(gradient, *arrays, kind).T, None, None


multiply.defvjp(_forward, _backward)


def _dequantized_after(x: Any, codes: Any, scale: Any, kind: Kind) -> Any:
    """Return the kernel in the dtype of `x`.

    The kernel is made to depend on `x`: a number that is zero unless `x` is NaN is added to the codes. Otherwise XLA may dequantize all
    kernels of a stage when the stage begins, and keep them in memory. On CPUs an optimization barrier does not prevent this.
    """
    zero = jnp.isnan(x[(0,) * x.ndim]).astype(codes.dtype)
    return dequantize(codes + zero, scale, kind).astype(x.dtype)


@contextlib.contextmanager
def promotion() -> Iterator[None]:
    """Allow implicit promotion of dtypes and ranks, because qwix relies on it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def import_qwix(key: str) -> Any:
    """Import qwix, for a key of the config. Raise InputError if it is not installed."""
    try:
        import qwix
    except ImportError:
        raise InputError(f"{key}: qwix is not installed; install it with pip install qwix, or remove {key}") from None
    return qwix
