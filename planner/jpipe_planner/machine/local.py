"""Provide this machine as a topology: its devices, the links between them, measured with a pipeline that computes nothing, and overlap."""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe
from jpipe_planner.machine.host import Host
from jpipe_planner.machine.overlap import overlap_of, overlap_words, usual_overlap
from jpipe_planner.machine.topology import Topology

__all__ = ["host_memory", "local_topology", "usable_cores"]

SMALL, LARGE = 1, 2**18  # elements of float32 in a message: 4 bytes, 1 MB
STEPS = 30
_SHARE_FOR_PLANS = 0.5  # of the memory of a machine, for what waits there; the rest is for data and other programs
_HOST_KIND = "pinned_host"  # the kind of host memory from which devices copy without waiting for the host
_LARGE_MOVE = 2**22  # elements of float32: 17 MB
_MOVES = 7
_WIDE = 768  # size of the matrices that are multiplied: some milliseconds


def local_topology(count: int | None = None, *, dispatch: float = 0.0, report: Callable[[str], object] = lambda words: None) -> Topology:
    """Measure the links between the devices of this run, those of other processes included, and what overlaps; all processes call it.

    The link to host memory is measured, too.

    Args:
        count: the number of devices of the topology; by default all.
        dispatch: seconds to start a computation, which are subtracted (`Profile.dispatch`).
        report: called with a line that says what was measured to overlap, if that was measured.

    Returns:
        One level of equal links, which take no time if there is only one device. On CPUs the devices share the memory, and the cores if
        programs on several devices slow each other down. Transfers and sums are taken to overlap computations on CPUs, where a measurement
        would say how busy the cores are. With one device nothing is. Nothing is to wait in host memory on CPUs, whose memory that is; for
        the devices of a machine together half of it may be used.
    """
    devices = jax.devices()
    device, count = devices[0], count or len(devices)
    overlap = usual_overlap(device.platform)
    if device.platform != "cpu" and (times := jpipe.runtime.time_overlap(devices)) is not None:
        overlap = overlap_of(times)
        report(overlap_words(times))
    small, large = (_hop_seconds(elements, dispatch) for elements in (SMALL, LARGE))
    bandwidth = 4 * (LARGE - SMALL) / max(large - small, 1e-6)
    is_cpu = device.platform == "cpu"
    memory = host_memory() / count if is_cpu else (device.memory_stats() or {}).get("bytes_limit")
    local, shared = jax.local_devices(), 0.0 if is_cpu else _SHARE_FOR_PLANS * host_memory()
    host = _measured_host(local[0], shared / len(local) if math.isfinite(shared) else None)
    return Topology(
        name="local",
        levels=({"count": count, "bandwidth": bandwidth, "latency": small},),
        device={
            "name": device.device_kind,
            "memory": memory if memory and math.isfinite(memory) else None,
            "overlap": overlap,
            "host": host,
        },
        cores=_at_once(devices) if is_cpu else None,
    )


def host_memory() -> float:
    """Return the bytes of memory of this machine; infinity if the system does not report them."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def usable_cores() -> int:
    """Return the number of cores that this process may use, which is smaller than the machine's if it is pinned to some."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not available on every system
        return os.cpu_count() or 1


def _at_once(devices: Sequence[jax.Device]) -> float:
    """Measure how many devices can compute at the same time as fast as one alone, with a matrix product on one and on all."""
    if jax.process_count() > 1:
        # each may be pinned to some cores, which are not those that all of them have
        return max((os.cpu_count() or 1) / len(jax.local_devices()), 1.0)
    factors = [jax.device_put(np.ones((_WIDE, _WIDE), np.float32), device) for device in devices]
    product = jax.jit(lambda x: x @ x)
    jax.block_until_ready([product(x) for x in factors])

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready([product(x) for x in factors[:count]])
        return time.perf_counter() - begin

    alone, together = (statistics.median(seconds(count) for _ in range(STEPS)) for count in (1, len(devices)))
    return min(max(len(devices) * alone / together, 1.0), float(len(devices)))


def _measured_host(device: jax.Device, memory: float | None) -> Host:
    """Measure the link of a device of this process to the memory of its host, in the slower direction.

    Args:
        device: the device.
        memory: bytes of host memory that a plan may use for it; None: not known.

    Returns:
        The figures; of a device that has no memory of the kind `pinned_host` the default ones, and no memory.
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


def _loss(outputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return outputs.sum() + labels.sum(), jnp.ones(())


def _hop_seconds(elements: int, dispatch: float) -> float:
    """Measure the seconds of a message to the next stage; the stages are on two devices, or one in each process.

    Args:
        elements: the number of float32 elements of the message.
        dispatch: seconds to start a computation.
    """
    first = {device.process_index: device for device in reversed(jax.devices())}
    devices = [first[process] for process in sorted(first)] if len(first) > 1 else jax.devices()[:2]
    if len(devices) == 1:
        return 0.0
    stack = jpipe.LayerStack({f"hop {n}": lambda x: x + 1 for n in range(len(devices))})
    plan = jpipe.Plan.even(stack.ids, len(devices), "naive", 1)
    pipe = jpipe.Pipeline(stack, plan, _loss, optax.sgd(0.1), devices=devices)
    batch = np.zeros((1, elements), np.float32), np.zeros((1, 1), np.float32)
    state = pipe.init(jax.random.key(0), batch)
    seconds = []
    for step in range(STEPS):
        begin = time.perf_counter()
        state, metrics = pipe.step(state, batch)
        jax.block_until_ready(pipe.params(state))
        float(metrics.losses[step])
        seconds.append(time.perf_counter() - begin)
    hops = 2 * (len(devices) - 1)
    return max(statistics.median(seconds[STEPS // 3 :]) - (hops + 1) * dispatch, 0.0) / hops
