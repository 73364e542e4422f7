"""Matrix products as XLA computes them fastest on CPUs.

JAX computes the gradient of a weight w in `x @ w` as the transpose of a product of the output's gradient and x. If x has several dims of
rows, XLA then copies the output's gradient into another layout before it multiplies, which takes up to half as long as the product.
The product with its operands swapped is the gradient itself.

XLA has a fast and a slow library for products. It takes the slow one, for up to twice the time, if the sum is over the first dim of both
operands, but not if it is over their first two dims.

In attention XLA copies the probabilities, because JAX has them as the right operand with the sum over their last dim.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex

from jpipe.model.jaxprs._dependence import is_literal

Tree = Any


def with_swapped_products(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """Return the function with other operand orders in products: where it transposes a product, and where XLA then copies less."""

    def swapped(*arguments: Tree) -> Tree:
        closed, outputs = jax.make_jaxpr(function, return_shape=True)(*arguments)
        results = jex.jaxpr_as_fun(_closed(closed))(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(outputs), results)

    return swapped


def _closed(closed: Any) -> Any:
    return jex.ClosedJaxpr(_jaxpr(closed.jaxpr), closed.consts)


def _jaxpr(jaxpr: Any) -> Any:
    """Return a jaxpr with swapped products, also in the jaxprs that its equations call."""
    readers = Counter(var for equation in jaxpr.eqns for var in equation.invars if not is_literal(var))
    readers.update(var for var in jaxpr.outvars if not is_literal(var))
    equations, products = list[list[Any]](), dict[Any, int]()  # by result of a product, its place in `equations`
    for equation in jaxpr.eqns:
        source = equation.invars[0] if equation.primitive.name == "transpose" else None
        if source in products and readers[source] == 1 and _swaps(equation, equations[products[source]][0]):
            equations[products[source]] = _swapped(equations[products[source]][0], equation.outvars[0])
            continue
        if _sums_over_rows(equation):
            products[equation.outvars[0]] = len(equations)
        elif _copies_less(equation):
            equations.append(_turned(equation))
            continue
        is_left = equation.primitive.name in ("shard_map", "pallas_call")  # on meshes, and kernels, products stay as they are
        equations.append(
            [equation if is_left else equation.replace(params={key: _inside(value) for key, value in equation.params.items()})]
        )
    return jaxpr.replace(eqns=[each for group in equations for each in group])


def _sums_over_rows(equation: Any) -> bool:
    """Return whether an equation multiplies two arrays over the same first dims, as for the gradient of a weight."""
    if not _can_swap(equation):
        return False
    (left, right), batch = equation.params["dimension_numbers"]
    return bool(left) and left == right == tuple(range(len(left))) and batch == ((), ())


def _can_swap(equation: Any) -> bool:
    """Return whether an equation is a product of two arrays, both with the same precision."""
    if equation.primitive.name != "dot_general" or any(map(is_literal, equation.invars)):
        return False
    precision = equation.params["precision"]
    return precision is None or (isinstance(precision, tuple) and precision[0] == precision[1])


def _copies_less(equation: Any) -> bool:
    """Return whether XLA copies less for a product of batches of matrices if its operands are swapped and its result is transposed."""
    if not _can_swap(equation) or not (numbers := equation.params["dimension_numbers"])[1][0]:
        return False
    operands, result = [var.aval for var in equation.invars], equation.outvars[0].aval
    swapped = _copied(operands[::-1], *(pair[::-1] for pair in numbers))
    return swapped + result.size * result.dtype.itemsize < _copied(operands, *numbers)


def _copied(operands: Sequence[Any], summed: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]) -> int:
    """Return the bytes of the operands that are not in the order that XLA multiplies: (batch, rows, sum) and (batch, sum, columns)."""
    copied = 0
    for operand, sums, batches, is_left in zip(operands, summed, batch, (True, False), strict=True):
        free = [dim for dim in range(operand.ndim) if dim not in (*sums, *batches)]
        order = [dim for dim in (*batches, *(free if is_left else ()), *sums, *(() if is_left else free)) if operand.shape[dim] != 1]
        copied += operand.size * operand.dtype.itemsize * (order != sorted(order))
    return copied


def _swaps(transpose: Any, product: Any) -> bool:
    """Return whether a transpose exchanges the dims of a product's two operands."""
    dims, rows = transpose.outvars[0].aval.ndim, len(product.params["dimension_numbers"][0][0])
    of_left = product.invars[0].aval.ndim - rows
    return tuple(transpose.params["permutation"]) == (*range(of_left, dims), *range(of_left)) and 0 < of_left < dims


def _swapped(product: Any, result: Any) -> list[Any]:
    """Return equations that compute the transpose of a product: the product of its swapped operands, with two dims of rows if possible."""
    dims = len(product.params["dimension_numbers"][0][0])
    rows = [size for size in product.invars[0].aval.shape[:dims] if size != 1]
    if len(rows) == 1 and rows[0] % 2 == 0:
        rows = [2, rows[0] // 2]

    def multiply(left: Any, right: Any) -> Any:
        kept = jax.lax.optimization_barrier(left)  # otherwise XLA may compute it a second time, in the order of its transpose
        left, right = (x.reshape(*rows, math.prod(x.shape[dims:])) for x in (kept, right))
        summed = tuple(range(len(rows)))
        return jax.lax.dot_general(left, right, ((summed, summed), ((), ())), **_options(product)).reshape(result.aval.shape)

    return _traced(multiply, product, result)


def _turned(product: Any) -> list[Any]:
    """Return equations that compute a product of batches of matrices from its swapped operands."""
    summed, batch = product.params["dimension_numbers"]
    batches = len(batch[0])
    rows = product.invars[0].aval.ndim - batches - len(summed[0])
    dims = range(product.outvars[0].aval.ndim)
    columns = len(dims) - rows - batches

    def multiply(right: Any, left: Any) -> Any:
        turned = jax.lax.dot_general(right, left, (summed[::-1], batch[::-1]), **_options(product))
        return turned.transpose((*dims[:batches], *dims[batches + columns :], *dims[batches : batches + columns]))

    return _traced(multiply, product, product.outvars[0])


def _options(product: Any) -> dict[str, Any]:
    return {key: value for key, value in product.params.items() if key in ("precision", "preferred_element_type")}


def _traced(multiply: Callable[[Any, Any], Any], product: Any, result: Any) -> list[Any]:
    """Return the equations of a function of the swapped operands of a product that computes a result."""
    operands = product.invars[::-1]
    jaxpr = jax.make_jaxpr(multiply)(*(var.aval for var in operands)).jaxpr
    names = dict(zip([*jaxpr.invars, *jaxpr.outvars], [*operands, result], strict=True))
    return [
        each.replace(
            invars=[names.get(var, var) for var in each.invars],
            outvars=[names.get(var, var) for var in each.outvars],
            source_info=product.source_info,
        )
        for each in jaxpr.eqns
    ]


def _inside(value: Any) -> Any:
    """Return a parameter of an equation with swapped products in its jaxprs."""
    if isinstance(value, tuple) and any(isinstance(each, jex.ClosedJaxpr) for each in value):
        return type(value)(*map(_inside, value)) if hasattr(value, "_fields") else tuple(map(_inside, value))
    return _closed(value) if isinstance(value, jex.ClosedJaxpr) else _jaxpr(value) if isinstance(value, jex.Jaxpr) else value
