"""Find the dim of the rows in each array of a jaxpr, if the first arrays have rows. It is a hint: a wrong dim changes no result."""

import math
from collections.abc import Sequence
from typing import Any

from jpipe.model.jaxprs._dependence import body_of, is_call, is_literal, scan_parts

Dim = int | None


def row_dims(jaxpr: Any, inputs: Sequence[Dim]) -> dict[Any, int]:
    """Return the dim of the rows for the variables of a jaxpr that have one, given the dim of each input, or None.

    If rows are merged with other dims, or a dim of rows is split, it is the dim in which the rows are outermost.
    """
    dims = {var: dim for var, dim in zip(jaxpr.invars, inputs, strict=True) if dim is not None}
    for equation in jaxpr.eqns:
        into = inputs_of(equation, dims)
        if any(dim is not None for dim in into):
            dims.update((var, dim) for var, dim in zip(equation.outvars, _results(equation, into), strict=True) if dim is not None)
    return dims


def inputs_of(equation: Any, dims: dict[Any, int]) -> list[Dim]:
    """Return the dim of the rows of each input of an equation, from the dims by variable."""
    return [None if is_literal(var) else dims.get(var) for var in equation.invars]


def scan_inputs(equation: Any, into: Sequence[Dim]) -> list[Dim]:
    """Return the dims of the rows of the inputs of a scan's body, from the dims of the scan's inputs."""
    body, _ = body_of(equation)
    consts, carried = scan_parts(equation, body)
    inputs = [*into[: consts + carried], *((dim - 1 if dim else None) for dim in into[consts + carried :])]
    for i, dim in enumerate(_of(row_dims(body, inputs), body.outvars[:carried]), consts):
        inputs[i] = dim if inputs[i] is None else inputs[i]
    return inputs


def _of(dims: dict[Any, int], variables: Sequence[Any]) -> list[Dim]:
    return [None if is_literal(var) else dims.get(var) for var in variables]


def _results(equation: Any, into: Sequence[Dim]) -> list[Dim]:
    name, params, body = equation.primitive.name, equation.params, body_of(equation)[0]
    if is_call(equation) or name == "shard_map":
        return _of(row_dims(body, into), body.outvars)
    if name == "cond":
        branch = params["branches"][0].jaxpr
        return _of(row_dims(branch, into[1:]), branch.outvars)
    if name == "scan":
        carried = scan_parts(equation, body)[1]
        outputs = _of(row_dims(body, scan_inputs(equation, into)), body.outvars)
        return [*outputs[:carried], *(None if dim is None else dim + 1 for dim in outputs[carried:])]
    number, dim = next((i, dim) for i, dim in enumerate(into) if dim is not None)
    shape = equation.invars[number].aval.shape
    return [_result(name, params, number, dim, shape, var.aval.shape) for var in equation.outvars]


def _result(name: str, params: Any, number: int, dim: int, shape: Sequence[int], result: Sequence[int]) -> Dim:
    """Return the dim of the rows in a result, from the dim of the rows in one operand, which has this number and shape."""
    if name == "transpose":
        return tuple(params["permutation"]).index(dim)
    if name == "broadcast_in_dim":
        return int(params["broadcast_dimensions"][dim])
    if name == "reshape":
        before = math.prod(shape[:dim])
        return next((e for e, size in enumerate(result) if size > 1 and math.prod(result[:e]) == before), None)
    if name == "squeeze":
        return dim - sum(bool(each < dim) for each in params["dimensions"])
    if name == "stack":
        return dim + bool(params["axis"] <= dim)
    if name == "unstack":
        return None if dim == params["axis"] else dim - bool(params["axis"] < dim)
    if name.startswith(("reduce_", "arg")) and "axes" in params:
        return None if dim in params["axes"] else dim - sum(bool(each < dim) for each in params["axes"])
    if name == "dot_general":
        return _of_product(params["dimension_numbers"], number, dim, len(shape), len(result))
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        return numbers.out_spec[0] if number == 0 and dim == numbers.lhs_spec[0] else None
    if name == "gather" and number == 1:
        rows = [each for each in range(len(result)) if each not in params["dimension_numbers"].offset_dims]
        return rows[dim] if dim < len(rows) else None
    if name.startswith("scatter"):
        return dim if number == 0 else None
    return dim if len(result) > dim and result[dim] == shape[dim] else None  # elementwise, or it does not touch the rows


def _of_product(numbers: Any, number: int, dim: int, rank: int, result: int) -> Dim:
    contracted, batch = (tuple(each[number]) for each in numbers)
    if dim in contracted:
        return None
    if dim in batch:
        return batch.index(dim)
    free = [each for each in range(rank) if each not in contracted and each not in batch]
    return free.index(dim) + (len(batch) if number == 0 else result - len(free))
