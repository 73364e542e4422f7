"""Names of primitives by kind, and policies of `jax.checkpoint` that save all results except from elementwise operations."""

from typing import Any

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
_ELEMENTWISE = _COMMON | _LAYOUT | _SHIFTS | _FUNCTIONS | _MORE_FUNCTIONS | _RARE


def all_but_elementwise(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return whether a forward saves the results of an operation. It does not for elementwise operations and changes of layout.

    XLA fuses such operations into the one that reads their results, so a backward recomputes them in almost no time, while saving the
    results would write and read memory.

    Args:
        primitive: the primitive of the operation, which `jax.checkpoint` passes to policies.
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
