"""Jaxprs without calls and without scans over layers, with a separate input for each slice of a stacked leaf."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex
import numpy as np

from jpipe.model.jaxprs._dependence import body_of, is_literal, scan_parts
from jpipe.model.jaxprs._primitives import SIZELESS
from jpipe.model.jaxprs._wanted import UNKNOWN
from jpipe.model.traced.flat._jaxpr_builder import (
    MOST,
    Builder,
    Elementwise,
    Lazy,
    LeafSlice,
    Rows,
    Stack,
    Value,
    axes_of,
    item,
    transposed,
    whole,
)

CUT = "jpipe_cut["
"""The prefix of the name of a call that marks a cut; such a call stays one equation."""

_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})


@dataclass(frozen=True)
class Leaf:
    """A leaf of a tree, or a slice of one."""

    number: int  # the number of the leaf
    index: tuple[int, ...] = ()  # the index of the slice; `()` for the whole leaf
    axes: tuple[int, ...] = ()  # the axes of the leaf to which the numbers in `index` belong, in ascending order


@dataclass(frozen=True)
class Flat:
    """A jaxpr without calls and without scans over layers."""

    closed: Any  # the jaxpr
    # for each of the first `len(leaves)` inputs, its leaf or slice; the other inputs are unchanged. All slices of a leaf follow each other
    # in C order.
    leaves: tuple[Leaf, ...]
    results: tuple[Leaf, ...]  # for each output, the original jaxpr's output, or the slice of one, in the same order


def take_slice(leaf: Leaf, array: Any) -> Any:
    """Return the slice of an array that a `Leaf` describes, or the whole array."""
    index: list[Any] = [slice(None)] * array.ndim
    for axis, i in zip(leaf.axes, leaf.index, strict=True):
        index[axis] = i
    return array[tuple(index)] if leaf.axes else array


def stack_slices(slices: Mapping[Leaf, Any], stack: Any) -> Any:
    """Return the array of a leaf from all its slices, or from the whole leaf. `stack` takes (arrays, axis), as `jnp.stack`."""
    (leaf, array), *_ = slices.items()
    if not leaf.axes:
        return array
    *_, last = leaf.axes
    rows: dict[Leaf, list[Any]] = {}
    for one, array in sorted(slices.items(), key=lambda pair: pair[0].index):
        rows.setdefault(Leaf(one.number, one.index[:-1], one.axes[:-1]), []).append(array)
    axis = last - len(leaf.axes) + 1
    return stack_slices({one: stack(arrays, axis) for one, arrays in rows.items()}, stack)


def flatten(
    closed: Any, num_leaves: int, replaces: Mapping[int, int] | None = None, axes: Mapping[int, Iterable[int]] | None = None
) -> Flat:
    """Inline the calls of a jaxpr and unroll its scans over stacked leaves. The flat jaxpr computes the same values.

    If a scan runs over a leaf, or if a leaf is read only by constant indices, its slices become separate inputs. If the whole leaf is also
    read, its slices are stacked again. Rematerialized functions, functions with custom derivatives, loops, branches, other scans and calls
    with a name that begins with `CUT` stay single equations.

    The first `num_leaves` inputs, parameters and layer state, may be split, and must be along the `axes` of another trace of the model. An
    output that is the new value of a leaf (`replaces`) is split like the leaf.
    """
    jaxpr, replaces = closed.jaxpr, replaces or {}
    builder = Builder([var.aval for var in jaxpr.invars[:num_leaves]], axes or {})
    leaves = [LeafSlice(builder, number) for number in range(num_leaves)]
    data = [jex.Var(var.aval) for var in jaxpr.invars[num_leaves:]]
    values = _run(builder, jaxpr, closed.consts, [*leaves, *data])
    builder.split_indexed()
    for number, leaf in replaces.items():
        builder.axes[leaf] |= axes_of(values[number])
    outputs = {}
    for number, value in enumerate(values):
        split = sorted(builder.axes[replaces[number]] if number in replaces else axes_of(value))
        for index in np.ndindex(*(value.aval.shape[axis] for axis in split)):
            outputs[Leaf(number, index, tuple(split))] = whole(_part(builder, value, split, index))
    equations, builder.equations = builder.equations, []
    inputs = builder.inputs()
    variables, consts = zip(*builder.consts.values(), strict=True) if builder.consts else ((), ())
    eqns = [*builder.equations, *equations]
    flat = jex.Jaxpr(variables, [*inputs, *data], [*outputs.values()], eqns, jaxpr.effects, UNKNOWN)
    slices = [Leaf(number, index, tuple(sorted(split))) for number, split in enumerate(builder.axes) for index in builder.slices(number)]
    return Flat(jex.ClosedJaxpr(flat, consts), tuple(slices), tuple(outputs))


def _part(builder: Builder, value: Value, axes: Sequence[int], index: Sequence[int]) -> Value:
    """Return a slice of a value along several axes."""
    for number, (axis, i) in enumerate(zip(axes, index, strict=True)):
        value = item(builder, value, axis - number, i)
    return value


def _run(builder: Builder, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value]) -> list[Value]:
    """Add the equations of a jaxpr, applied to these inputs, and return its outputs."""
    values: dict[Any, Value] = dict(zip(jaxpr.constvars, map(builder.constant, jaxpr.constvars, consts), strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(var: Any) -> Value:
        return var if is_literal(var) else values[var]

    for equation in jaxpr.eqns:
        results = _results(builder, equation, [read(var) for var in equation.invars])
        values.update(zip(equation.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _results(builder: Builder, equation: Any, inputs: list[Value]) -> Sequence[Value]:
    """Return the results of an equation applied to these inputs."""
    name = equation.primitive.name
    if name in _INLINED and not equation.params.get("name", "").startswith(CUT):
        return _run(builder, *body_of(equation), inputs)
    if name == "scan" and 0 < equation.params["length"] <= MOST and _is_over_layers(builder, equation, inputs):
        return _scan(builder, equation, inputs)
    if len(equation.outvars) == 1 and any(isinstance(value, Lazy) for value in inputs):
        result = _of_slices(builder, equation, inputs)
        if result is not None:
            return [result]
    return builder.add(equation, [whole(value) for value in inputs])


def _is_over_layers(builder: Builder, equation: Any, inputs: list[Value]) -> bool:
    """Return whether each step of a scan reads other slices of a leaf: the scan runs over the leaf, or reads it by a counter."""
    body, consts = body_of(equation)
    count, carried = scan_parts(equation, body)
    is_leaf = [isinstance(value, Lazy) and value.of_leaf for value in inputs]
    if any(is_leaf[count + carried :]) or not any(is_leaf[:count]):
        return any(is_leaf[count + carried :])
    trial = Builder([value.aval for value in inputs], {})
    values: list[Value] = [
        LeafSlice(trial, number)
        if is_leaf[number]
        else trial.variable(value.aval, None if isinstance(value, Lazy) else builder.numbers(value))
        for number, value in enumerate(inputs)
    ]
    carry, xs, reads = values[count : count + carried], values[count + carried :], []
    for i in _steps(equation)[:2]:
        outputs = _run(trial, body, consts, [*values[:count], *carry, *(item(trial, x, 0, i) for x in xs)])
        carry = outputs[:carried]
        reads.append({*trial.reads})
    return any(fixed for _, fixed in reads[-1] - reads[0])


def _steps(equation: Any) -> Sequence[int]:
    """Return the numbers of the steps of a scan, in the order in which they run."""
    steps = range(equation.params["length"])
    return steps[::-1] if equation.params["reverse"] else steps


def _scan(builder: Builder, equation: Any, inputs: list[Value]) -> list[Value]:
    """Add the steps of a scan one by one, and return its results."""
    body, consts = body_of(equation)
    count, carried = scan_parts(equation, body)
    carry, xs = inputs[count : count + carried], inputs[count + carried :]
    for x in xs:
        if isinstance(x, Lazy):
            x.split(0)
    steps: dict[int, list[Value]] = {}
    for i in _steps(equation):
        outputs = _run(builder, body, consts, [*inputs[:count], *carry, *(item(builder, x, 0, i) for x in xs)])
        carry, steps[i] = outputs[:carried], outputs[carried:]
    ys = enumerate(equation.outvars[carried:])
    return [*carry, *(Stack(builder, var.aval, [steps[i][k] for i in range(len(steps))]) for k, var in ys)]


def _of_slices(builder: Builder, equation: Any, inputs: list[Value]) -> Value | None:
    """Return the result of an equation that can be computed slice by slice, or None for another equation."""
    name, params, aval = equation.primitive.name, equation.params, equation.outvars[0].aval
    if name in SIZELESS and params.get("sharding") is None and aval.shape:
        is_sliced = all(isinstance(value, Lazy) if value.aval.shape == aval.shape else not value.aval.shape for value in inputs)
        return Elementwise(builder, aval, equation, inputs) if is_sliced else None
    source, *more = inputs
    if not isinstance(source, Lazy) or not math.prod(source.aval.shape):
        return None
    before, after = tuple(source.aval.shape), tuple(aval.shape)
    if name == "dynamic_slice" and after[1:] == before[1:] and before[0] <= MOST:
        start = builder.numbers(whole(more[0]))
        if start is None:
            return None
        if not is_literal(more[0]):
            source.split(0)
        first = min(max(int(start), 0), before[0] - after[0])
        return Rows(aval, source, np.arange(first, first + after[0]), 1, equation, [whole(value) for value in more])
    return None if more else _moved(builder, equation, source)


def _moved(builder: Builder, equation: Any, source: Lazy) -> Value | None:
    """Return the result of an equation that only moves the elements of a value, or None for another equation."""
    name, params, aval = equation.primitive.name, equation.params, equation.outvars[0].aval
    before, after = tuple(source.aval.shape), tuple(aval.shape)
    if name == "transpose":
        return transposed(builder, source, tuple(params["permutation"]))
    if name == "squeeze":
        return functools.reduce(lambda value, axis: item(builder, value, axis, 0), sorted(params["dimensions"], reverse=True), source)
    if name == "rev" and tuple(params["dimensions"]) == (0,):
        return Rows(aval, source, np.arange(before[0])[::-1], 1, equation)
    if name == "slice" and after[1:] == before[1:] and after[0]:
        stride = params["strides"][0] if params["strides"] else 1
        return Rows(aval, source, np.arange(params["start_indices"][0], params["limit_indices"][0], stride), 1, equation)
    if name == "reshape" and params["dimensions"] is None:
        new = len(after) - len(before)
        if new > 0 and before[1:] == after[new + 1 :]:  # (a * b, ...) -> (a, b, ...)
            return Rows(aval, source, np.arange(before[0]).reshape(after[: new + 1]), 1, equation)
        if new == -1 and before[2:] == after[1:]:  # (a, b, ...) -> (a * b, ...)
            return Rows(aval, source, np.arange(after[0]), 2, equation)
    return None
