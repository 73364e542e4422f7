"""Arrays of a state that a capability keeps in other memory than that of their devices: read there, and copied."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.capabilities.protocol import RuntimeHooks
from jpipe.capabilities.registry import runtimes

Tree = Any


@cache
def _keepers() -> tuple[RuntimeHooks, ...]:
    """Return the capabilities that keep arrays elsewhere."""
    return tuple(hooks for hooks in runtimes().values() if hooks.is_away is not None)


def is_away(leaf: Any) -> bool:
    """Return whether an array is in other memory than that of its devices."""
    return any(hooks.is_away(leaf) for hooks in _keepers() if hooks.is_away is not None)


def fetched(tree: Tree) -> Tree:
    """Begin to copy the arrays that are away to their devices; the others are returned as they are."""
    for hooks in _keepers():
        tree = tree if hooks.fetch is None else hooks.fetch(tree)
    return tree


def copied(tree: Tree) -> Tree:
    """Copy arrays, each in the memory in which it is."""
    return jax.tree.map(_copied, tree)


def _copied(leaf: Any) -> Any:
    copies = (hooks.copy for hooks in _keepers() if hooks.copy is not None and hooks.is_away is not None and hooks.is_away(leaf))
    return next(copies, jnp.copy)(leaf)
