"""Counts of the floating-point operations of a program, its loops included."""

import math
from collections.abc import Iterator
from typing import Any

import jax


def count_flops(traced: jax.stages.Traced, lowered: jax.stages.Lowered) -> float:
    """Return the FLOPs of a program: those of XLA's cost analysis, and those of loop iterations that it omits.

    XLA counts the body of a loop once. For a `scan`, the matrix products and convolutions of the further iterations are added; for a
    `while`, whose number of iterations is unknown, nothing is added.

    Args:
        traced: the program.
        lowered: the same program, lowered. It need not be compiled, and nothing is allocated.

    Returns:
        The FLOPs, or 0 if the backend does not report them.
    """
    analysis: Any = lowered.cost_analysis()  # some backends have none, some a list of one
    analysis = analysis[0] if isinstance(analysis, list) else analysis or {}
    # Only what XLA has not counted: it has counted the first iteration of every loop.
    return float(analysis.get("flops", 0.0)) + sum((iterations - 1) * flops for flops, _, iterations in _products(traced.jaxpr.jaxpr))


def count_products(jaxpr: Any) -> dict[str, float]:
    """Return the FLOPs of the matrix products and convolutions in a traced program, by the dtype of the factors.

    All iterations of a `scan` count, one of a `while`, and all branches of a `cond`. Attention in one call of cuDNN counts in full.

    Args:
        jaxpr: the program, as in `jax.make_jaxpr(f)(x).jaxpr`.
    """
    totals: dict[str, float] = {}
    for flops, dtype, iterations in _products(jaxpr):
        totals[dtype] = totals.get(dtype, 0.0) + iterations * flops
    return totals


def _products(jaxpr: Any, used: list[bool] | None = None, iterations: int = 1) -> Iterator[tuple[float, str, int]]:
    """Yield the products in a jaxpr that runs `iterations` times, without unused results, as in XLA.

    Yields:
        FLOPs, dtype, number of iterations of each product.
    """
    used = [True] * len(jaxpr.outvars) if used is None else used
    needed = {var for var, is_used in zip(jaxpr.outvars, used, strict=True) if is_used and not hasattr(var, "val")}  # no constants
    for equation in reversed(jaxpr.eqns):
        used_results = [var in needed for var in equation.outvars]
        if not any(used_results) and not equation.effects:
            continue
        needed.update(var for var in equation.invars if not hasattr(var, "val"))
        if flops := _product_flops(equation):
            yield flops, str(equation.invars[0].aval.dtype), iterations
        name, params = equation.primitive.name, equation.params
        repeats = params["length"] if name == "scan" else 1
        bodies = params["branches"] if name == "cond" else [params[key] for key in _BODIES if key in params]
        for body in bodies:
            body = getattr(body, "jaxpr", body)
            if hasattr(body, "eqns"):
                of_body = used_results if name != "scan" and len(used_results) == len(body.outvars) else [True] * len(body.outvars)
                yield from _products(body, of_body, iterations * repeats)


_BODIES = ("jaxpr", "call_jaxpr", "body_jaxpr", "fun_jaxpr")
_CUDNN_ATTENTION = ("dot_product_attention_fwd_wrapper", "dot_product_attention_fwd")


def _product_flops(equation: Any) -> float:
    """Return the FLOPs of a matrix product or a convolution; 0 for everything else."""
    params = equation.params
    if equation.primitive.name == "dot_general":
        left, ((contracted, _), _) = equation.invars[0].aval.shape, params["dimension_numbers"]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
    if equation.primitive.name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
    if equation.primitive.name in _CUDNN_ATTENTION:
        query, key = (equation.invars[number].aval.shape for number in (0, 1))
        return 4.0 * math.prod(query) * key[1 if params["layout"] == 0 else 2]  # keys (b, s, heads, h) or (b, heads, s, h)
    return 0.0
