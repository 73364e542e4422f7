"""Arrays of a state that are in host memory ("away"): functions that move them there and back, and copy them."""

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any

AWAY = "pinned_host"
"""The kind of host memory that devices read without waiting for the host."""


def is_away(leaf: Any) -> bool:
    """Return whether an array is in host memory."""
    return isinstance(leaf, jax.Array) and leaf.sharding.memory_kind == AWAY


def sent_away(tree: Tree, without: Tree = None) -> Tree:
    """Begin to copy arrays to host memory. Arrays that are already there, or in `without`, are returned unchanged."""
    return _moved(tree, AWAY, without)


def fetched(tree: Tree, without: Tree = None) -> Tree:
    """Begin to copy the arrays in host memory to their devices. Other arrays, and the arrays in `without`, are returned unchanged."""
    away = [leaf for leaf in jax.tree.leaves(tree) if is_away(leaf)]
    return _moved(tree, next(iter(away[0].sharding.device_set)).default_memory().kind, without) if away else tree


def copied(tree: Tree) -> Tree:
    """Copy arrays; each copy is in the same memory as its original."""
    return jax.tree.map(lambda leaf: sent_away(fetched(leaf)) if is_away(leaf) else jnp.copy(leaf), tree)


def _moved(tree: Tree, kind: str, without: Tree) -> Tree:
    leaves, structure = jax.tree.flatten(tree)
    stay = set(map(id, jax.tree.leaves(without)))
    places = [
        n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and is_away(leaf) is not (kind == AWAY) and id(leaf) not in stay
    ]
    moved = jax.device_put([leaves[n] for n in places], [leaves[n].sharding.with_memory_kind(kind) for n in places])
    for n, leaf in zip(places, moved, strict=True):
        leaves[n] = leaf
    return jax.tree.unflatten(structure, leaves)
