"""Values of a jaxpr that are stacked along their first dim and can be read slice by slice."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Atom = Any  # a variable or a literal of a jaxpr


@dataclass(frozen=True, eq=False)
class Stacked:
    """A value that can be read as a whole or slice by slice; nothing is computed before it is read.

    Attributes:
        aval: its shape and dtype.
        item: returns the slice of an index of the first dim.
        whole: returns the variable of the whole value.
        depth: returns of how many leading dims the slices are separate values.
        split: makes the slices of the first dim separate values, if they come from a leaf.
        of_leaf: whether the value comes from a leaf, by operations on each slice alone.
    """

    aval: Any
    item: Callable[[int], Any]
    whole: Callable[[], Atom]
    depth: Callable[[], int]
    split: Callable[[], None]
    of_leaf: bool


Value = Atom | Stacked
Item = Callable[[Value, int], Value]
"""Returns a slice of any value."""
Whole = Callable[[Value], Atom]
"""Returns the variable of any value."""

ELEMENTWISE = frozenset(
    {
        *("abs", "add", "add_any", "and", "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "div", "eq", "erf", "exp"),
        *("expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne"),
        *("neg", "not", "or", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square"),
        *("stop_gradient", "sub", "tanh", "xor"),
    }
)
"""Primitives whose parameters do not depend on shapes, and whose operands have the shape of the result or are scalars."""


def depth_of(value: Value) -> int:
    """Return of how many leading dims the slices of a value are separate values."""
    return value.depth() if isinstance(value, Stacked) else 0


def shape_of(value: Value) -> tuple[int, ...]:
    """Return the shape of a value."""
    return tuple(value.aval.shape)


def stack(aval: Any, items: Sequence[Value], join: Callable[[Sequence[Atom]], Atom], whole: Whole) -> Stacked:
    """Return the stack of values that are separate.

    Args:
        aval: the shape and dtype of the stack.
        items: the values.
        join: returns the variable of a stack of variables.
        whole: returns the variable of a value.
    """
    return Stacked(
        aval,
        items.__getitem__,
        functools.cache(lambda: join([whole(item) for item in items])),
        lambda: 1 + min(map(depth_of, items)),
        lambda: None,
        all(isinstance(item, Stacked) and item.of_leaf for item in items),
    )


def slicewise(
    aval: Any, inputs: Sequence[Value], item: Item, apply: Callable[[Sequence[Value]], Value], whole: Callable[[], Atom]
) -> Stacked:
    """Return the result of an elementwise operation, which can be applied to each slice.

    Args:
        aval: the shape and dtype of the result.
        inputs: scalars and stacked values of the same shape.
        item: returns a slice of a value.
        apply: applies the operation to slices of the inputs.
        whole: applies it to the whole inputs.
    """
    stacked = [value for value in inputs if isinstance(value, Stacked) and shape_of(value)]

    def split() -> None:
        for value in stacked:
            value.split()

    def slices(index: int) -> Value:
        return apply([item(value, index) if shape_of(value) else value for value in inputs])

    return Stacked(
        aval,
        functools.cache(slices),
        functools.cache(whole),
        lambda: max(map(depth_of, stacked)),
        split,
        all(value.of_leaf for value in stacked),
    )


def selected(
    aval: Any, value: Stacked, indices: Sequence[int], join: Callable[[Sequence[Value]], Atom], whole: Callable[[], Atom]
) -> Stacked:
    """Return some slices of a stacked value, in any sequence.

    Args:
        aval: the shape and dtype of the result.
        value: the stacked value.
        indices: of the slices.
        join: returns the variable of a stack of values.
        whole: selects the slices from the whole value.
    """

    def variable() -> Atom:
        return join([value.item(i) for i in indices]) if value.depth() else whole()

    return Stacked(aval, lambda i: value.item(indices[i]), functools.cache(variable), value.depth, value.split, value.of_leaf)
