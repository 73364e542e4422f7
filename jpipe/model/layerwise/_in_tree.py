"""Traces an optimizer for a whole model's own tree, and divides it among the entries."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from jpipe.model._subset import Subset
from jpipe.model._ties import Ties
from jpipe.model._tree import ModelTree
from jpipe.model.layerwise._of_model import ArrayPlace, ModelOptimizer, names_of
from jpipe.model.layerwise._optimizer import entries_of
from jpipe.model.layerwise._trace import TracedOptimizer, dependence, trace_optimizer

Tree = Any


class Coupled(Exception):
    """The reason why an optimizer cannot be evaluated for one entry at a time, or for one slice of stacked arrays."""

    def __init__(self, reason: str, in_slices: bool = False) -> None:
        super().__init__(reason)
        self.in_slices = in_slices


def traced_in(
    transformation: optax.GradientTransformation, tree: ModelTree, specs: Mapping[str, Tree], num_stages: int | None
) -> tuple[Any, TracedOptimizer]:
    """Trace an optimizer for the tree of a model, in the first of its structures for which it does not fail.

    Args:
        transformation: the optimizer.
        tree: of the model.
        specs: shapes and dtypes of the parameters by layer id.
        num_stages: as in `trace_optimizer`.

    Returns:
        The structure, and the traced optimizer.

    Raises:
        Exception: what it raises for the first structure, if it fails for all.
    """
    failures = []
    for structure in tree.structures:
        try:
            return structure, trace_optimizer(transformation, structure.unflatten(whole_specs(tree, specs)), num_stages)
        except Exception as error:
            failures.append(error)
    raise failures[0]


def whole_specs(tree: ModelTree, specs: Mapping[str, Tree], *, sliced: bool = False) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the leaves of a model's tree.

    Args:
        tree: of the model.
        specs: shapes and dtypes of the parameters by layer id.
        sliced: whether stacked leaves have one slice only.
    """
    axes, dtypes = tree.axes() if sliced else {}, {}
    for layer_id, places in tree.layers.items():
        for place, spec in zip(jax.tree.leaves(places), jax.tree.leaves(specs[layer_id]), strict=True):
            dtypes[place.number] = spec.dtype
    return [
        jax.ShapeDtypeStruct(tuple(1 if axis in axes.get(n, ()) else size for axis, size in enumerate(shape)), dtypes[n])
        for n, shape in enumerate(tree.shapes)
    ]


def one_slice(
    transformation: optax.GradientTransformation, structure: Any, specs: Sequence[Any], num_stages: int | None, traced: TracedOptimizer
) -> TracedOptimizer:
    """Trace an optimizer for one slice of each stacked leaf; it must compute as for the whole leaves.

    Args:
        transformation: the optimizer.
        structure: of the model's tree.
        specs: of its leaves, with one slice of each stacked leaf.
        num_stages: as in `trace_optimizer`.
        traced: the optimizer for whole leaves.

    Raises:
        Coupled: it fails, or computes otherwise.
    """
    why = "what it computes depends on the number of blocks that the model stacks in one array"
    try:
        sliced = trace_optimizer(transformation, structure.unflatten(specs), num_stages)
    except Exception as error:
        raise Coupled(why, in_slices=True) from error
    if any(_program(getattr(traced, name).jaxpr) != _program(getattr(sliced, name).jaxpr) for name in ("init", "update")):
        raise Coupled(why, in_slices=True)
    return sliced


_SIZES = {"shape", "new_sizes", "sizes", "limit_indices", "slice_sizes"}
"""Parameters of equations that are sizes of arrays."""
_NOT_COMPUTED = {"sharding", "out_sharding", "name", "ctx_mesh"}


def _program(jaxpr: Any) -> list[Any]:
    """Return what a jaxpr computes, without the sizes of its arrays."""
    number: dict[Any, int] = {var: i for i, var in enumerate([*jaxpr.constvars, *jaxpr.invars])}

    def read(var: Any) -> Any:
        return f"{var.val}" if hasattr(var, "val") else number[var]

    lines: list[Any] = []
    for equation in jaxpr.eqns:
        lines.append((equation.primitive.name, [*map(read, equation.invars)], _sizeless(equation.params)))
        for var in equation.outvars:
            number[var] = len(number)
    return [*lines, [*map(read, jaxpr.outvars)]]


def _sizeless(value: Any) -> Any:
    """Return parameters of an equation without the sizes of arrays."""
    if isinstance(value, Mapping):
        kept = sorted(value.keys() - _NOT_COMPUTED)
        return [(name, len(value[name]) if name in _SIZES else _sizeless(value[name])) for name in kept]
    if isinstance(value, tuple | list):
        return [*map(_sizeless, value)]
    jaxpr = getattr(value, "jaxpr", value)
    return _program(jaxpr) if hasattr(jaxpr, "eqns") else None if callable(value) else repr(value)


def model_optimizer(
    traced: TracedOptimizer, tree: ModelTree, specs: Sequence[Any], ties: Ties, trained: Subset, names: Sequence[str]
) -> ModelOptimizer:
    """Return the optimizer for one entry at a time.

    Args:
        traced: the optimizer for one slice of each stacked leaf.
        tree: of the model.
        specs: of its leaves, with one slice of each stacked leaf.
        ties: the shared parameters.
        trained: the parameters that updates change, by entry.
        names: what the leaves are called in messages.

    Raises:
        Coupled: the update of one entry depends on another one, or the slices of a stacked leaf on another leaf.
    """
    groups = groups_of(tree, ties)
    bits = {group: 1 << bit for bit, group in enumerate(dict.fromkeys(groups))}
    of_group = {bit: names[groups.index(group)] for group, bit in bits.items()}
    marks = [bits[group] for group in groups]

    def check(mark: int, own: int, what: str) -> None:
        if more := mark & ~own:
            raise Coupled(f"{what} depends on {of_group[more & -more]}")

    of_updates, of_state = dependence(traced, marks)
    for name, own, mark in zip(names, marks, of_updates, strict=True):
        check(mark, own, f"the update of {name}")
    owners: list[str | None] = []
    for part, mark in zip(traced.of_parameter, of_state, strict=True):
        own = mark & -mark if part is None else marks[part.number]
        check(mark, own, f"the state of {of_group[own]}" if own else "")
        group = None if part is not None or not mark else next(group for group, bit in bits.items() if bit == own)
        if isinstance(group, int):
            raise Coupled(f"a part of its state depends on {of_group[own]}", in_slices=True)
        owners.append(group)
    parts = entries_of(ties, tree.layers, trained)
    entries = {
        entry: tuple(ArrayPlace(place.number, names_of(path)) for path, place in jax.tree_util.tree_flatten_with_path(part)[0])
        for entry, part in parts.items()
    }
    optimizer = ModelOptimizer(traced, tuple(spec.shape for spec in specs), entries, tuple(owners))
    for entry in entries:
        if (other := optimizer.missing(entry)) is not None:
            raise Coupled(f"it computes the update of layer '{entry}' together with that of {names[other]}")
    return optimizer


def groups_of(tree: ModelTree, ties: Ties) -> list[str | int]:
    """Return for each leaf of a model's tree the entry that has it, or for a stacked leaf its number."""
    groups: dict[int, str | int] = {}
    for entry, part in ties.parts(tree.layers).items():
        for place in jax.tree.leaves(part):
            groups[place.number] = place.number if place.axes else entry
    return [groups[number] for number in range(len(tree.shapes))]
