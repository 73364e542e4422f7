"""Values of a jaxpr that can be read as a whole or slice by slice; nothing is computed before it is read."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from jpipe.model.jaxprs._wanted import bind
from jpipe.model.traced.flat._builder import Atom, Builder, Fixed

MOST = 512
"""The most slices into which a leaf is split along one axis, so that a scan over words or time steps stays one equation."""


class Lazy(ABC):
    """A value of which each slice can be read alone.

    Attributes:
        aval: its shape and dtype.
        of_leaf: whether it comes from a leaf alone, by operations on slices.
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
    return value.item(axis, index) if isinstance(value, Lazy) else builder.item(value, axis, index)


def axes_of(value: Value) -> set[int]:
    """Return the axes along which the slices of a value are separate values."""
    return value.axes() if isinstance(value, Lazy) else set()


def transposed(builder: Builder, value: Value, permutation: tuple[int, ...]) -> Value:
    """Return a value with its axes in another sequence."""
    if not isinstance(value, Lazy):
        return builder.transpose(value, permutation)
    if isinstance(value, LeafSlice):
        return LeafSlice(builder, value.number, value.fixed, tuple(value.axes_of_leaf[axis] for axis in permutation))
    return Transposed(value, permutation)


class LeafSlice(Lazy):
    """A leaf or a slice of one, with its remaining axes in any sequence."""

    def __init__(self, builder: Builder, number: int, fixed: Fixed, axes_of_leaf: tuple[int, ...]):
        self.number, self.fixed, self.axes_of_leaf = number, fixed, axes_of_leaf
        self._permutation = tuple(sorted(axes_of_leaf).index(axis) for axis in axes_of_leaf)
        super().__init__(builder, builder.transposed_aval(builder.slice_aval(number, fixed), self._permutation), True)

    def _make(self) -> Atom:
        return self.builder.transpose(self.builder.read(self.number, self.fixed), self._permutation)

    def _slice(self, axis: int, index: int) -> Value:
        fixed = self.fixed | {(self.axes_of_leaf[axis], index)}
        return LeafSlice(self.builder, self.number, fixed, self.axes_of_leaf[:axis] + self.axes_of_leaf[axis + 1 :])

    def axes(self) -> set[int]:
        return {position for position, axis in enumerate(self.axes_of_leaf) if axis in self.builder.axes[self.number]}

    def split(self, axis: int) -> None:
        self.builder.axes[self.number].add(self.axes_of_leaf[axis])


class Stack(Lazy):
    """Separate values of the same shape, along a new first axis."""

    def __init__(self, builder: Builder, aval: Any, items: Sequence[Value]):
        self.items = items
        super().__init__(builder, aval, all(isinstance(value, Lazy) and value.of_leaf for value in items))

    def _make(self) -> Atom:
        return self.builder.join([whole(value) for value in self.items])

    def _slice(self, axis: int, index: int) -> Value:
        if axis == 0:
            return self.items[index]
        items = [item(self.builder, value, axis - 1, index) for value in self.items]
        return Stack(self.builder, self.builder.item_aval(self.aval, axis), items)

    def axes(self) -> set[int]:
        return {0, *(axis + 1 for axis in set.intersection(*map(axes_of, self.items)))}

    def split(self, axis: int) -> None:
        for value in self.items if axis else ():
            if isinstance(value, Lazy):
                value.split(axis - 1)


class Elementwise(Lazy):
    """The result of an elementwise equation, which can be computed for each slice."""

    def __init__(self, builder: Builder, aval: Any, equation: Any, inputs: Sequence[Value]):
        self.equation, self.inputs = equation, inputs
        self._lazy = [value for value in inputs if isinstance(value, Lazy) and value.aval.shape]
        super().__init__(builder, aval, all(value.of_leaf for value in self._lazy))

    def _make(self) -> Atom:
        atoms = [whole(value) for value in self.inputs]
        if self.aval is self.equation.outvars[0].aval:
            return self.builder.add(self.equation, atoms)[0]
        return self.builder.call(("apply", id(self.equation)), lambda *values: bind(self.equation, list(values))[0], atoms)

    def _slice(self, axis: int, index: int) -> Value:
        inputs = [item(self.builder, value, axis, index) if value.aval.shape else value for value in self.inputs]
        result = Elementwise(self.builder, self.builder.item_aval(self.aval, axis), self.equation, inputs)
        return result if result.aval.shape else result.whole()

    def axes(self) -> set[int]:
        return set.union(*map(axes_of, self._lazy))

    def split(self, axis: int) -> None:
        for value in self._lazy:
            value.split(axis)


class View(Lazy):
    """A value that is made of another one's slices by an equation that moves numbers; `more` are its further inputs."""

    def __init__(self, aval: Any, source: Lazy, equation: Any, more: Sequence[Atom] = ()):
        self.source, self.equation, self.more = source, equation, more
        super().__init__(source.builder, aval, source.of_leaf and source.aval.shape[0] <= MOST)

    def _make(self) -> Atom:
        if self.equation is not None and 0 not in self.source.axes():
            return self.builder.add(self.equation, [self.source.whole(), *self.more])[0]
        return self.builder.join([whole(self.item(0, i)) for i in range(self.aval.shape[0])])

    def _slice(self, axis: int, index: int) -> Value:
        return self._first(index) if axis == 0 else self.builder.item(self.whole(), axis, index)

    @abstractmethod
    def _first(self, index: int) -> Value:
        """Return a slice along the first axis."""


class Selected(View):
    """Some slices of a value along the first axis, in any sequence."""

    def __init__(self, aval: Any, source: Lazy, equation: Any, indices: Sequence[int], more: Sequence[Atom] = ()):
        self.indices = indices
        super().__init__(aval, source, equation, more)

    def _first(self, index: int) -> Value:
        return self.source.item(0, self.indices[index])

    def axes(self) -> set[int]:
        return self.source.axes() & {0}

    def split(self, axis: int) -> None:
        if axis == 0:
            self.source.split(0)


class Divided(View):
    """Slices of a value from one of them on, with several axes in the place of the first one."""

    def __init__(self, aval: Any, source: Lazy, equation: Any, dims: int, start: int = 0):
        self.dims, self.start = dims, start
        super().__init__(aval, source, equation)

    def _first(self, index: int) -> Value:
        start = self.start + index * math.prod(self.aval.shape[1 : self.dims])
        if self.dims == 1:
            return self.source.item(0, start)
        return Divided(self.builder.item_aval(self.aval, 0), self.source, None, self.dims - 1, start)

    def axes(self) -> set[int]:
        return {*range(self.dims)} if 0 in self.source.axes() else set()

    def split(self, axis: int) -> None:
        if axis < self.dims:
            self.source.split(0)


class Joined(View):
    """A value with one axis in the place of its first two."""

    def _first(self, index: int) -> Value:
        row, column = divmod(index, self.source.aval.shape[1])
        return item(self.builder, self.source.item(0, row), 0, column)

    def axes(self) -> set[int]:
        return {0} if self.source.axes() >= {0, 1} else set()

    def split(self, axis: int) -> None:
        if axis == 0:
            self.source.split(0)
            self.source.split(1)


class Transposed(Lazy):
    """A value with its axes in another sequence."""

    def __init__(self, source: Lazy, permutation: tuple[int, ...]):
        self.source, self.permutation = source, permutation
        super().__init__(source.builder, source.builder.transposed_aval(source.aval, permutation), source.of_leaf)

    def _make(self) -> Atom:
        return self.builder.transpose(self.source.whole(), self.permutation)

    def _slice(self, axis: int, index: int) -> Value:
        removed = self.permutation[axis]
        permutation = tuple(other - (other > removed) for other in self.permutation if other != removed)
        return transposed(self.builder, self.source.item(removed, index), permutation)

    def axes(self) -> set[int]:
        return {self.permutation.index(axis) for axis in self.source.axes()}

    def split(self, axis: int) -> None:
        self.source.split(self.permutation[axis])
