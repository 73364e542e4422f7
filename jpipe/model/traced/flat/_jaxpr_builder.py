"""A jaxpr that is built equation by equation, with inputs for slices of leaves."""

import functools
import math
from abc import ABC, abstractmethod
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

_MOST = 4096  # the largest number of integers in an array that is evaluated
Operation = tuple[Any, ...]
"""A function with one result, and its first arguments that are not arrays; all can be hashed."""


def _item(axis: int, index: int, value: Any) -> Any:
    return lax.index_in_dim(value, index, axis, keepdims=False)


def _joined(axis: int, *values: Any) -> Any:
    return lax.concatenate([lax.expand_dims(value, [axis]) for value in values], axis)


def _permuted(permutation: tuple[int, ...], value: Any) -> Any:
    return lax.transpose(value, permutation)


class Builder:
    """Collects equations, constants, and the slices of leaves that the equations read."""

    def __init__(self, avals: Sequence[Any], axes: Mapping[int, Iterable[int]]):
        """Start a jaxpr for leaves with these shapes and dtypes, some of them split along `axes`."""
        self.avals = list(avals)
        self.axes = [set(axes.get(number, ())) for number in range(len(self.avals))]
        self.equations: list[Any] = []
        self.consts: dict[int, tuple[Any, Any]] = {}  # the variable and the value, by `id` of the value
        self.reads: dict[tuple[int, Fixed], Any] = {}
        self._producers: dict[Any, Any] = {}
        self._numbers: dict[Any, np.ndarray | None] = {}
        self._templates: dict[Any, Any] = {}

    # Equations ------------------------------------------------------------------------------------------------------------

    def add(self, equation: Any, inputs: Sequence[Atom]) -> list[Atom]:
        """Add an equation, applied to these inputs, and return its results."""
        results = [var if isinstance(var, jex.DropVar) else jex.Var(var.aval) for var in equation.outvars]
        self.equations.append(equation.replace(invars=list(inputs), outvars=results))
        self._producers.update(dict.fromkeys(results, self.equations[-1]))
        return results

    def call(self, operation: Operation, inputs: Sequence[Atom]) -> Atom:
        """Add the equations of an operation and return its result."""
        template = self._template(operation, [atom.aval for atom in inputs])
        values = dict(zip(template.jaxpr.invars, inputs, strict=True))
        values.update((var, self.constant(var, const)) for var, const in zip(template.jaxpr.constvars, template.consts, strict=True))
        for equation in template.jaxpr.eqns:
            atoms = [var if is_literal(var) else values[var] for var in equation.invars]
            values.update(zip(equation.outvars, self.add(equation, atoms), strict=True))
        return values[template.jaxpr.outvars[0]]

    def constant(self, var: Any, value: Any) -> Any:
        """Return the variable of a constant in this jaxpr, given its variable in another jaxpr."""
        return self.consts.setdefault(id(value), (jex.Var(var.aval), value))[0]

    def aval_of(self, operation: Operation, aval: Any) -> Any:
        """Return the shape and dtype of the result of an operation."""
        return self._template(operation, [aval]).jaxpr.outvars[0].aval

    def _template(self, operation: Operation, avals: Sequence[Any]) -> Any:
        key = (operation, *avals)
        if key not in self._templates:
            specs = (jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals)
            function, *first = operation
            self._templates[key] = jax.make_jaxpr(functools.partial(function, *first))(*specs)
        return self._templates[key]

    def variable(self, aval: Any, numbers: np.ndarray | None) -> Any:
        """Return a new variable, and record its value if the value is known."""
        variable = jex.Var(aval)
        self._numbers[variable] = numbers
        return variable

    def numbers(self, atom: Atom) -> np.ndarray | None:
        """Return the value of an integer or a small array of integers that depends on no input, or None for any other variable."""
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
        """Return the variable of a leaf, or of a slice of a leaf."""
        if (number, fixed) not in self.reads:
            self.reads[number, fixed] = jex.Var(self.slice_aval(number, fixed))
        return self.reads[number, fixed]

    def slice_aval(self, number: int, fixed: Fixed) -> Any:
        """Return the shape and dtype of a slice of a leaf."""
        axes = sorted((axis for axis, _ in fixed), reverse=True)
        return functools.reduce(lambda aval, axis: self.aval_of((_item, axis, 0), aval), axes, self.avals[number])

    def split_indexed(self) -> None:
        """Split each leaf along the axes where it is read only by constant indices, if all indices are read."""
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
        """Return the variables of all slices of all leaves, and add the equations that compute the other arrays that are read."""
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
        """Return the variable of a slice. If it is not available, add the equations that compute it."""
        if (number, fixed) in available:
            return available[number, fixed]
        axes = {axis for axis, _ in fixed}
        missing = self.axes[number] - axes
        if missing:
            axis = min(missing)
            parts = [self._make(number, fixed | {(axis, i)}, available) for i in range(self.avals[number].shape[axis])]
            self.call((_joined, axis - sum(other < axis for other in axes)), parts)
        else:
            axis = max(axes - self.axes[number])
            index = dict(fixed)[axis]
            whole = self._make(number, fixed - {(axis, index)}, available)
            self.call((_item, axis - sum(other < axis for other in axes), index), [whole])
        variable = available[number, fixed] = self.read(number, fixed)
        self.equations[-1] = self.equations[-1].replace(outvars=[variable])
        return variable


# Values that can be read as a whole or slice by slice; they are computed only when they are read ----------------------

MOST = 512
"""The largest number of slices of a leaf along one axis. Because of it, a scan over words or time steps stays one equation."""


class Lazy(ABC):
    """A value with slices that can be read one by one.

    Attributes:
        aval: the shape and dtype.
        of_leaf: whether it comes only from leaves, by operations on slices.
    """

    def __init__(self, builder: Builder, aval: Any, of_leaf: bool):
        self.builder, self.aval, self.of_leaf = builder, aval, of_leaf
        self._atom: Atom = None
        self._items: dict[tuple[int, int], Value] = {}

    def whole(self) -> Atom:
        """Return the variable of the whole value."""
        if self._atom is None:
            self._atom = self._make()
        return self._atom

    def item(self, axis: int, index: int) -> "Value":
        """Return a slice."""
        if (axis, index) not in self._items:
            self._items[axis, index] = self._slice(axis, index)
        return self._items[axis, index]

    @abstractmethod
    def _make(self) -> Atom: ...

    @abstractmethod
    def _slice(self, axis: int, index: int) -> "Value": ...

    @abstractmethod
    def axes(self) -> set[int]:
        """Return the axes along which the slices are separate values."""

    @abstractmethod
    def split(self, axis: int) -> None:
        """Make the slices along an axis separate values, if they come from a leaf."""


Value = Atom | Lazy


def whole(value: Value) -> Atom:
    """Return the variable or literal of a value."""
    return value.whole() if isinstance(value, Lazy) else value


def item(builder: Builder, value: Value, axis: int, index: int) -> Value:
    """Return a slice of a value."""
    return value.item(axis, index) if isinstance(value, Lazy) else builder.call((_item, axis, index), [value])


def axes_of(value: Value) -> set[int]:
    """Return the axes along which the slices of a value are separate values."""
    return value.axes() if isinstance(value, Lazy) else set()


def transposed(builder: Builder, value: Value, permutation: tuple[int, ...]) -> Value:
    """Return a value with its axes in another order."""
    if not isinstance(value, Lazy):
        return builder.call((_permuted, permutation), [value])
    if isinstance(value, Transposed):
        permutation = tuple(value.permutation[axis] for axis in permutation)
        value = value.source
    return value if permutation == tuple(sorted(permutation)) else Transposed(value, permutation)


class LeafSlice(Lazy):
    """A leaf, or a slice of a leaf with its remaining axes."""

    def __init__(self, builder: Builder, number: int, fixed: Fixed = frozenset()):
        self.number, self.fixed = number, fixed
        axes = range(len(builder.avals[number].shape))
        self._axes = [axis for axis in axes if axis not in dict(fixed)]  # indices of the leaf
        super().__init__(builder, builder.slice_aval(number, fixed), True)

    def _make(self) -> Atom:
        return self.builder.read(self.number, self.fixed)

    def _slice(self, axis: int, index: int) -> Value:
        return LeafSlice(self.builder, self.number, self.fixed | {(self._axes[axis], index)})

    def axes(self) -> set[int]:
        return {position for position, axis in enumerate(self._axes) if axis in self.builder.axes[self.number]}

    def split(self, axis: int) -> None:
        self.builder.axes[self.number].add(self._axes[axis])


class Stack(Lazy):
    """Separate values with equal shapes, along a new first axis."""

    def __init__(self, builder: Builder, aval: Any, items: Sequence[Value]):
        self.items = items
        super().__init__(builder, aval, all(isinstance(value, Lazy) and value.of_leaf for value in items))

    def _make(self) -> Atom:
        return self.builder.call((_joined, 0), [whole(value) for value in self.items])

    def _slice(self, axis: int, index: int) -> Value:
        if axis == 0:
            return self.items[index]
        items = [item(self.builder, value, axis - 1, index) for value in self.items]
        return Stack(self.builder, self.builder.aval_of((_item, axis, 0), self.aval), items)

    def axes(self) -> set[int]:
        return {0, *(axis + 1 for axis in set.intersection(*map(axes_of, self.items)))}

    def split(self, axis: int) -> None:
        for value in self.items if axis else ():
            if isinstance(value, Lazy):
                value.split(axis - 1)


class Elementwise(Lazy):
    """The result of an elementwise equation, which can be computed for each slice."""

    def __init__(self, builder: Builder, aval: Any, equation: Any, inputs: Sequence[Value], apply: Callable[..., Any] | None = None):
        self.equation, self.inputs = equation, inputs
        self._apply = apply or (lambda *values: bind(equation, list(values))[0])
        self._lazy = [value for value in inputs if isinstance(value, Lazy) and value.aval.shape]
        super().__init__(builder, aval, all(value.of_leaf for value in self._lazy))

    def _make(self) -> Atom:
        atoms = [whole(value) for value in self.inputs]
        if self.aval is self.equation.outvars[0].aval:
            return self.builder.add(self.equation, atoms)[0]
        return self.builder.call((self._apply,), atoms)

    def _slice(self, axis: int, index: int) -> Value:
        inputs = [item(self.builder, value, axis, index) if value.aval.shape else value for value in self.inputs]
        result = Elementwise(self.builder, self.builder.aval_of((_item, axis, 0), self.aval), self.equation, inputs, self._apply)
        return result if result.aval.shape else result.whole()

    def axes(self) -> set[int]:
        return set.union(*map(axes_of, self._lazy))

    def split(self, axis: int) -> None:
        for value in self._lazy:
            value.split(axis)


class Rows(Lazy):
    """A value with slices of another value in its first axes, in any order and shape.

    Attributes:
        source: the other value.
        numbers: the numbers of the slices along the first `dims` axes of `source`, counted in C order, in the shape of the first axes of
            this value.
        equation: the equation that computes this value from `source` and `more`. None: the value is stacked from the slices.
    """

    def __init__(self, aval: Any, source: Lazy, numbers: np.ndarray, dims: int, equation: Any = None, more: Sequence[Atom] = ()):
        self.source, self.numbers, self.dims, self.equation, self.more = source, numbers, dims, equation, more
        super().__init__(source.builder, aval, source.of_leaf and source.aval.shape[0] <= MOST)

    def _make(self) -> Atom:
        if self.equation is not None and 0 not in self.source.axes():
            return self.builder.add(self.equation, [self.source.whole(), *self.more])[0]
        return self.builder.call((_joined, 0), [whole(self.item(0, i)) for i in range(self.aval.shape[0])])

    def _slice(self, axis: int, index: int) -> Value:
        if axis >= self.numbers.ndim:
            return self.builder.call((_item, axis, index), [self.whole()])
        numbers = self.numbers.take(index, axis)
        if numbers.ndim:
            return Rows(self.builder.aval_of((_item, axis, 0), self.aval), self.source, numbers, self.dims)
        value: Value = self.source
        for i in np.unravel_index(numbers, self.source.aval.shape[: self.dims]):
            value = item(self.builder, value, 0, int(i))
        return value

    def axes(self) -> set[int]:
        return {*range(self.numbers.ndim)} if self.source.axes() >= {*range(self.dims)} else set()

    def split(self, axis: int) -> None:
        for source_axis in range(self.dims if axis < self.numbers.ndim else 0):
            self.source.split(source_axis)


class Transposed(Lazy):
    """A value with its axes in another order."""

    def __init__(self, source: Lazy, permutation: tuple[int, ...]):
        self.source, self.permutation = source, permutation
        super().__init__(source.builder, source.builder.aval_of((_permuted, permutation), source.aval), source.of_leaf)

    def _make(self) -> Atom:
        return self.builder.call((_permuted, self.permutation), [self.source.whole()])

    def _slice(self, axis: int, index: int) -> Value:
        removed = self.permutation[axis]
        permutation = tuple(other - (other > removed) for other in self.permutation if other != removed)
        return transposed(self.builder, self.source.item(removed, index), permutation)

    def axes(self) -> set[int]:
        return {self.permutation.index(axis) for axis in self.source.axes()}

    def split(self, axis: int) -> None:
        self.source.split(self.permutation[axis])
