"""Counts of the floating-point operations of a program, including its loops."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax

from jpipe_planner.machine.roofline import window_pairs

__all__ = ["count_products"]


def count_flops(traced: jax.stages.Traced, lowered: jax.stages.Lowered) -> float:
    """Return the FLOPs of a program: the FLOPs from XLA's cost analysis, plus the loop iterations that it omits.

    XLA counts the body of a loop once. For a `scan`, the matrix products and convolutions of the other iterations are added. For a `while`,
    nothing is added, because the number of iterations is unknown. In a product of groups of rows, each with its own kernel
    (`jax.lax.ragged_dot`), each row counts once, even if XLA multiplies all rows by all kernels, as for CPUs.

    Args:
        traced: the program.
        lowered: the same program, lowered. It need not be compiled, and nothing is allocated.

    Returns:
        The FLOPs, or 0 if the backend does not report them.
    """
    # Only the iterations that XLA has not counted are added. It has counted the first iteration of every loop.
    further = sum(times * flops - _counted_by_xla(equation, flops) for equation, flops, times in _products(traced.jaxpr.jaxpr))
    return _analyzed(lowered) + further


def count_products(jaxpr: Any) -> dict[str, float]:
    """Return the FLOPs of the matrix products and convolutions in a traced program, by the dtype of the factors.

    All iterations of a `scan`, one iteration of a `while`, and all branches of a `cond` count. A call of cuDNN's attention or of splash
    attention counts in full, other kernels of Pallas not at all.

    Args:
        jaxpr: the program, as in `jax.make_jaxpr(f)(x).jaxpr`.
    """
    totals: dict[str, float] = {}
    for equation, flops, iterations in _products(jaxpr):
        dtype = str((equation.outvars if equation.primitive.name == _KERNEL else equation.invars)[0].aval.dtype)
        totals[dtype] = totals.get(dtype, 0.0) + iterations * flops
    return totals


def _counted_by_xla(equation: Any, flops: float) -> float:
    """Return the FLOPs that XLA counts for a product. For a product of groups of rows they depend on the platform."""
    if equation.primitive.name != _RAGGED:
        return flops
    bind = functools.partial(equation.primitive.bind, **equation.params)
    return _analyzed(jax.jit(bind).lower(*(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in equation.invars)))


def _analyzed(lowered: jax.stages.Lowered) -> float:
    """Return the FLOPs of a program by XLA's cost analysis. Some backends have no analysis, and some return a list with one analysis."""
    analysis: Any = lowered.cost_analysis()
    analysis = analysis[0] if isinstance(analysis, list) else analysis or {}
    return float(analysis.get("flops", 0.0))


def _products(jaxpr: Any, used: list[bool] | None = None, iterations: int = 1) -> Iterator[tuple[Any, float, int]]:
    """Yield (equation, FLOPs of one iteration, number of iterations) of the products in a jaxpr that runs `iterations` times.

    As in XLA, products with unused results are left out.
    """
    used = [True] * len(jaxpr.outvars) if used is None else used
    needed = {var for var, is_used in zip(jaxpr.outvars, used, strict=True) if is_used and not hasattr(var, "val")}  # no constants
    for equation in reversed(jaxpr.eqns):
        used_results = [var in needed for var in equation.outvars]
        if not any(used_results) and not equation.effects:
            continue
        needed.update(var for var in equation.invars if not hasattr(var, "val"))
        name, params = equation.primitive.name, equation.params
        if flops := product_flops(equation):
            yield equation, flops, iterations
        if name == _KERNEL:
            continue
        repeats = params["length"] if name == "scan" else 1
        bodies = params["branches"] if name == "cond" else [params[key] for key in _BODIES if key in params]
        for body in bodies:
            body = getattr(body, "jaxpr", body)
            if hasattr(body, "eqns"):
                of_body = used_results if name != "scan" and len(used_results) == len(body.outvars) else [True] * len(body.outvars)
                yield from _products(body, of_body, iterations * repeats)


_BODIES = ("jaxpr", "call_jaxpr", "body_jaxpr", "fun_jaxpr")
_CUDNN_ATTENTION = ("dot_product_attention_fwd_wrapper", "dot_product_attention_fwd")
_RAGGED, _KERNEL = "ragged_dot_general", "pallas_call"


def product_flops(equation: Any) -> float:
    """Return the FLOPs of a matrix product or a convolution; 0 for other equations."""
    params = equation.params
    if equation.primitive.name == "dot_general":
        left, ((contracted, _), _) = equation.invars[0].aval.shape, params["dimension_numbers"]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
    if equation.primitive.name == _RAGGED:
        dimensions, (left, _, groups) = params["ragged_dot_dimension_numbers"], (var.aval.shape for var in equation.invars)
        (contracted, _), _ = dimensions.dot_dimension_numbers
        flops = 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
        return flops if dimensions.rhs_group_dimensions else flops / groups[-1]  # a gradient of kernels has a result for each group
    if equation.primitive.name == "conv_general_dilated":
        shapes, numbers = [var.aval.shape for var in (*equation.invars[:2], *equation.outvars)], params["dimension_numbers"]
        (batch, features, *_), (_, contracted, *_) = numbers.out_spec, numbers.rhs_spec
        specs = numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:]
        sizes = zip(*([shape[dim] for dim in spec] for shape, spec in zip(shapes, specs, strict=True)), strict=True)
        windows = zip(*(params[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation")), strict=True)
        pairs = (
            window_pairs(length, window, results, stride, low, spread, dilation)
            for (length, window, results), (stride, (low, _), spread, dilation) in zip(sizes, windows, strict=True)
        )
        return 2.0 * shapes[2][batch] * shapes[2][features] * shapes[1][contracted] * math.prod(pairs)
    if equation.primitive.name in _CUDNN_ATTENTION:
        query, key = (equation.invars[number].aval.shape for number in (0, 1))
        return 4.0 * math.prod(query) * key[1 if params["layout"] == 0 else 2]  # keys (b, s, heads, h) or (b, heads, s, h)
    if equation.primitive.name == _KERNEL and str(params["name"]).startswith("splash_mha_fwd"):
        out = equation.outvars[0].aval.shape  # (b, heads, s, h), for as many keys as queries
        return 4.0 * math.prod(out) * out[-2]
    return 0.0
