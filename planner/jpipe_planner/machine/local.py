"""This machine as a topology: its devices, and measurements of their links and of what overlaps with computations."""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

import jpipe
from jpipe_planner.machine.targets import Host
from jpipe_planner.machine.topology import Topology

__all__ = ["host_memory", "local_topology", "usable_cores"]

SMALL, LARGE, LARGE_OF_ACCELERATORS = 1, 2**20, 2**23  # numbers of float32 elements to move: 4 bytes, 4 MB, 34 MB
ENOUGH = 0.5  # a transfer or sum overlaps if more than this share of it, or of the computation if that is shorter, is hidden
_SHARE_FOR_PLANS = 0.5  # share of a machine's memory that plans may use; the rest is for data and other programs
_HOST_KIND = "pinned_host"  # the kind of host memory from which devices copy without waiting for the host
_LARGE_MOVE = 2**22  # elements of float32: 17 MB
_MOVES = 7
_SHORTEST = 1e-6  # the least difference in seconds between a large and a small transfer
_FREE = 1e15  # bytes per second between a device and itself
_Seconds = Mapping[jpipe.runtime.Moved, float]


def local_topology(
    count: int | None = None, *, cores: float | None = None, report: Callable[[str], object] = lambda words: None
) -> Topology:
    """Measure the links between all devices of this run, the link to host memory, and what overlaps with computations.

    All processes must call this function. The bandwidth of a link is the slower one of a transfer and a sum, each timed alone. Then both
    are timed while the first device computes, which shows whether they overlap with computations.

    Example:
        ```python
        topology = local_topology(2, report=print)  # of two devices; prints what overlaps
        ```

    Args:
        count: the number of devices of the topology; by default all devices.
        cores: how many devices can compute at the same time without slowing each other down (`Together`); None: all devices.
        report: called with a line that says what overlaps with computations.

    Returns:
        One level of equal links, which take no time if there is only one device. The devices of a machine together may use half of its
        host memory. CPU devices share the memory of the machine, and so cannot move anything to host memory. Only in the process of the
        first device does the topology have the measurements between several devices.
    """
    devices = jax.devices()
    device, count = devices[0], count or len(devices)
    is_cpu = device.platform == "cpu"
    most = LARGE if is_cpu else LARGE_OF_ACCELERATORS
    small, large = (jpipe.runtime.time_overlap(devices[:count], elements) for elements in (SMALL, most))
    overlap = "none" if large is None else overlap_of(large)
    if large is not None:
        report(overlap_words(large))
    moves = [{name: each.moved for name, each in (times or {}).items()} for times in (small, large)]
    memory = host_memory() / count if is_cpu else (device.memory_stats() or {}).get("bytes_limit")
    local, shared = jax.local_devices(), 0.0 if is_cpu else _SHARE_FOR_PLANS * host_memory()
    ends = max(len({each.process_index for each in devices[:count]}), 2)
    host = _measured_host(local[0], shared / len(local) if math.isfinite(shared) else None)
    return Topology(
        name="local",
        levels=({"count": count, **_link(ends, most, *moves)},),
        device={
            "name": device.device_kind,
            "memory": memory if memory and math.isfinite(memory) else None,
            "overlap": overlap,
            "host": host,
        },
        cores=cores,
    )


def _link(ends: int, most: int, small: _Seconds, large: _Seconds) -> dict[str, float]:
    """Return bandwidth and latency of a link from the slower one of transfers and sums. Without measurements the link takes no time.

    A transfer goes to all `ends` devices and back, a sum goes round a ring. `small` and `large` are the seconds of both, with `SMALL` and
    with `most` elements.
    """
    if not small:
        return {"bandwidth": _FREE}
    hops, bandwidths = 2 * (ends - 1), []
    shares_of: Mapping[jpipe.runtime.Moved, int] = {"transfer": 1, "sum": ends}
    for name, shares in shares_of.items():
        seconds = max(large[name] - small[name], _SHORTEST)
        bandwidths.append(hops / shares * 4 * (most - SMALL) / seconds)
    return {"bandwidth": min(bandwidths), "latency": max(small.values()) / hops}


def overlap_of(times: Mapping[jpipe.runtime.Moved, jpipe.runtime.OverlapTimes]) -> jpipe.programs.Overlap:
    """Return what overlaps with computations according to these times; "none" also if only sums overlap."""
    if times["transfer"].hidden <= ENOUGH:
        return "none"
    return "transfers and sums" if times["sum"].hidden > ENOUGH else "transfers"


def overlap_words(times: Mapping[jpipe.runtime.Moved, jpipe.runtime.OverlapTimes]) -> str:
    """Return one line that describes the measured overlap."""
    shares = " and ".join(f"{each.hidden:.0%} of a {name}" for name, each in times.items())
    return f"overlap: a computation hides {shares}, measured between devices; plans assume: {overlap_of(times)}"


def host_memory() -> float:
    """Return the bytes of memory of this machine; infinity if the system does not report them."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def usable_cores() -> int:
    """Return the number of cores that this process may use. A process that is pinned to some cores may not use all cores of the machine."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not available on every system
        return os.cpu_count() or 1


def _measured_host(device: jax.Device, memory: float | None) -> Host:
    """Measure the link of a device of this process to the memory of its host, in the slower direction.

    `memory` is the host memory in bytes that a plan may use for the device; None: not known. A device without memory of the kind
    `pinned_host` gets the default figures with 0 bytes.
    """
    if _HOST_KIND not in {each.kind for each in device.addressable_memories()}:
        return Host(memory=0)
    at_device, at_host = (
        jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for kind in (device.default_memory().kind, _HOST_KIND)
    )

    def times(elements: int) -> list[float]:
        """Return the median seconds in each direction."""
        x, rounds = jax.device_put(np.ones(elements, np.float32), at_device).block_until_ready(), list[tuple[float, float]]()
        for _ in range(_MOVES):
            began = time.perf_counter()
            moved = jax.device_put(x, at_host).block_until_ready()
            there = time.perf_counter()
            x = jax.device_put(moved, at_device).block_until_ready()
            rounds.append((there - began, time.perf_counter() - there))
        return [statistics.median(direction) for direction in zip(*rounds, strict=True)]

    small, large = times(SMALL), times(_LARGE_MOVE)
    slower = max(more - less for less, more in zip(small, large, strict=True))
    return Host(bandwidth=4 * (_LARGE_MOVE - SMALL) / max(slower, 1e-6), latency=max(small), memory=memory)
