"""Counts of the floating-point operations of matrix products and convolutions in a jaxpr."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np


def count_products(jaxpr: Any) -> dict[str, float]:
    """Return the FLOPs of the matrix products and convolutions in a traced program, by the dtype of the factors.

    All iterations of a `scan`, one iteration of a `while`, and all branches of a `cond` count. A call of cuDNN's attention or of splash
    attention counts in full, other kernels of Pallas not at all.

    Args:
        jaxpr: the program, as in `jax.make_jaxpr(f)(x).jaxpr`.
    """
    totals: dict[str, float] = {}
    for equation, flops, iterations in find_products(jaxpr):
        dtype = str((equation.outvars if equation.primitive.name == _KERNEL else equation.invars)[0].aval.dtype)
        totals[dtype] = totals.get(dtype, 0.0) + iterations * flops
    return totals


def find_products(jaxpr: Any, used: list[bool] | None = None, iterations: int = 1) -> Iterator[tuple[Any, float, int]]:
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
                yield from find_products(body, of_body, iterations * repeats)


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


def window_pairs(length: int, window: int, results: int, stride: int, before: int, spread: int, dilation: int) -> int:
    """Return how often one dim of a convolution multiplies an input by a weight: neither padding nor gaps between spread inputs count.

    Args:
        length, window, results: the lengths of input, window and result.
        stride, dilation: of the window.
        before: the padding before the input.
        spread: the dilation of the input.
    """
    at = np.arange(results)[:, None] * stride - before + np.arange(window) * dilation
    return int(np.count_nonzero((at >= 0) & (at <= (length - 1) * spread) & (at % spread == 0)))
