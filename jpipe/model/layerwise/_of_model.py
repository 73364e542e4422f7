"""An optimizer traced for a whole model's own tree of parameters, of which each layer evaluates its own part.

Masks, labels and other functions of trees and paths are called in that trace, so they see the tree that they see outside of a pipeline.
Where a loop such as `nn.scan` stacks the blocks of a model, each layer has slices of the stacked arrays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.model.jaxprs._wanted import evaluate_wanted, needed
from jpipe.model.layerwise._trace import TracedOptimizer

Tree = Any


class ArrayPlace(NamedTuple):
    """One array of an entry: the leaf of the model's tree, and its names in the entry's layer."""

    number: int
    names: tuple[str, ...]


class _State(NamedTuple):
    """One array of an optimizer's state.

    Attributes:
        number: of the leaf of the state.
        slot: the position in the entry of the parameter that it belongs to; None for one of all parameters.
        names: where the state of an entry has it.
    """

    number: int
    slot: int | None
    names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ModelOptimizer:
    """An optimizer of a whole model's tree, for one entry at a time.

    The state of an entry is nested dicts with the names that optax's state has for the layer alone, `{layer id: params}`.

    Attributes:
        traced: the optimizer, for the model's tree with one slice of each stacked leaf.
        shapes: of the leaves of that tree.
        entries: for each entry its arrays, in order.
        owners: for each leaf of the state that is no parameter's the entry that it belongs to; None if it belongs to all.
    """

    traced: TracedOptimizer
    shapes: tuple[tuple[int, ...], ...]
    entries: Mapping[str, tuple[ArrayPlace, ...]]
    owners: tuple[str | None, ...]

    def init(self, entry: str, params: Tree) -> Tree:
        """Return the optimizer state of an entry."""
        leaves, state, closed = jax.tree.leaves(params), dict[str, Any](), self.traced.init
        for slots in self._rounds(entry):
            kept = self._state(entry, slots)
            arguments = self._placed(leaves, slots)
            wanted = {array.number for array in kept}
            results = evaluate_wanted(closed.jaxpr, closed.consts, arguments, [i in wanted for i in range(len(self.owners))])
            self._store(entry, state, kept, results, leaves)
        return state

    def update(self, entry: str, gradient: Tree, state: Tree, params: Tree, position: Mapping[str, Any]) -> tuple[Tree, Tree]:
        """Return the updates of an entry, in the structure of its parameters, and its new state."""
        closed, count = self.traced.update, len(self.shapes)
        gradients, (leaves, treedef) = jax.tree.leaves(gradient), jax.tree.flatten(params)
        updates, new_state = [None] * len(leaves), dict[str, Any]()
        for slots in self._rounds(entry):
            kept = self._state(entry, slots)
            before: list[Any] = [None] * len(self.owners)
            for array in kept:
                before[array.number] = self._load(state, array)
            arguments = [
                *self._placed(gradients, slots),
                *before,
                *self._placed(leaves, slots),
                *(position[n] for n in self.traced.position),
            ]
            wanted = {*slots, *(count + array.number for array in kept)}
            results = evaluate_wanted(closed.jaxpr, closed.consts, arguments, [i in wanted for i in range(len(closed.jaxpr.outvars))])
            for number, slot in slots.items():
                updates[slot] = results[number].reshape(leaves[slot].shape)
            self._store(entry, new_state, kept, results[count:], leaves)
        return jax.tree.unflatten(treedef, updates), new_state

    def missing(self, entry: str) -> int | None:
        """Return a leaf of the tree that the equations for an entry need and that it does not have, or None."""
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
        """Return the positions of an entry's arrays by leaf of the tree; where it has several slices of a leaf, in several dicts."""
        rounds: list[dict[int, int]] = [{}]
        for slot, array in enumerate(self.entries[entry]):
            free = next((slots for slots in rounds if array.number not in slots), None)
            if free is None:
                rounds.append(free := {})
            free[array.number] = slot
        return rounds

    def _state(self, entry: str, slots: Mapping[int, int]) -> list[_State]:
        """Return the state of the arrays at some positions of an entry, and what belongs to all parameters."""
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
        """Return arrays of an entry as leaves of the model's tree, with None in place of all others."""
        return [leaves[slots[n]].reshape(shape) if n in slots else None for n, shape in enumerate(self.shapes)]

    def _load(self, state: Tree, array: _State) -> Any:
        for name in array.names:
            state = state[name]
        return state.reshape(self._aval(array).shape)

    def _store(self, entry: str, state: dict[str, Any], kept: Sequence[_State], results: Sequence[Any], leaves: Sequence[Any]) -> None:
        """Put arrays into the state of an entry; those like a parameter get its shape in the layer."""
        for array in kept:
            value, node = jnp.asarray(results[array.number]), state  # it may be a literal
            if array.slot is not None and value.shape == self.shapes[self.entries[entry][array.slot].number]:
                value = value.reshape(leaves[array.slot].shape)
            for name in array.names[:-1]:
                node = node.setdefault(name, {})
            node[array.names[-1]] = value

    def _aval(self, array: _State) -> Any:
        return self.traced.update.jaxpr.invars[len(self.shapes) + array.number].aval


def names_of(path: Sequence[Any]) -> tuple[str, ...]:
    """Return the names on a path, as they stand in snapshots."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
