"""The links and devices of the stages of a plan: how long messages and sums take, and which ports they share."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

import jpipe
from jpipe_planner.machine.topology import Topology

KeepTogether = Literal["replicas", "stages"]


class StageLinks(NamedTuple):
    """The links of a pipeline with one stage on each rank, as NumPy arrays over the d - 1 cuts or the d stages.

    Attributes:
        bandwidths: for each cut the bandwidth of its slowest link.
        latencies: for each cut the longest latency of its links.
        rings: for each stage the slowest link between neighbouring replicas.
        slowness: for each stage the time of its slowest device, divided by the time in the profile.
        limits: for each stage the bytes that it may use on its smallest device; infinity: not limited.
        messages: by port and cut, the seconds that the port sends outputs and gradients, per microbatch of the batch and per byte of the
            output.
        sums: by port and stage, the seconds that the port sends, per byte of summed gradients.
    """

    bandwidths: Any
    latencies: Any
    rings: tuple[jpipe.Link, ...]
    slowness: Any
    limits: Any
    messages: Any
    sums: Any

    def port_seconds(self, microbatches: int, sizes: Any, summed: Any) -> float:
        """Return the seconds that the busiest port sends in a batch: M microbatches of `sizes` bytes at each cut, `summed` bytes."""
        return float((microbatches * self.messages @ sizes + self.sums @ summed).max(initial=0.0))


def ring_share(replicas: Any) -> Any:
    """Return the bytes that each replica sends in a ring sum (first shares, then sums of shares), divided by the bytes that are summed."""
    return 2 * (replicas - 1) / replicas


def find_links(topology: Topology, replicas: Sequence[int], keep_together: KeepTogether) -> StageLinks:
    """Return the links of stages on the first devices of a topology. The replicas are placed as `jpipe.Pipeline` places them."""
    depth, ends = len(replicas), np.cumsum(replicas).tolist()
    if keep_together == "replicas":
        devices = [np.arange(end - count, end) for end, count in zip(ends, replicas, strict=True)]
    else:
        devices = [np.arange(s, depth * count, depth) for s, count in enumerate(replicas)]
    # the columns are the messages of each cut, then the sums of each stage
    ports = np.zeros((2 * len(topology.levels) * topology.num_devices, 2 * depth - 1))
    latency = np.array([level.latency for level in topology.levels])
    bandwidths, latencies, rings = np.full(depth - 1, np.inf), np.zeros(depth - 1), [jpipe.Link()] * depth
    if depth > 1:
        counts = np.array([math.lcm(*pair) for pair in itertools.pairwise(replicas)])
        turns, cut, begins = [np.arange(count) for count in counts], np.repeat(np.arange(depth - 1), counts), _begins(counts)
        sources, targets = (
            np.concatenate([of_stage[k % len(of_stage)] for of_stage, k in zip(some, turns, strict=True)])
            for some in (devices[:-1], devices[1:])
        )
        levels, bandwidth, ends = _crossed(topology, sources, targets)
        bandwidths, latencies = np.minimum.reduceat(bandwidth, begins), np.maximum.reduceat(latency[levels], begins)
        for port in (*ends, *(ends + 1)):  # both ports of both ends, because outputs go one way and gradients come back
            np.add.at(ports, (port, cut), 1 / counts[cut] / bandwidth)
    if summing := [s for s in range(depth) if replicas[s] > 1]:
        counts = np.array([replicas[s] for s in summing])
        around = [(devices[s], np.roll(devices[s], 1)) for s in summing]
        levels, bandwidth, (out, into) = _crossed(topology, *(np.concatenate(some) for some in zip(*around, strict=True)))
        slowest, longest = np.minimum.reduceat(bandwidth, _begins(counts)), np.maximum.reduceat(latency[levels], _begins(counts))
        for s, ring, seconds in zip(summing, slowest.tolist(), longest.tolist(), strict=True):
            rings[s] = jpipe.Link(ring, seconds)
        shares = np.repeat(ring_share(counts) / slowest, counts)
        for port in (out, into + 1):
            ports[port, depth - 1 + np.repeat(summing, counts)] = shares
    distinct: dict[Any, int] = {}
    for port, row in enumerate(ports.view(np.dtype((np.void, ports.strides[0]))).ravel().tolist()):
        distinct.setdefault(row, port)
    used = ports[[*distinct.values()]]
    slowness, limits = topology.slowness, topology.limits
    return StageLinks(
        bandwidths,
        latencies,
        tuple(rings),
        np.array([slowness[of_stage].max() for of_stage in devices]),
        np.array([limits[of_stage].min() for of_stage in devices]),
        used[:, : depth - 1],
        used[:, depth - 1 :],
    )


def _begins(counts: Any) -> Any:
    return np.cumsum(counts) - counts


def _crossed(topology: Topology, sources: Any, targets: Any) -> tuple[Any, Any, Any]:
    """Return level and bandwidth of links, and the sending ports of both ends; the receiving port has the next number."""
    levels = sum((sources // size != targets // size).astype(int) for size in topology.sizes)
    inside = np.array([1, *topology.sizes])[levels]
    components = np.stack([sources // inside, targets // inside])
    bandwidths = np.empty(len(levels))
    for k in np.unique(levels).tolist():
        at = levels == k
        bandwidths[at] = topology.ports(k)[components[:, at]].min(0)
    return levels, bandwidths, 2 * (levels * topology.num_devices + components)
