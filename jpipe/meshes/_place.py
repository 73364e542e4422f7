"""The place of a worker: one device, or a mesh of them."""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jpipe._frozen import NOTHING, FrozenMapping
from jpipe.meshes._partition import WHOLE, without_devices

Tree = Any


@dataclass(frozen=True)
class Place:
    """The devices of a worker, in one process.

    Attributes:
        devices: those of the mesh; one without a mesh.
        mesh: sizes by axis, those of size 1 left out.
    """

    devices: tuple[jax.Device, ...]
    mesh: FrozenMapping[int] = NOTHING

    @property
    def first(self) -> jax.Device:
        """The first device."""
        return self.devices[0]

    @property
    def process_index(self) -> int:
        """The process of the devices."""
        return self.first.process_index

    def sharding(self, spec: PartitionSpec = WHOLE) -> Sharding:
        """Return a sharding over these devices; without a spec each device has the whole array."""
        return NamedSharding(self._mesh, spec) if self.mesh else SingleDeviceSharding(self.first)

    def specs(self, tree: Tree, specs: Tree | None = None) -> Tree:
        """Return the specs of a tree with their shardings here, from `PartitionSpec`s; without any each device has the whole."""
        return _specs(self.sharding, tree, specs)

    def like(self, tree: Tree) -> Tree:
        """Return the shardings of another worker's arrays (or specs), moved to these devices."""
        return jax.tree.map(lambda leaf: self.sharding(getattr(leaf.sharding, "spec", WHOLE)), tree)

    @cached_property
    def _mesh(self) -> Mesh:
        return mesh_of(self.devices, self.mesh)


def crowded_meshes(places: Iterable[Place]) -> frozenset[Place]:
    """Return the meshes of CPU devices that several of these workers share.

    Collectives of XLA block the threads that compute there, one per device or core. Programs of several workers on the same devices are
    independent of each other: if many have begun on one device and not on another, no thread is left for the programs they wait for, and
    XLA aborts the process. So they must run one after the other.
    """
    count = Counter(place for place in places if place.mesh and place.first.platform == "cpu")
    return frozenset(place for place, workers in count.items() if workers > 1)


@dataclass(frozen=True)
class NoPlace:
    """A place without devices, for the sizes of shards.

    Attributes:
        mesh: as in `Place`.
    """

    mesh: FrozenMapping[int]

    def sharding(self, spec: PartitionSpec = WHOLE) -> Sharding | None:
        """Return a sharding as `Place.sharding`, or None without a mesh."""
        if not self.mesh:
            return None
        return NamedSharding(without_devices(self.mesh), spec)

    def specs(self, tree: Tree, specs: Tree | None = None) -> Tree:
        """Return specs as `Place.specs`."""
        return _specs(self.sharding, tree, specs)


def _specs(sharding: Callable[[PartitionSpec], Sharding | None], tree: Tree, specs: Tree | None) -> Tree:
    if specs is None:
        specs = jax.tree.map(lambda _: WHOLE, tree)
    return jax.tree.map(lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(spec)), tree, specs)


def mesh_of(devices: tuple[jax.Device, ...], sizes: FrozenMapping[int]) -> Mesh:
    """Return a JAX mesh of these devices, with neighbours along the last axis."""
    assert len(devices) == math.prod(sizes.values()), f"{len(devices)} devices for {sizes}"
    grid = np.array(devices, dtype=object).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
