"""Arrays in the memory of the host: moved there and back, and copied."""

from typing import Any

import jax
import numpy as np

from jpipe.errors import InputError

Tree = Any

_HOST = "pinned_host"  # the kind of host memory from which devices copy without waiting for the host


def in_host(leaf: Any) -> bool:
    """Return whether an array is in the memory of the host."""
    return isinstance(leaf, jax.Array) and leaf.sharding.memory_kind == _HOST


def to_host_memory(tree: Tree, without: Tree = None) -> Tree:
    """Begin to copy arrays to the memory of the host of their devices; those that are there already are returned as they are.

    Args:
        tree: the arrays.
        without: arrays that are returned as they are, too.
    """
    return _moved(tree, _HOST, without)


def from_host_memory(tree: Tree, without: Tree = None) -> Tree:
    """Begin to copy the arrays that are in host memory to their devices; the others are returned as they are."""
    away = [leaf for leaf in jax.tree.leaves(tree) if in_host(leaf)]
    return _moved(tree, _device_kind(away[0]), without) if away else tree


def copied(leaf: jax.Array) -> jax.Array:
    """Return a copy of an array in host memory, there."""
    copy: jax.Array = to_host_memory(from_host_memory(leaf))
    return copy


def copied_to_host(tree: Tree) -> Tree:
    """Copy arrays to host memory without further memory of their devices; of those that are there already, wait for the values."""
    # Through NumPy, because JAX does not promise that `device_put` copies an array to the memory in which it is.
    inside = jax.tree.map(lambda leaf: jax.device_put(np.array(leaf), leaf.sharding) if in_host(leaf) else leaf, tree)
    return to_host_memory(inside)


def check_host_memory(devices: list[jax.Device]) -> None:
    """Check that devices can keep arrays in the memory of their hosts.

    Raises:
        InputError: one of them cannot.
    """
    for device in devices:
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if _HOST not in kinds or device.default_memory().kind == _HOST:
            raise InputError(f"plan: offload: expected devices with the memory '{_HOST}', found {device} with {kinds}; remove it")


def _device_kind(leaf: jax.Array) -> str:
    device: jax.Device = next(iter(leaf.sharding.device_set))
    return device.default_memory().kind


def _moved(tree: Tree, kind: str, without: Tree) -> Tree:
    leaves, structure = jax.tree.flatten(tree)
    stay = set(map(id, jax.tree.leaves(without)))
    places = [
        n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array) and in_host(leaf) is not (kind == _HOST) and id(leaf) not in stay
    ]
    moved = jax.device_put([leaves[n] for n in places], [leaves[n].sharding.with_memory_kind(kind) for n in places])
    for n, leaf in zip(places, moved, strict=True):
        leaves[n] = leaf
    return jax.tree.unflatten(structure, leaves)
