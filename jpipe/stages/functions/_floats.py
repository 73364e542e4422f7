"""The floating-point leaves of trees: those that have gradients."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def is_float(leaf: Any) -> bool:
    """Return whether an array (or spec) is of a floating-point or complex dtype."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def floats_of(tree: Tree) -> list[Any]:
    """Return the floating-point leaves (or specs) of a tree, in order."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def with_floats(tree: Tree, floats: Iterable[Any]) -> Tree:
    """Return the tree with its floating-point leaves replaced, in the order of `floats_of`."""
    leaves, treedef, new = *jax.tree.flatten(tree), iter(floats)
    return jax.tree.unflatten(treedef, [next(new) if is_float(leaf) else leaf for leaf in leaves])
