"""Counts of the floating-point operations of a program, including its loops."""

import functools
from typing import Any

import jax

from jpipe.model import find_products


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
    further = sum(times * flops - _counted_by_xla(equation, flops) for equation, flops, times in find_products(traced.jaxpr.jaxpr))
    return _analyzed(lowered) + further


def _counted_by_xla(equation: Any, flops: float) -> float:
    """Return the FLOPs that XLA counts for a product. For a product of groups of rows they depend on the platform."""
    if equation.primitive.name != "ragged_dot_general":
        return flops
    bind = functools.partial(equation.primitive.bind, **equation.params)
    return _analyzed(jax.jit(bind).lower(*(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in equation.invars)))


def _analyzed(lowered: jax.stages.Lowered) -> float:
    """Return the FLOPs of a program by XLA's cost analysis. Some backends have no analysis, and some return a list with one analysis."""
    analysis: Any = lowered.cost_analysis()
    analysis = analysis[0] if isinstance(analysis, list) else analysis or {}
    return float(analysis.get("flops", 0.0))
