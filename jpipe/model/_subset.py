"""Subsets of the leaves of trees: trained parameters, changed layer state, and floating-point leaves, which have gradients."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


@dataclass(frozen=True)
class Subset:
    """A subset of the leaves of named trees. In the chosen part of a tree, None replaces all other leaves."""

    # for each tree that is not chosen completely, by name, whether each of its leaves is chosen
    chosen: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)

    @property
    def is_all(self) -> bool:
        """Whether all leaves of all trees are chosen."""
        return not self.chosen

    def of(self, name: str, tree: Tree) -> Tree:
        """Return the chosen leaves of one tree, in its structure."""
        if name not in self.chosen:
            return tree
        leaves, treedef = jax.tree.flatten(tree)
        return jax.tree.unflatten(treedef, [leaf if is_chosen else None for leaf, is_chosen in zip(leaves, self.chosen[name], strict=True)])

    def part(self, trees: Mapping[str, Tree]) -> Mapping[str, Tree]:
        """Return the chosen leaves of all trees, in their structure."""
        return trees if self.is_all else {name: self.of(name, tree) for name, tree in trees.items()}

    def unchosen(self, trees: Mapping[str, Tree]) -> dict[str, Tree]:
        """Return the unchosen leaves of the trees that have some. The result keeps no other array alive."""
        opposite = Subset({name: tuple(not is_chosen for is_chosen in leaves) for name, leaves in self.chosen.items()})
        return {name: opposite.of(name, tree) for name, tree in trees.items() if name in self.chosen}

    def joined(self, part: Mapping[str, Tree], unchosen: Mapping[str, Tree]) -> dict[str, Tree]:
        """Join chosen leaves with the others into whole trees; `unchosen` may have chosen leaves, too, which are ignored."""
        return {name: self.filled(name, tree, unchosen.get(name)) for name, tree in part.items()}

    def filled(self, name: str, part: Tree, unchosen: Tree) -> Tree:
        """Do the same as `joined` for one tree."""
        if name not in self.chosen:
            return part
        return jax.tree.map(lambda leaf, other: other if leaf is None else leaf, part, unchosen, is_leaf=lambda leaf: leaf is None)

    def flags(self, trees: Mapping[str, Tree]) -> list[bool]:
        """Return for each leaf of the trees whether it is chosen."""
        return jax.tree.leaves({name: self.chosen.get(name, jax.tree.map(lambda _: True, tree)) for name, tree in trees.items()})

    def excludes(self, name: str) -> bool:
        """Return whether the tree of this name has leaves, but none is chosen."""
        return name in self.chosen and not any(self.chosen[name])

    def has_any(self, trees: Mapping[str, Tree]) -> bool:
        """Return whether any leaf of these trees is chosen."""
        return any(bool(jax.tree.leaves(tree)) and not self.excludes(name) for name, tree in trees.items())


EVERYTHING = Subset()


def is_float(leaf: Any) -> bool:
    """Return whether an array (or spec) has a floating-point or complex dtype."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def floats_of(tree: Tree) -> list[Any]:
    """Return the floating-point leaves (or specs) of a tree, in order."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def with_floats(tree: Tree, floats: Iterable[Any]) -> Tree:
    """Return the tree with its floating-point leaves replaced, in the order of `floats_of`."""
    leaves, treedef, new = *jax.tree.flatten(tree), iter(floats)
    return jax.tree.unflatten(treedef, [next(new) if is_float(leaf) else leaf for leaf in leaves])
