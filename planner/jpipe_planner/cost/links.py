"""The links and devices of the stages of a plan: how long messages and sums take, and which ports they share."""

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
        """Return the seconds that the busiest port sends during a batch.

        Args:
            microbatches: M, the microbatches of the batch, over all replicas.
            sizes: for each cut the bytes of a microbatch that cross the cut.
            summed: for each stage the bytes of gradients that its replicas sum in a batch.
        """
        return float((microbatches * self.messages @ sizes + self.sums @ summed).max(initial=0.0))


def ring_share(replicas: int) -> float:
    """Return the bytes that each replica sends in a ring sum, divided by the bytes that are summed.

    A replica first sends shares of its bytes, and then sums of such shares.
    """
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
    bandwidths, latencies, rings = np.full(depth - 1, np.inf), np.zeros(depth - 1), list[jpipe.Link]()
    for s in range(depth - 1):
        k = np.arange(math.lcm(replicas[s], replicas[s + 1]))
        source, target = devices[s][k % replicas[s]], devices[s + 1][k % replicas[s + 1]]
        levels, bandwidth, ends = _crossed(topology, source, target)
        bandwidths[s], latencies[s] = bandwidth.min(), max(topology.levels[n].latency for n in np.unique(levels).tolist())
        for port in (*ends, *(ends + 1)):  # both ports of both ends, because outputs go one way and gradients come back
            np.add.at(ports[:, s], port, 1 / len(k) / bandwidth)
    for s, of_stage in enumerate(devices):
        if len(of_stage) == 1:
            rings.append(jpipe.Link())
            continue
        levels, bandwidth, (out, into) = _crossed(topology, of_stage, np.roll(of_stage, 1))
        rings.append(jpipe.Link(float(bandwidth.min()), max(topology.levels[n].latency for n in np.unique(levels).tolist())))
        ports[np.concatenate([out, into + 1]), depth - 1 + s] = ring_share(len(of_stage)) / rings[-1].bandwidth
    used = np.array(list(dict.fromkeys(map(tuple, ports.tolist()))))
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


def _crossed(topology: Topology, sources: Any, targets: Any) -> tuple[Any, Any, Any]:
    """Return the level and the bandwidth of the links between devices, and the numbers of the sending ports at both ends.

    The receiving port of an end has the number of its sending port plus 1.
    """
    levels = sum((sources // size != targets // size).astype(int) for size in topology.sizes)
    inside = np.array([1, *topology.sizes])[levels]
    components = np.stack([sources // inside, targets // inside])
    bandwidths = np.empty(len(levels))
    for k in np.unique(levels).tolist():
        at = levels == k
        bandwidths[at] = topology.ports(k)[components[:, at]].min(0)
    return levels, bandwidths, 2 * (levels * topology.num_devices + components)
