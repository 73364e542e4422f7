"""An optimizer that is traced for a whole model's own parameter tree; each layer evaluates a part of it.

The trace calls masks, labels and other functions of trees and paths, so they get the same tree as outside of a pipeline. If a loop such as
`nn.scan` stacks the blocks of a model, each layer has slices of the stacked arrays.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from jpipe.model._subset import Subset
from jpipe.model._ties import ModelTree, Ties
from jpipe.model.jaxprs._wanted import evaluate_wanted, needed
from jpipe.model.layerwise._trace_optimizer import TracedOptimizer, dependence, trace_optimizer
from jpipe.model.traced.flat._flatten import Leaf

Tree = Any


class ArrayPlace(NamedTuple):
    """One array of an entry: the number of the leaf in the model's tree, and the names on its path in the entry's layer."""

    number: int
    names: tuple[str, ...]


class _State(NamedTuple):
    """One array of an optimizer's state."""

    number: int  # the number of the leaf of the state
    slot: int | None  # the position in the entry of the parameter to which the array belongs; None if it belongs to all parameters
    names: tuple[str, ...]  # the path of the array in the state of an entry


@dataclass(frozen=True, eq=False)
class ModelOptimizer:
    """An optimizer of a whole model's tree, for one entry at a time.

    The state of an entry is nested dicts, with the names that optax's state has for `{layer id: params}`.
    """

    traced: TracedOptimizer  # the optimizer, for the model's tree with one slice of each stacked leaf
    shapes: tuple[tuple[int, ...], ...]  # the shapes of the leaves of this tree
    entries: Mapping[str, tuple[ArrayPlace, ...]]  # for each entry its arrays, in order
    # for each leaf of the state that belongs to no parameter the entry that owns it; None if it belongs to all entries
    owners: tuple[str | None, ...]

    def init(self, entry: str, params: Tree) -> Tree:
        """Return the optimizer state of an entry."""
        leaves, state, closed = jax.tree.leaves(params), dict[tuple[str, ...], Any](), self.traced.init
        for slots in self._rounds(entry):
            kept = self._state(entry, slots)
            arguments = self._placed(leaves, slots)
            results = _evaluated(closed, arguments, {array.number for array in kept})
            self._store(entry, state, kept, results, leaves)
        return unflatten_dict(state)

    def update(self, entry: str, gradient: Tree, state: Tree, params: Tree, position: Mapping[str, Any]) -> tuple[Tree, Tree]:
        """Return the updates of an entry, in the structure of its parameters, and its new state."""
        closed, count = self.traced.update, len(self.shapes)
        gradients, (leaves, treedef) = jax.tree.leaves(gradient), jax.tree.flatten(params)
        updates, old, new_state = [None] * len(leaves), flatten_dict(state), dict[tuple[str, ...], Any]()
        for slots in self._rounds(entry):
            kept = self._state(entry, slots)
            before: list[Any] = [None] * len(self.owners)
            for array in kept:
                aval = closed.jaxpr.invars[count + array.number].aval
                before[array.number] = old[array.names].reshape(aval.shape)
            arguments = [
                *self._placed(gradients, slots),
                *before,
                *self._placed(leaves, slots),
                *map(position.get, self.traced.position),
            ]
            results = _evaluated(closed, arguments, {*slots, *(count + array.number for array in kept)})
            for number, slot in slots.items():
                updates[slot] = results[number].reshape(leaves[slot].shape)
            self._store(entry, new_state, kept, results[count:], leaves)
        return jax.tree.unflatten(treedef, updates), unflatten_dict(new_state)

    def missing(self, entry: str) -> int | None:
        """Return the number of a leaf that the entry lacks but its equations need, or None."""
        closed, count = self.traced.update, len(self.shapes)
        for slots in self._rounds(entry):
            states = {array.number for array in self._state(entry, slots)}
            wanted = [var for i, var in enumerate(closed.jaxpr.outvars) if i in slots or i - count in states]
            needs, _ = needed(closed.jaxpr, wanted, inside=True)
            for i, var in enumerate(closed.jaxpr.invars):
                if var in needs and i < count and i not in slots:
                    return i
                if var in needs and 0 <= i - count < len(self.owners) and i - count not in states:
                    owner = self.traced.of_parameter[i - count]
                    return next(n for n in range(count) if n not in slots) if owner is None else owner.number
        return None

    def _rounds(self, entry: str) -> list[dict[int, int]]:
        """Return the positions of an entry's arrays, by leaf of the tree. Several slices of one leaf are in several dicts."""
        rounds: list[dict[int, int]] = [{}]
        for slot, array in enumerate(self.entries[entry]):
            free = next((slots for slots in rounds if array.number not in slots), None)
            if free is None:
                rounds.append(free := {})
            free[array.number] = slot
        return rounds

    def _state(self, entry: str, slots: Mapping[int, int]) -> list[_State]:
        """Return the parts of the state for the arrays at these positions of an entry, and the parts that belong to all parameters."""
        kept = []
        for number, (owner, path) in enumerate(zip(self.owners, self.traced.paths, strict=True)):
            part = self.traced.of_parameter[number]
            if part is not None and part.number in slots:
                names = (*names_of(path[: part.begin]), *self.entries[entry][slots[part.number]].names, *names_of(path[part.end :]))
                kept.append(_State(number, slots[part.number], names))
            elif part is None and (owner is None or (owner == entry and 0 in slots.values())):
                kept.append(_State(number, None, names_of(path)))
        return kept

    def _placed(self, leaves: Sequence[Any], slots: Mapping[int, int]) -> list[Any]:
        """Return arrays of an entry as leaves of the model's tree, with None for all other leaves."""
        return [leaves[slots[n]].reshape(shape) if n in slots else None for n, shape in enumerate(self.shapes)]

    def _store(
        self, entry: str, state: dict[tuple[str, ...], Any], kept: Sequence[_State], results: Sequence[Any], leaves: Sequence[Any]
    ) -> None:
        """Put arrays into the state of an entry. An array with its parameter's shape gets the shape that the parameter has in the layer."""
        for array in kept:
            value = jnp.asarray(results[array.number])  # the result may be a literal
            if array.slot is not None and value.shape == self.shapes[self.entries[entry][array.slot].number]:
                value = value.reshape(leaves[array.slot].shape)
            state[array.names] = value


def _evaluated(closed: Any, arguments: Sequence[Any], wanted: Collection[int]) -> list[Any]:
    """Evaluate these results of a jaxpr from the arguments that are not None. Side effects run only if they depend on no other argument."""
    flags = [i in wanted for i in range(len(closed.jaxpr.outvars))]
    is_missing = [argument is None for argument in arguments] if closed.effects else None
    return evaluate_wanted(closed.jaxpr, closed.consts, arguments, flags, is_missing)


def names_of(path: Sequence[Any]) -> tuple[str, ...]:
    """Return the names on a path, in the form of snapshots."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


# Tracing and checks ---------------------------------------------------------------------------------------------------


class Coupled(Exception):
    """The reason why an optimizer cannot be evaluated entry by entry, or slice by slice of stacked arrays."""

    def __init__(self, reason: str, in_slices: bool = False) -> None:
        super().__init__(reason)
        self.in_slices = in_slices


def traced_in(
    transformation: optax.GradientTransformation, tree: ModelTree, specs: Mapping[str, Tree], num_stages: int | None
) -> tuple[Any, TracedOptimizer]:
    """Return the tree's first structure for which an optimizer can be traced, and the traced optimizer.

    `specs` is by layer id. If the optimizer fails for all structures, the error for the first one is raised.
    """
    failures = []
    for structure in tree.structures:
        try:
            return structure, trace_optimizer(transformation, structure.unflatten(whole_specs(tree, specs)), num_stages)
        except Exception as error:
            failures.append(error)
    raise failures[0]


def tree_by_id(specs: Mapping[str, Tree]) -> ModelTree:
    """Return a tree of parameters by layer id, for layers that were not cut from a model."""
    leaves, structure = jax.tree.flatten(dict(specs))
    return ModelTree((structure,), tuple(leaf.shape for leaf in leaves), jax.tree.unflatten(structure, map(Leaf, range(len(leaves)))))


def whole_specs(tree: ModelTree, specs: Mapping[str, Tree], *, sliced: bool = False) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of the leaves of a model's tree, with one slice of stacked leaves if they are `sliced`."""
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
    """Trace an optimizer for one slice of each stacked leaf; raise Coupled if it fails or computes something else than for whole leaves."""
    why = "its computation depends on the number of blocks that the model stacks in one array"
    try:
        sliced = trace_optimizer(transformation, structure.unflatten(specs), num_stages)
    except Exception as error:
        raise Coupled(why, in_slices=True) from error
    if any(_program(getattr(traced, name).jaxpr) != _program(getattr(sliced, name).jaxpr) for name in ("init", "update")):
        raise Coupled(why, in_slices=True)
    return sliced


_SIZES = re.compile(r"(?<=[\w>])\[[\d,]+\]|\b(?:shape|new_sizes|sizes|limit_indices|slice_sizes)=\([\d, ]*\)")
"""The sizes of arrays in the text of a jaxpr."""


def _program(jaxpr: Any) -> str:
    """Return a jaxpr as text, without the sizes of its arrays and the addresses of functions."""
    return _SIZES.sub(lambda sizes: re.sub(r"\d+", "", sizes[0]), re.sub(r"0x[0-9a-f]+", "", str(jaxpr)))


def model_optimizer(
    traced: TracedOptimizer, tree: ModelTree, specs: Sequence[Any], ties: Ties, trained: Subset, names: Sequence[str]
) -> ModelOptimizer:
    """Return the optimizer for one entry at a time, from one that is traced for one slice of each stacked leaf.

    Raise Coupled if the update of an entry depends on another entry, or slices of a stacked leaf depend on another leaf.
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
    parts = ties.parts(tree.layers, trained)
    entries = {
        entry: tuple(ArrayPlace(place.number, names_of(path)) for path, place in jax.tree_util.tree_flatten_with_path(part)[0])
        for entry, part in parts.items()
    }
    optimizer = ModelOptimizer(traced, tuple(spec.shape for spec in specs), entries, tuple(owners))
    for entry in entries:
        if (other := optimizer.missing(entry)) is not None:
            raise Coupled(f"it computes the update of layer '{entry}' together with the update of {names[other]}")
    return optimizer


def groups_of(tree: ModelTree, ties: Ties) -> list[str | int]:
    """Return for each leaf of a model's tree the entry that has it; for a stacked leaf, return the number of the leaf."""
    groups: dict[int, str | int] = {}
    for entry, part in ties.parts(tree.layers).items():
        for place in jax.tree.leaves(part):
            groups[place.number] = place.number if place.axes else entry
    return [groups[number] for number in range(len(tree.shapes))]
