"""How many floating-point operations a program has, those of its loops included."""

import math
from typing import Any

import jax


def count_flops(traced: jax.stages.Traced, lowered: jax.stages.Lowered) -> float:
    """FLOPs of a program: what XLA's cost analysis says, and the turns of loops that it leaves out.

    XLA counts the body of a loop once. Of the further turns of a `scan` the matrix products and convolutions are added; of a
    `while`, of which nobody knows how often it turns, nothing.

    Args:
        traced: the program.
        lowered: the same, lowered. It need not be compiled, and nothing is allocated.

    Returns:
        0 where the backend does not say.
    """
    analysis: Any = lowered.cost_analysis()  # some backends have none, some a list of one
    analysis = analysis[0] if isinstance(analysis, list) else analysis or {}
    jaxpr = traced.jaxpr.jaxpr
    return float(analysis.get("flops", 0.0)) + _more_turns(jaxpr, [True] * len(jaxpr.outvars), 1)


def _more_turns(jaxpr: Any, used: list[bool], turns: int) -> float:
    """FLOPs of the products in a jaxpr that runs `turns` times, less those of one time; what nothing uses is left out, as XLA does."""
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
    """Of a matrix product or a convolution; 0 of all else."""
    params = equation.params
    if equation.primitive.name == "dot_general":
        left, ((contracted, _), _) = equation.invars[0].aval.shape, params["dimension_numbers"]
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
    if equation.primitive.name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / kernel[params["dimension_numbers"].rhs_spec[0]]
    return 0.0
