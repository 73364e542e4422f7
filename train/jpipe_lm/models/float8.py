"""Products of linear layers in float8, by qwix: e4m3 in a forward, e5m2 for gradients.

Each row of the inputs and each output of the kernel has its own scale, so rows do not depend on each other. Scales multiply the results,
so that the product itself has factors in float8. In a backward they multiply the gradient before it is quantized.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jpipe_lm.models.quantized import import_qwix, promotion

_FORWARD, _GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


def float8_product(x: Float[Array, "*n i"], kernel: Float[Array, "i o"], *_: Any, **__: Any) -> Float[Array, "*n o"]:
    """Multiply the inputs of a linear layer by its kernel, as the argument `dot_general` of `flax.nnx.Linear`."""
    return _product(x, kernel)


@jax.custom_vjp
def _product(x: Any, kernel: Any) -> Any:
    return _forward(x, kernel)[0]


def _forward(x: Any, kernel: Any) -> tuple[Any, Any]:
    last = x.ndim - 1
    with promotion():
        quantize = import_qwix("model.products").quantize
        factors = quantize(x, _FORWARD, channelwise_axes=tuple(range(last))), quantize(kernel, _FORWARD, channelwise_axes=(1,))
    return _multiplied(*factors, (last,), (0,), x.dtype), factors


def _backward(factors: Any, gradient: Any) -> tuple[Any, Any]:
    x, kernel = factors
    last, dtype = gradient.ndim - 1, gradient.dtype
    rows = tuple(range(last))
    with promotion():
        quantize = import_qwix("model.products").quantize
        of_x = quantize(gradient * kernel.scale.reshape((1,) * last + (-1,)), _GRADIENT, channelwise_axes=rows)
        of_kernel = quantize(gradient * x.scale, _GRADIENT, channelwise_axes=(last,))
    return _multiplied(of_x, kernel.qvalue, (last,), (1,), dtype), _multiplied(x.qvalue, of_kernel, rows, rows, dtype)


_product.defvjp(_forward, _backward)


def _multiplied(left: Any, right: Any, of_left: tuple[int, ...], of_right: tuple[int, ...], dtype: Any) -> Any:
    """Contract axes of quantized arrays, or of their numbers without a scale.

    Instead of float16 the product is made in float32, because its numbers may be too large before the scales multiply them.
    """
    wide = jnp.float32 if dtype == jnp.float16 else dtype
    with promotion():
        product = import_qwix("model.products").dot_general(left, right, ((of_left, of_right), ((), ())), preferred_element_type=wide)
    return product.astype(dtype)
