"""The place of a worker: one device, a mesh of devices, or a mesh without devices, which only determines the sizes of shards."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jpipe._frozen import NOTHING, FrozenMapping
from jpipe.meshes._partition import WHOLE, without_devices

Tree = Any


@dataclass(frozen=True)
class Place:
    """The devices of a worker, in one process.

    Attributes:
        devices: the devices of the mesh, in row-major order; one device without a mesh; empty if only the sizes of shards matter.
        mesh: the sizes of the mesh axes, by name, without axes of size 1.
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

    def sharding(self, spec: PartitionSpec = WHOLE) -> Sharding | None:
        """Return a sharding over these devices; by default each device has the whole array. None without devices and mesh."""
        if self.mesh:
            return NamedSharding(self._mesh, spec)
        return SingleDeviceSharding(self.first) if self.devices else None

    def specs(self, tree: Tree, specs: Tree | None = None) -> Tree:
        """Return the specs of a tree with shardings over these devices, from `PartitionSpec`s; by default each device has whole arrays."""
        if specs is None:
            specs = jax.tree.map(lambda _: WHOLE, tree)
        return jax.tree.map(lambda leaf, spec: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.sharding(spec)), tree, specs)

    def like(self, tree: Tree) -> Tree:
        """Return the shardings over these devices that correspond to the shardings of another worker's arrays (or specs)."""
        return jax.tree.map(lambda leaf: self.sharding(getattr(leaf.sharding, "spec", WHOLE)), tree)

    @cached_property
    def _mesh(self) -> Mesh | AbstractMesh:
        if not self.devices:
            return without_devices(self.mesh)
        assert len(self.devices) == math.prod(self.mesh.values()), f"{len(self.devices)} devices for {self.mesh}"
        grid = np.array(self.devices, dtype=object).reshape(tuple(self.mesh.values()))
        return Mesh(grid, tuple(self.mesh), axis_types=(AxisType.Auto,) * len(self.mesh))


def crowded_meshes(places: Iterable[Place]) -> frozenset[Place]:
    """Return the meshes of CPU devices that several of these workers share.

    On CPUs, collectives of XLA block the computing threads; there is one per device or core. The programs of several workers on
    the same devices are independent. If many have begun on one device but not on another, no thread is left for the programs that they wait
    for, and XLA aborts the process. So these workers must compute one after the other.
    """
    count = Counter(place for place in places if place.mesh and place.first.platform == "cpu")
    return frozenset(place for place, workers in count.items() if workers > 1)
