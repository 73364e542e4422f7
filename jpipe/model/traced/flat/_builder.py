"""A jaxpr that is built equation by equation, with inputs for slices of leaves."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax

from jpipe.model.jaxprs._dependence import is_literal
from jpipe.model.jaxprs._wanted import bind

Atom = Any  # a variable or a literal of a jaxpr
Fixed = frozenset[tuple[int, int]]
"""The slice of a leaf: pairs of an axis and an index."""

_MOST = 4096  # integers in an array whose values are computed


class Builder:
    """Collects equations, constants, and the slices of leaves that are read."""

    def __init__(self, avals: Sequence[Any], axes: Mapping[int, Iterable[int]]):
        """Start a jaxpr.

        Args:
            avals: shapes and dtypes of the leaves.
            axes: for some leaves the axes along which they are split.
        """
        self.avals = list(avals)
        self.axes = [set(axes.get(number, ())) for number in range(len(self.avals))]
        self.equations: list[Any] = []
        self.consts: dict[int, tuple[Any, Any]] = {}  # the variable and the value, by the identity of the value
        self.reads: dict[tuple[int, Fixed], Any] = {}
        self._producers: dict[Any, Any] = {}
        self._numbers: dict[Any, np.ndarray | None] = {}
        self._templates: dict[Any, Any] = {}

    # Equations ------------------------------------------------------------------------------------------------------------

    def add(self, equation: Any, inputs: Sequence[Atom]) -> list[Atom]:
        """Add an equation for other inputs and return its results."""
        results = [var if isinstance(var, jex.DropVar) else jex.Var(var.aval) for var in equation.outvars]
        self.equations.append(equation.replace(invars=list(inputs), outvars=results))
        self._producers.update(dict.fromkeys(results, self.equations[-1]))
        return results

    def call(self, name: Any, function: Callable[..., Any], inputs: Sequence[Atom]) -> Atom:
        """Add the equations of a function and return its result.

        Args:
            name: of the function, by which its jaxpr is found again.
            function: of arrays, with one result.
            inputs: its arguments.
        """
        template = self._template(name, function, [atom.aval for atom in inputs])
        values = dict(zip(template.jaxpr.invars, inputs, strict=True))
        values.update((var, self.constant(var, const)) for var, const in zip(template.jaxpr.constvars, template.consts, strict=True))
        for equation in template.jaxpr.eqns:
            atoms = [var if is_literal(var) else values[var] for var in equation.invars]
            values.update(zip(equation.outvars, self.add(equation, atoms), strict=True))
        return values[template.jaxpr.outvars[0]]

    def item(self, atom: Atom, axis: int, index: int) -> Atom:
        """Add the equations of a slice of an array."""
        return self.call(("item", axis, index), lambda value: lax.index_in_dim(value, index, axis, keepdims=False), [atom])

    def join(self, atoms: Sequence[Atom], axis: int = 0) -> Atom:
        """Add the equations of a stack of arrays."""

        def join(*values: Any) -> Any:
            return lax.concatenate([lax.expand_dims(value, [axis]) for value in values], axis)

        return self.call(("join", axis, len(atoms)), join, atoms)

    def transpose(self, atom: Atom, permutation: tuple[int, ...]) -> Atom:
        """Add the equation of a transposed array, if it is another one."""
        if permutation == tuple(sorted(permutation)):
            return atom
        return self.call(("transpose", permutation), functools.partial(lax.transpose, permutation=permutation), [atom])

    def constant(self, var: Any, value: Any) -> Any:
        """Return the variable of a constant, given the one that it has elsewhere."""
        return self.consts.setdefault(id(value), (jex.Var(var.aval), value))[0]

    def item_aval(self, aval: Any, axis: int) -> Any:
        """Return the shape and dtype of a slice."""
        template = self._template(("item", axis, 0), lambda value: lax.index_in_dim(value, 0, axis, keepdims=False), [aval])
        return template.jaxpr.outvars[0].aval

    def transposed_aval(self, aval: Any, permutation: tuple[int, ...]) -> Any:
        """Return the shape and dtype of a transposed array."""
        if permutation == tuple(sorted(permutation)):
            return aval
        function = functools.partial(lax.transpose, permutation=permutation)
        return self._template(("transpose", permutation), function, [aval]).jaxpr.outvars[0].aval

    def _template(self, name: Any, function: Callable[..., Any], avals: Sequence[Any]) -> Any:
        key = (name, *avals)
        if key not in self._templates:
            specs = (jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals)
            self._templates[key] = jax.make_jaxpr(function)(*specs)
        return self._templates[key]

    def variable(self, aval: Any, numbers: np.ndarray | None) -> Any:
        """Return a new variable, with its value if it is known."""
        variable = jex.Var(aval)
        self._numbers[variable] = numbers
        return variable

    def numbers(self, atom: Atom) -> np.ndarray | None:
        """Return the value of an integer or a small array of integers that depends on no input, or None for another value."""
        if is_literal(atom):
            return np.asarray(atom.val)
        if atom not in self._numbers:
            self._numbers[atom] = self._evaluate(atom)
        return self._numbers[atom]

    def _evaluate(self, atom: Atom) -> np.ndarray | None:
        producer, aval = self._producers.get(atom), atom.aval
        is_small = math.prod(aval.shape) <= _MOST and (jnp.issubdtype(aval.dtype, jnp.integer) or aval.dtype == bool)
        if producer is None or producer.effects or not is_small:
            return None
        inputs = [self.numbers(var) for var in producer.invars]
        if any(value is None for value in inputs):
            return None
        with jax.ensure_compile_time_eval():
            arrays = [jnp.asarray(value, var.aval.dtype) for value, var in zip(inputs, producer.invars, strict=True)]
            return np.asarray(bind(producer, arrays)[producer.outvars.index(atom)])

    # Leaves ---------------------------------------------------------------------------------------------------------------

    def read(self, number: int, fixed: Fixed = frozenset()) -> Any:
        """Return the variable of a leaf, or of a slice of one."""
        if (number, fixed) not in self.reads:
            self.reads[number, fixed] = jex.Var(self.slice_aval(number, fixed))
        return self.reads[number, fixed]

    def slice_aval(self, number: int, fixed: Fixed) -> Any:
        """Return the shape and dtype of a slice of a leaf."""
        axes = sorted((axis for axis, _ in fixed), reverse=True)
        return functools.reduce(self.item_aval, axes, self.avals[number])

    def split_indexed(self) -> None:
        """Split the leaves that are only read by constant indices, each of them."""
        reads: dict[int, list[dict[int, int]]] = {}
        for number, fixed in self.reads:
            reads.setdefault(number, []).append(dict(fixed))
        for number, slices in reads.items():
            for axis, size in enumerate(self.avals[number].shape):
                if size > 1 and {fixed.get(axis) for fixed in slices} == {*range(size)}:
                    self.axes[number].add(axis)

    def slices(self, number: int) -> list[tuple[int, ...]]:
        """Return the indices of the slices of a leaf along its axes, in C order."""
        return list(np.ndindex(*(self.avals[number].shape[axis] for axis in sorted(self.axes[number]))))

    def inputs(self) -> list[Any]:
        """Return the variables of all slices of all leaves, adding the equations that make everything else that is read from these."""
        inputs = {
            (number, fixed): self.read(number, fixed)
            for number, axes in enumerate(self.axes)
            for fixed in (frozenset(zip(sorted(axes), index, strict=True)) for index in self.slices(number))
        }
        available = dict(inputs)
        for number, fixed in list(self.reads):
            self._make(number, fixed, available)
        return list(inputs.values())

    def _make(self, number: int, fixed: Fixed, available: dict[tuple[int, Fixed], Any]) -> Any:
        """Return the variable of a slice, adding the equations that make it unless it is available."""
        if (number, fixed) in available:
            return available[number, fixed]
        axes = {axis for axis, _ in fixed}
        missing = self.axes[number] - axes
        if missing:
            axis = min(missing)
            parts = [self._make(number, fixed | {(axis, i)}, available) for i in range(self.avals[number].shape[axis])]
            self.join(parts, axis - sum(other < axis for other in axes))
        else:
            axis = max(axes - self.axes[number])
            index = dict(fixed)[axis]
            whole = self._make(number, fixed - {(axis, index)}, available)
            self.item(whole, axis - sum(other < axis for other in axes), index)
        variable = available[number, fixed] = self.read(number, fixed)
        self.equations[-1] = self.equations[-1].replace(outvars=[variable])
        return variable
