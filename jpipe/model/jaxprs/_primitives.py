"""Names of primitives by kind, and policies of `jax.checkpoint` that save all results except from elementwise operations."""

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

_LOGIC = "and eq ge gt is_finite le lt ne not or select_n xor"
_ARITHMETIC = (
    "abs add ceil clamp convert_element_type copy cos div exp floor integer_pow log logistic max min mul neg rem round rsqrt sign sin"
)
_COMMON = frozenset(f"{_ARITHMETIC} {_LOGIC} sqrt square stop_gradient sub tanh".split())
_LAYOUT = frozenset(["broadcast_in_dim", "expand_dims", "iota", "reshape", "squeeze", "transpose"])
_REDUCING = frozenset(["concatenate", "pad", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum", "rev", "slice"])
_SHIFTS = frozenset(["shift_left", "shift_right_arithmetic", "shift_right_logical"])
_FUNCTIONS = frozenset(["add_any", "erf", "expm1", "log1p", "pow", "reduce_precision"])
_MORE_FUNCTIONS = frozenset(["cbrt", "cosh", "erf_inv", "exp2", "sinh", "tan"])
_RARE = frozenset(["atan", "bitcast_convert_type", "erfc", "log2", "one_minus_square"])

CHEAP = _COMMON | _LAYOUT | _REDUCING | {"cumsum", "shift_right_logical"}
"""Primitives that a later layer may repeat if this makes messages smaller."""
REPEATABLE = _COMMON | _LAYOUT | _REDUCING | _FUNCTIONS | _MORE_FUNCTIONS
REPEATABLE |= {"atan2", "dynamic_slice", "full_like", "imag", "random_unwrap", "random_wrap", "real"}
"""Primitives that the second half of a backward may repeat: elementwise operations, layouts and reductions."""
SIZELESS = _COMMON | _FUNCTIONS | {"copy_p", "real"}
"""Elementwise primitives with parameters that do not depend on shapes."""
_OF_MASKED_SCORES = _LAYOUT | _REDUCING | frozenset(_LOGIC.split())
_OF_MASKED_SCORES |= frozenset(["add", "convert_element_type", "div", "max", "mul", "stop_gradient", "sub"])
_ELEMENTWISE = _COMMON | _LAYOUT | _SHIFTS | _FUNCTIONS | _MORE_FUNCTIONS | _RARE


def all_but_elementwise(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return whether a forward saves the results of an operation: not of elementwise operations and changes of layout.

    XLA fuses these into the operation that reads their results, so a backward recomputes them in almost no time, while saving the results
    would write and read memory. This is a policy of `jax.checkpoint`.
    """
    return primitive.name not in _ELEMENTWISE


def all_but_elementwise_on_gpu(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Return the same as `all_but_elementwise` for GPUs, but with casts to smaller dtypes, and without maxima and sums over the last dim.

    A product mostly reads such a cast, so the forward writes it anyway. XLA fuses the maxima and sums of a softmax or a norm with their
    readers, unless the forward saves them.
    """
    if primitive.name == "convert_element_type":
        return bool(params["new_dtype"].itemsize < operands[0].dtype.itemsize)
    is_of_rows = primitive.name in ("reduce_max", "reduce_sum") and params["axes"] == (operands[0].ndim - 1,)
    return not is_of_rows and all_but_elementwise(primitive)


def all_but_elementwise_on_tpu() -> Callable[..., bool]:
    """Return a policy for one stage on a TPU, the same as `all_but_elementwise` except for a softmax of a product, as in attention.

    Of such a softmax it saves the exponentials, which are as large as the product, and no maxima. Then the backward needs neither the
    product nor the maxima, and XLA computes product, maxima, exponentials and sums in one kernel. If something else than masks, factors and
    changes of layout is between the product and the softmax, or a cast, the product is saved: the backward may need it, or it is smaller.
    """
    scores = 0  # the bytes of the last product, until an operation follows that is not in the softmax of attention

    def saves(primitive: Any, *operands: Any, **params: Any) -> bool:
        nonlocal scores
        name = primitive.name
        if name == "dot_general":
            scores = _product_bytes(params, *operands)
        elif name in ("exp", "reduce_max") and math.prod(operands[0].shape) * operands[0].dtype.itemsize == scores:
            return name == "exp"
        elif name not in _OF_MASKED_SCORES:
            scores = 0
        return all_but_elementwise(primitive)

    return saves


def all_but_joined(saves: Callable[..., bool]) -> Callable[..., bool]:
    """Return a policy that saves no joined arrays: each slice of a row joins the keys of all earlier slices, which are kept anyway."""
    return lambda primitive, *operands, **params: primitive.name != "concatenate" and saves(primitive, *operands, **params)


def _product_bytes(params: Any, left: Any, right: Any) -> int:
    """Return the bytes of the result of a `dot_general`."""
    (contracted, _), (_, batch) = params["dimension_numbers"]
    summed, together = math.prod(left.shape[i] for i in contracted), math.prod(right.shape[i] for i in batch)
    dtype = jnp.dtype(params["preferred_element_type"] or left.dtype)
    return math.prod(left.shape) // summed * (math.prod(right.shape) // summed // together) * dtype.itemsize if summed else 0
