"""A policy of `jax.checkpoint` that keeps everything but the results of elementwise operations."""

from typing import Any

_ARITHMETIC = "abs add add_any clamp div integer_pow max min mul neg one_minus_square pow rem sign square sub"
_ROUNDING = "ceil floor reduce_precision round"
_LOGIC = "and eq ge gt is_finite le lt ne not or select_n shift_left shift_right_arithmetic shift_right_logical xor"
_FUNCTIONS = "atan cbrt cos cosh erf erfc erf_inv exp exp2 expm1 log log1p log2 logistic rsqrt sin sinh sqrt tan tanh"
_LAYOUT = "bitcast_convert_type broadcast_in_dim convert_element_type copy expand_dims iota reshape squeeze stop_gradient transpose"
_ELEMENTWISE = frozenset(f"{_ARITHMETIC} {_ROUNDING} {_LOGIC} {_FUNCTIONS} {_LAYOUT}".split())


def all_but_elementwise(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return whether a forward keeps the results of an operation: not if each number of them is made from one number of each operand.

    XLA fuses such operations with the one that reads their results, so that a backward computes them again almost for free, while
    keeping them writes and reads memory.

    Args:
        primitive: the operation, as `jax.checkpoint` passes it to policies.
    """
    return primitive.name not in _ELEMENTWISE
