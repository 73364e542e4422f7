"""The links of a topology that the cuts and sums of parallel equal pipelines use, and the devices of their stages."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

import jpipe
from jpipe_planner.cost.price import Number
from jpipe_planner.machine.topology import Topology


@dataclass(frozen=True)
class Crossings:
    """The links of w pipelines of d stages; NumPy arrays over the d - 1 cuts or the d stages.

    Attributes:
        bandwidths: bandwidth of the slowest link of each cut.
        latencies: the longest latency of each cut.
        rings: for each stage the slowest link between neighbouring replicas.
        sharing: groups of several stages whose sums use the same ports.
        slowness: how many times as long as in the profile the slowest device of each stage computes; None: all devices are equal.
        limits: the bytes that each stage may use of its device with the least, or a number for all; infinity: not limited.
    """

    bandwidths: Any
    latencies: Any
    rings: tuple[jpipe.Link, ...]
    sharing: tuple[tuple[int, ...], ...]
    slowness: tuple[float, ...] | None
    limits: Any
    _levels: tuple[tuple[Any, Any, Any, Any], ...]

    @classmethod
    def find(cls, topology: Topology, width: int, depth: int, keep_together: Literal["replicas", "stages"]) -> "Crossings":
        """Assign w pipelines of d stages to the first w d devices, with neighbours according to `keep_together`."""
        count = width * depth
        grid = np.arange(count).reshape((depth, width) if keep_together == "replicas" else (width, depth))
        grid = grid if keep_together == "replicas" else grid.T
        latencies = np.array([level.latency for level in topology.levels])
        cuts = _level(topology, grid[:-1], grid[1:])
        rings = _level(topology, grid, np.roll(grid, 1, axis=1))
        by_ports: dict[tuple[int, ...], list[int]] = {}
        for s, level in enumerate(rings.max(axis=1).tolist()):
            inside = topology.sizes[level - 1] if level > 0 else 1
            by_ports.setdefault((level, *np.unique(grid[s] // inside).tolist()), []).append(s)
        levels = []
        for k in np.unique(cuts):
            inside = topology.sizes[k - 1] if k > 0 else 1
            bandwidth = (
                _bandwidths(topology, np.full_like(cuts, k), grid[:-1], grid[1:]) if topology.differing else topology.levels[k].bandwidth
            )
            levels.append((bandwidth, cuts == k, grid[:-1] // inside, grid[1:] // inside))
        slowness, limits = None, np.inf if topology.device.limit is None else topology.device.limit
        if topology.differing:
            slowness, limits = tuple(topology.slowness[grid].max(axis=1).tolist()), topology.limits[grid].min(axis=1)
        ring_bandwidths = _bandwidths(topology, rings, grid, np.roll(grid, 1, axis=1)).min(axis=1)
        return cls(
            bandwidths=_bandwidths(topology, cuts, grid[:-1], grid[1:]).min(axis=1, initial=np.inf),
            latencies=latencies[cuts].max(axis=1, initial=0.0),
            rings=tuple(
                jpipe.Link(bandwidth, latency)
                for bandwidth, latency in zip(ring_bandwidths.tolist(), latencies[rings].max(axis=1).tolist(), strict=True)
            ),
            sharing=tuple(tuple(stages) for stages in by_ports.values() if len(stages) > 1),
            slowness=slowness,
            limits=limits,
            _levels=tuple(levels),
        )

    def ports(self, sizes: Number) -> tuple[Number, Number]:
        """Return the seconds for which the busiest port of each cut sends one microbatch of every pipeline.

        Args:
            sizes: bytes that cross each cut.

        Returns:
            Outputs only; outputs and gradients. An array over the cuts each.
        """
        one_way, both_ways = np.zeros(len(sizes)), np.zeros(len(sizes))
        for bandwidth, crosses, sources, targets in self._levels:
            seconds = np.where(crosses, np.asarray(sizes)[:, None] / bandwidth, 0.0).ravel()  # for as long as over the slower port
            count = int(targets.max()) + 1
            out = np.bincount(sources.ravel(), seconds, count)
            into = np.bincount(targets.ravel(), seconds, count)
            both = out + into  # gradients leave where outputs arrive
            one_way = np.maximum(one_way, np.where(crosses, np.maximum(out[sources], into[targets]), 0.0).max(axis=1))
            both_ways = np.maximum(both_ways, np.where(crosses, np.maximum(both[sources], both[targets]), 0.0).max(axis=1))
        return one_way, both_ways


def _level(topology: Topology, sources: Any, targets: Any) -> Any:
    """Return `Topology.level` for arrays of devices, with 0 where both are the same."""
    return sum(np.not_equal(sources // size, targets // size).astype(int) for size in topology.sizes)


def _bandwidths(topology: Topology, levels: Any, sources: Any, targets: Any) -> Any:
    """Return the bandwidths of the links between arrays of devices that cross these levels: those of the slower port of each."""
    if not topology.differing:
        return np.array([level.bandwidth for level in topology.levels])[levels]
    bandwidths = np.zeros(np.shape(levels))
    for k, inside in enumerate((1, *topology.sizes[:-1])):
        ports = topology.ports(k)
        bandwidths = np.where(levels == k, np.minimum(ports[sources // inside], ports[targets // inside]), bandwidths)
    return bandwidths
