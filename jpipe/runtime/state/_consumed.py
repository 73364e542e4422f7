"""Deletes the arrays of a consumed state when the run needs them no longer, however long the caller keeps the state."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import jax

Tree = Any
Part = TypeVar("Part", bound=Hashable)


class Consumed(Generic[Part]):
    """Counts, for each array of the consumed states, the parts of the workers' present states that hold it, and deletes it at zero.

    `jax.Array.delete` waits for no computation: memory is free when those that read the array are over, as after a donation. Arrays of
    the parts that the run has made itself are not counted: nothing but the run holds them.

    Attributes:
        parts: the parts that hold counted arrays, with the keys of these.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}
        self._uses: dict[int, int] = {}
        self.parts: dict[Part, list[int]] = {}

    def add(self, part: Part, tree: Tree) -> None:
        """Count the arrays of a part of a consumed state."""
        leaves = [leaf for leaf in jax.tree_util.tree_leaves(tree) if hasattr(leaf, "delete")]
        for leaf in leaves:
            self._arrays[id(leaf)] = leaf
            self._uses.setdefault(id(leaf), 0)
        self._count(part, leaves)

    def recount(self, parts: Sequence[Part], read: Callable[[Part], Tree]) -> None:
        """Delete what is no longer held after an instruction that has changed these parts, which `read` returns."""
        before = [self.parts.pop(part) for part in parts if part in self.parts]
        for part in dict.fromkeys(parts) if before else ():
            self._count(part, jax.tree_util.tree_leaves(read(part)))
        uses = self._uses
        for key in itertools.chain.from_iterable(before):
            if key in uses:
                uses[key] -= 1
                if not uses[key]:
                    del uses[key]
                    self._arrays[key].delete()

    def keep(self, tree: Tree) -> None:
        """Never delete these arrays: something other than the workers' states holds them."""
        for leaf in jax.tree.leaves(tree) if self._uses else ():
            self._uses.pop(id(leaf), None)

    def delete(self) -> None:
        """Delete all arrays that are counted, since the run has failed."""
        for key in self._uses:
            self._arrays[key].delete()

    def _count(self, part: Part, leaves: Iterable[Any]) -> None:
        """Note that a part holds those of the leaves that are counted."""
        uses = self._uses
        if keys := [id(leaf) for leaf in leaves if id(leaf) in uses]:
            for key in keys:
                uses[key] += 1
            self.parts[part] = keys
