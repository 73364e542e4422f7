"""The links of a topology that the cuts and sums of parallel equal pipelines use."""

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
    """

    bandwidths: Any
    latencies: Any
    rings: tuple[jpipe.Link, ...]
    sharing: tuple[tuple[int, ...], ...]
    _levels: tuple[tuple[float, Any, Any, Any], ...]

    @classmethod
    def find(cls, topology: Topology, width: int, depth: int, keep_together: Literal["replicas", "stages"]) -> "Crossings":
        """Assign w pipelines of d stages to the first w d devices, with neighbours according to `keep_together`."""
        count = width * depth
        grid = np.arange(count).reshape((depth, width) if keep_together == "replicas" else (width, depth))
        grid = grid if keep_together == "replicas" else grid.T
        bandwidths = np.array([level.bandwidth for level in topology.levels])
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
            levels.append((topology.levels[k].bandwidth, cuts == k, grid[:-1] // inside, grid[1:] // inside))
        return cls(
            bandwidths=bandwidths[cuts].min(axis=1, initial=np.inf),
            latencies=latencies[cuts].max(axis=1, initial=0.0),
            rings=tuple(
                jpipe.Link(bandwidth, latency)
                for bandwidth, latency in zip(bandwidths[rings].min(axis=1).tolist(), latencies[rings].max(axis=1).tolist(), strict=True)
            ),
            sharing=tuple(tuple(stages) for stages in by_ports.values() if len(stages) > 1),
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
            seconds = np.where(crosses, np.asarray(sizes)[:, None] / bandwidth, 0.0).ravel()
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
