"""Jaxprs without calls and without scans over layers, with a separate input for each slice of a stacked leaf."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import numpy as np
from jax import lax

from jpipe.model.jaxprs._dependence import body_of, is_literal, scan_parts
from jpipe.model.jaxprs._wanted import UNKNOWN, bind
from jpipe.model.traced._stacked import ELEMENTWISE, Atom, Stacked, Value, depth_of, selected, shape_of, slicewise, stack

CUT = "jpipe_cut["
"""How the name of a call begins that marks a cut; such a call stays one equation."""

_INLINED = frozenset({"jit", "pjit", "closed_call", "core_call"})


class Leaf(NamedTuple):
    """A leaf of a tree, or a slice of one.

    Attributes:
        number: of the leaf.
        index: of the slice along the leading dims; `()` for the whole leaf.
    """

    number: int
    index: tuple[int, ...]


@dataclass(frozen=True)
class Flat:
    """A jaxpr without calls and without scans over layers.

    Attributes:
        closed: the jaxpr.
        leaves: what the first `len(leaves)` inputs are, by number and index; the remaining inputs are as they were.
        results: what each output is: an output of the original jaxpr, or a slice of one.
    """

    closed: Any
    leaves: tuple[Leaf, ...]
    results: tuple[Leaf, ...]

    @property
    def depths(self) -> dict[int, int]:
        """Return for each leaf along how many leading dims it is split."""
        return {leaf.number: len(leaf.index) for leaf in self.leaves}


def flatten(closed: Any, num_leaves: int, replaces: Mapping[int, int] | None = None, depths: Mapping[int, int] | None = None) -> Flat:
    """Inline the calls of a jaxpr and unroll its scans over stacked leaves.

    Slices of a leaf over which a scan runs become inputs of their own. Where such a leaf is read as a whole, too, its slices are stacked
    again. Rematerialized functions, functions with custom derivatives, loops, branches, scans over anything else and calls whose name
    begins with `CUT` stay single equations.

    Args:
        closed: the closed jaxpr.
        num_leaves: how many of the first inputs may be split: parameters and layer state.
        replaces: the leaf whose new value an output is, for outputs that must be split as this leaf is.
        depths: for some leaves along how many leading dims to split them at least, as in another trace of the same model.

    Returns:
        The flat jaxpr, with all slices of a leaf in C order in the place of the leaf, and likewise for outputs.
    """
    return _Flattener(closed.jaxpr.invars[:num_leaves], dict(depths or {})).flatten(closed, dict(replaces or {}))


class _Flattener:
    """Evaluates a jaxpr symbolically, collecting the equations of the flat one."""

    def __init__(self, leaves: Sequence[Any], depths: dict[int, int]):
        self.equations: list[Any] = []
        self.consts: dict[int, tuple[Any, Any]] = {}  # the variable and the value, by the identity of the value
        self.avals = [var.aval for var in leaves]
        self.depths = [depths.get(number, 0) for number in range(len(leaves))]
        self.reads: dict[Leaf, Any] = {}  # variables of leaves and of their slices
        self.templates: dict[Any, Any] = {}

    def flatten(self, closed: Any, replaces: Mapping[int, int]) -> Flat:
        invars = closed.jaxpr.invars[len(self.avals) :]
        data = [jex.Var(var.aval) for var in invars]
        values = self.run(closed.jaxpr, closed.consts, [*(self.leaf(Leaf(i, ())) for i in range(len(self.avals))), *data])
        for number, leaf in replaces.items():
            self.depths[leaf] = max(self.depths[leaf], depth_of(values[number]))
        outputs = [
            (Leaf(number, index), self.whole(functools.reduce(self.item, index, value)))
            for number, value in enumerate(values)
            for index in np.ndindex(shape_of(value)[: self.depths[replaces[number]] if number in replaces else depth_of(value)])
        ]
        equations, self.equations = self.equations, []
        leaves = self.inputs()
        variables, consts = zip(*self.consts.values(), strict=True) if self.consts else ((), ())
        inputs = [*leaves.values(), *data]
        results = [var for _, var in outputs]
        jaxpr = jex.Jaxpr(variables, inputs, results, [*self.equations, *equations], closed.jaxpr.effects, UNKNOWN)
        return Flat(jex.ClosedJaxpr(jaxpr, consts), tuple(leaves), tuple(leaf for leaf, _ in outputs))

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Value]) -> list[Value]:
        """Return the outputs of a jaxpr for values, adding its equations."""
        values: dict[Any, Value] = dict(zip(jaxpr.constvars, map(self.constant, jaxpr.constvars, consts), strict=True))
        values.update(zip(jaxpr.invars, inputs, strict=True))

        def read(var: Any) -> Value:
            return var if is_literal(var) else values[var]

        for equation in jaxpr.eqns:
            values.update(zip(equation.outvars, self.results(equation, [read(var) for var in equation.invars]), strict=True))
        return [read(var) for var in jaxpr.outvars]

    def results(self, equation: Any, inputs: list[Value]) -> Sequence[Value]:
        """Return the results of an equation."""
        name = equation.primitive.name
        if name in _INLINED and not equation.params.get("name", "").startswith(CUT):
            return self.run(*body_of(equation), inputs)
        if name == "scan" and any(isinstance(x, Stacked) and x.of_leaf for x in inputs[sum(scan_parts(equation, body_of(equation)[0])) :]):
            return self.scan(equation, inputs)
        if any(isinstance(value, Stacked) for value in inputs):
            result = self.sliced(equation, inputs)
            if result is not None:
                return [result]
        return self.add(equation, inputs)

    def add(self, equation: Any, inputs: Sequence[Value]) -> list[Atom]:
        """Add an equation and return its results."""
        results = [var if isinstance(var, jex.DropVar) else jex.Var(var.aval) for var in equation.outvars]
        self.equations.append(equation.replace(invars=[self.whole(value) for value in inputs], outvars=results))
        return results

    # Scans ---------------------------------------------------------------------------------------------------------------

    def scan(self, equation: Any, inputs: list[Value]) -> list[Value]:
        """Return the results of a scan, adding the equations of all its steps."""
        body, consts = body_of(equation)
        count, carried = scan_parts(equation, body)
        fixed, carry, xs = inputs[:count], inputs[count : count + carried], inputs[count + carried :]
        length = equation.params["length"]
        for x in xs:
            if isinstance(x, Stacked):
                x.split()
        steps: dict[int, list[Value]] = {}
        for i in reversed(range(length)) if equation.params["reverse"] else range(length):
            outputs = self.run(body, consts, [*fixed, *carry, *(self.item(x, i) for x in xs)])
            carry, steps[i] = outputs[:carried], outputs[carried:]
        stacked = equation.outvars[carried:]
        return [*carry, *(self.stack(var.aval, [steps[i][k] for i in range(length)]) for k, var in enumerate(stacked))]

    # Stacked values ------------------------------------------------------------------------------------------------------

    def sliced(self, equation: Any, inputs: list[Value]) -> Stacked | Value | None:
        """Return the result of an equation as a stacked value, or None where it needs the whole inputs."""
        name, params, aval = equation.primitive.name, equation.params, equation.outvars[0].aval
        value, shape = inputs[0], tuple(getattr(aval, "shape", ()))

        def whole() -> Atom:
            return self.add(equation, inputs)[0]

        if name in ELEMENTWISE and params.get("sharding") is None:
            if shape and all(isinstance(one, Stacked) if shape_of(one) == shape else not shape_of(one) for one in inputs):
                return slicewise(aval, inputs, self.item, functools.partial(self.apply, equation), whole)
            return None
        if not isinstance(value, Stacked) or len(inputs) > 1:
            return None
        before = shape_of(value)
        if name == "slice" and (params["start_indices"][1:], params["limit_indices"][1:]) == ((0,) * len(before[1:]), before[1:]):
            start, limit, (stride, *inner) = params["start_indices"][0], params["limit_indices"][0], params["strides"] or (1,) * len(before)
            return selected(aval, value, range(start, limit, stride), self.join, whole) if {*inner} <= {1} else None
        if name == "rev" and params["dimensions"] == (0,):
            return selected(aval, value, range(before[0])[::-1], self.join, whole)
        if name == "squeeze" and params["dimensions"] == (0,):
            return value.item(0)
        return self.reshaped(aval, value, whole) if name == "reshape" else None

    def reshaped(self, aval: Any, value: Stacked, whole: Callable[[], Atom]) -> Stacked | None:
        """Return a stacked value whose leading dims are divided or joined, or None for another change of the shape."""
        before, after = shape_of(value), tuple(aval.shape)
        new = len(after) - len(before)
        if not math.prod(before):
            return None
        if new > 0 and before[1:] == after[new + 1 :]:  # (a * b, ...) -> (a, b, ...)
            return self.divided(aval, value, 0, new + 1, whole)
        if new == -1 and before[2:] == after[1:]:  # (a, b, ...) -> (a * b, ...)
            return self.joined(aval, value, whole)
        return None

    def divided(self, aval: Any, value: Stacked, start: int, dims: int, whole: Callable[[], Atom] | None = None) -> Stacked:
        """Return slices of a stacked value, from one of them on, with so many dims in the place of their first one."""
        size = math.prod(aval.shape[1:dims])

        def item(i: int) -> Value:
            return value.item(start + i) if dims == 1 else self.divided(self.item_aval(aval), value, start + i * size, dims - 1)

        items = functools.cache(item)
        join = functools.cache(whole or (lambda: self.join([items(i) for i in range(aval.shape[0])])))
        return Stacked(aval, items, join, lambda: value.depth() and value.depth() - 1 + dims, value.split, value.of_leaf)

    def joined(self, aval: Any, value: Stacked, whole: Callable[[], Atom]) -> Stacked:
        """Return a stacked value with one dim in the place of its first two."""
        rows, columns = shape_of(value)[:2]

        def split() -> None:
            value.split()
            for row in map(value.item, range(rows)):
                if isinstance(row, Stacked):
                    row.split()

        items = functools.cache(lambda i: self.item(value.item(i // columns), i % columns))
        return Stacked(aval, items, functools.cache(whole), lambda: max(value.depth() - 1, 0), split, value.of_leaf)

    def leaf(self, leaf: Leaf) -> Stacked:
        """Return a leaf, or a slice of one."""
        depth = len(leaf.index)

        def split() -> None:
            self.depths[leaf.number] = max(self.depths[leaf.number], depth + 1)

        return Stacked(
            self.leaf_aval(leaf),
            functools.cache(lambda i: self.leaf(Leaf(leaf.number, (*leaf.index, i)))),
            lambda: self.variable(leaf),
            lambda: max(self.depths[leaf.number] - depth, 0),
            split,
            True,
        )

    def stack(self, aval: Any, items: Sequence[Value]) -> Stacked:
        return stack(aval, items, self.join, self.whole)

    def apply(self, equation: Any, inputs: Sequence[Value]) -> Value:
        """Return the result of an elementwise equation for slices of its inputs."""
        function = functools.partial(_apply, equation)
        aval = self.template(("apply", id(equation)), function, [value.aval for value in inputs]).out_avals[0]

        def whole() -> Atom:
            return self.call(("apply", id(equation)), function, inputs)

        if aval.shape and any(isinstance(value, Stacked) for value in inputs):
            return slicewise(aval, inputs, self.item, functools.partial(self.apply, equation), whole)
        return whole()

    def item(self, value: Value, index: int) -> Value:
        """Return a slice of a value."""
        return value.item(index) if isinstance(value, Stacked) else self.call(("item", index), functools.partial(_item, index), [value])

    def join(self, items: Sequence[Value]) -> Atom:
        """Return the variable of a stack of values."""
        return self.call(("join", len(items)), _join, items)

    def call(self, name: tuple[Any, ...], function: Callable[..., Any], inputs: Sequence[Value]) -> Atom:
        """Add the equations of a function and return its result."""
        atoms = [self.whole(value) for value in inputs]
        template = self.template(name, function, [atom.aval for atom in atoms])
        return self.run(template.jaxpr, template.consts, atoms)[0]

    def whole(self, value: Value) -> Atom:
        """Return the variable or literal of a value."""
        return value.whole() if isinstance(value, Stacked) else value

    # Inputs --------------------------------------------------------------------------------------------------------------

    def constant(self, var: Any, value: Any) -> Any:
        """Return the variable of a constant."""
        return self.consts.setdefault(id(value), (jex.Var(var.aval), value))[0]

    def variable(self, leaf: Leaf) -> Any:
        """Return the variable of a leaf, or of a slice of one."""
        if leaf not in self.reads:
            self.reads[leaf] = jex.Var(self.leaf_aval(leaf))
        return self.reads[leaf]

    def inputs(self) -> dict[Leaf, Any]:
        """Return the variable of each input, after adding the equations that make all other slices and whole leaves from these."""
        leaves = [Leaf(i, index) for i, aval in enumerate(self.avals) for index in np.ndindex(*aval.shape[: self.depths[i]])]
        inputs = {leaf: self.variable(leaf) for leaf in leaves}
        available = dict(inputs)

        def make(leaf: Leaf) -> Any:
            if leaf not in available:
                if len(leaf.index) < self.depths[leaf.number]:
                    value = self.join([make(Leaf(leaf.number, (*leaf.index, i))) for i in range(self.leaf_aval(leaf).shape[0])])
                else:
                    value = self.item(make(Leaf(leaf.number, leaf.index[:-1])), leaf.index[-1])
                last = self.equations.pop()
                assert last.outvars == [value]
                available[leaf] = self.variable(leaf)
                self.equations.append(last.replace(outvars=[available[leaf]]))
            return available[leaf]

        for leaf in list(self.reads):
            make(leaf)
        return inputs

    def leaf_aval(self, leaf: Leaf) -> Any:
        return functools.reduce(lambda aval, _: self.item_aval(aval), leaf.index, self.avals[leaf.number])

    def item_aval(self, aval: Any) -> Any:
        """Return the shape and dtype of a slice."""
        return self.template(("item", 0), functools.partial(_item, 0), [aval]).out_avals[0]

    def template(self, name: tuple[Any, ...], function: Callable[..., Any], avals: Sequence[Any]) -> Any:
        """Return the jaxpr of a function for inputs of these shapes and dtypes."""
        key = (*name, *avals)
        if key not in self.templates:
            specs = (jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals)
            self.templates[key] = jax.make_jaxpr(function)(*specs)
        return self.templates[key]


def _item(index: int, value: Any) -> Any:
    return lax.index_in_dim(value, index, keepdims=False)


def _join(*values: Any) -> Any:
    return lax.concatenate([lax.expand_dims(value, [0]) for value in values], 0)


def _apply(equation: Any, *inputs: Any) -> Any:
    return bind(equation, list(inputs))[0]
