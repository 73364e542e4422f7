"""Deletes the arrays of a consumed state when the run needs them no longer, however long the caller keeps the state."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import jax

Tree = Any
Part = TypeVar("Part", bound=Hashable)


class Consumed(Generic[Part]):
    """Counts, for each array of the consumed states, the parts of the workers' present states that hold it, and deletes it at zero.

    `jax.Array.delete` waits for no computation: memory is free when those that read the array are over, as after a donation. Arrays of
    the parts that the run has made itself are not counted: nothing but the run holds them.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}
        self._uses: dict[int, int] = {}
        self._parts: dict[Part, list[int]] = {}  # which of the arrays each part holds

    def add(self, part: Part, tree: Tree) -> None:
        """Count the arrays of a part of a consumed state."""
        leaves = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "delete")]
        self._arrays.update((id(leaf), leaf) for leaf in leaves)
        self._hold(part, map(id, leaves))

    def refresh(self, parts: Sequence[Part], read: Callable[[Part], Tree]) -> None:
        """Delete what is no longer held after an instruction that has changed these parts, which `read` returns."""
        if self._parts.keys().isdisjoint(parts):
            return  # none of them held an array of a consumed state, so none does now
        changed = dict.fromkeys(parts)
        before = [self._parts.pop(part) for part in changed if part in self._parts]
        for part in changed:
            self._hold(part, [id(leaf) for leaf in jax.tree.leaves(read(part)) if id(leaf) in self._uses])
        for keys in before:
            for key in keys:
                if key in self._uses:
                    self._uses[key] -= 1
                    if not self._uses[key]:
                        del self._uses[key]
                        self._arrays[key].delete()

    def keep(self, tree: Tree) -> None:
        """Never delete these arrays: something else than the workers' states holds them."""
        for leaf in jax.tree.leaves(tree) if self._parts else ():
            self._uses.pop(id(leaf), None)

    def delete(self) -> None:
        """Delete all arrays that are counted, since the run has failed."""
        for key in self._uses:
            self._arrays[key].delete()

    def _hold(self, part: Part, keys: Iterable[int]) -> None:
        counted = list(keys)
        for key in counted:
            self._uses[key] = self._uses.get(key, 0) + 1
        if counted:
            self._parts[part] = counted
