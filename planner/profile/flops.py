"""The number of floating-point operations of a program, including its loops."""

import math
from typing import Any

import jax


def count_flops(traced: jax.stages.Traced, lowered: jax.stages.Lowered) -> float:
    """FLOPs of a program: those of XLA's cost analysis, and those of loop iterations that it omits.

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
    jaxpr = traced.jaxpr.jaxpr
    return float(analysis.get("flops", 0.0)) + _more_turns(jaxpr, [True] * len(jaxpr.outvars), 1)


def _more_turns(jaxpr: Any, used: list[bool], turns: int) -> float:
    """FLOPs of the products in a jaxpr that runs `turns` times, minus those of one time, without unused results, as in XLA."""
    needed = {var for var, is_used in zip(jaxpr.outvars, used, strict=True) if is_used and not hasattr(var, "val")}  # no constants
    total = 0.0
    for equation in reversed(jaxpr.eqns):
        wanted = [var in needed for var in equation.outvars]
        if not any(wanted) and not equation.effects:
            continue
        needed.update(var for var in equation.invars if not hasattr(var, "val"))
        total += (turns - 1) * _product_flops(equation)
        name, params = equation.primitive.name, equation.params
        again = params["length"] if name == "scan" else 1
        bodies = params["branches"] if name == "cond" else [params[key] for key in _BODIES if key in params]
        for body in bodies:
            body = getattr(body, "jaxpr", body)
            if hasattr(body, "eqns"):
                of_body = wanted if name != "scan" and len(wanted) == len(body.outvars) else [True] * len(body.outvars)
                total += _more_turns(body, of_body, turns * again)
    return total


_BODIES = ("jaxpr", "call_jaxpr", "body_jaxpr", "fun_jaxpr")


def _product_flops(equation: Any) -> float:
    """FLOPs of a matrix product or a convolution; 0 for everything else."""
    params = equation.params
    if equation.primitive.name == "dot_general":
        left, ((contracted, _), _) = equation.invars[0].aval.shape, params["dimension_numbers"]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
    if equation.primitive.name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
    return 0.0
