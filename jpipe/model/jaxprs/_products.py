"""Counts of the floating-point operations of matrix products and convolutions in a jaxpr."""

import math
from typing import Any

from jpipe.model.jaxprs._dependence import bodies


def count_products(jaxpr: Any) -> float:
    """Return the FLOPs of the matrix products and convolutions of a computation, without those inside kernels.

    All iterations of a scan count, one iteration of a while loop, and all branches of a conditional.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, times = equation.primitive.name, equation.params["length"] if equation.primitive.name == "scan" else 1
        if name in ("dot_general", "ragged_dot_general"):
            ((contracted, _), _), left = _dimensions(equation), equation.invars[0].aval.shape
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            into = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) / into
        total += times * sum(count_products(body) for body, _ in bodies(equation))
    return total


def _dimensions(equation: Any) -> Any:
    """Return the dimension numbers of a matrix product, perhaps of groups of rows."""
    if equation.primitive.name == "dot_general":
        return equation.params["dimension_numbers"]
    return equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
