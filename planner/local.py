"""The machine at hand as a topology: its devices, and the links between them measured by timing a pipeline that computes nothing."""

import math
import os
import statistics
import time

import jax
import numpy as np
import optax

import jpipe
from planner.topology import Topology

SMALL, LARGE = 1, 2**18  # elements of float32 in a message: 4 bytes, 1 MB
STEPS = 30


def local_topology(workers: int | None = None, *, dispatch: float = 0.0) -> Topology:
    """Measure the links between the devices of this run, those of other processes included; all processes call it.

    Args:
        workers: how many there are to be; by default one on each device.
        dispatch: seconds that starting one computation takes, which are no part of a link (`Profile.dispatch`).

    Returns:
        One level of equal links; without a second device they are free. On CPUs the workers share the cores and the memory.
    """
    devices = jax.devices()
    device, count = devices[0], workers or len(devices)
    small, large = (_hop_seconds(elements, dispatch) for elements in (SMALL, LARGE))
    bandwidth = 4 * (LARGE - SMALL) / max(large - small, 1e-6)
    is_cpu = device.platform == "cpu"
    memory = host_memory() / count if is_cpu else (device.memory_stats() or {}).get("bytes_limit")
    return Topology(
        name="local",
        levels=({"count": count, "bandwidth": bandwidth, "latency": small},),
        device={"name": device.device_kind, "memory": memory if memory and math.isfinite(memory) else None},
        cores=usable_cores() if is_cpu else None,
    )


def host_memory() -> float:
    """Bytes of memory of this machine; infinite where the system does not say."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return math.inf


def usable_cores() -> int:
    """How many cores the processes of this machine may use together."""
    return os.cpu_count() or 1


def _hop_seconds(elements: int, dispatch: float) -> float:
    """Seconds that a message of so many elements takes to the next of the stages: one on two devices, or one in every process."""
    first = {device.process_index: device for device in reversed(jax.devices())}
    devices = [first[process] for process in sorted(first)] if len(first) > 1 else jax.devices()[:2]
    if len(devices) == 1:
        return 0.0
    stack = jpipe.LayerStack({f"hop {n}": lambda x: x + 1 for n in range(len(devices))})
    plan = jpipe.Plan.even(stack.ids, len(devices), "naive", 1)
    pipe = jpipe.Pipeline(stack, plan, lambda y, labels: (y.sum() + labels.sum(), 1.0), optax.sgd(0.1), devices=devices)
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
