"""A policy of `jax.checkpoint` that keeps everything but the results of elementwise operations."""

from typing import Any

_ARITHMETIC = "abs add add_any clamp div integer_pow max min mul neg pow rem sign square sub"
_LOGIC = "and eq ge gt is_finite le lt ne not or select_n xor"
_FUNCTIONS = "cbrt cos erf erfc erf_inv exp exp2 expm1 log log1p logistic rsqrt sin sqrt tan tanh"
_LAYOUT = "broadcast_in_dim convert_element_type copy expand_dims iota reshape squeeze stop_gradient transpose"
_ELEMENTWISE = frozenset(f"{_ARITHMETIC} {_LOGIC} {_FUNCTIONS} {_LAYOUT}".split())


def all_but_elementwise(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return whether a forward keeps the results of an operation: not if each number of them is made from one number of each operand.

    XLA fuses such operations with the one that reads their results, so that a backward computes them again almost for free, while
    keeping them writes and reads memory.

    Args:
        primitive: the operation, as `jax.checkpoint` passes it to policies.
    """
    return primitive.name not in _ELEMENTWISE
