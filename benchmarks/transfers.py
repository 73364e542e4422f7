"""`python -m benchmarks.transfers`: measure transfers and sums of arrays between two processes, each pinned to a core.

Transfers are measured as jpipe's collectives and as JAX's own `device_put` between processes.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jpipe
from benchmarks.machine import describe
from benchmarks.programs import free_port
from jpipe.processes import Connection, DevicePutConnection, Group, Reduction

SIZES = {"4 B": (1, 1000), "64 KB": (1 << 14, 500), "1 MB": (1 << 18, 200), "16 MB": (1 << 22, 40)}  # floats, and how often
LEAVES, LEAF = 50, 131072
LIMIT = 240  # seconds


def measure() -> list[dict[str, Any]]:
    """Start two processes and return the figures that they measure."""
    port, *addresses = (str(free_port()) for _ in range(3))
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    processes: list[subprocess.Popen[str]] = []
    try:
        for process in ("0", "1"):
            command = [sys.executable, "-m", "benchmarks.transfers", process, port, addresses[int(process)]]
            processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))  # noqa: S603 - this very module
        output, _ = processes[0].communicate(timeout=LIMIT)
        processes[1].wait(timeout=LIMIT)
    finally:
        for started in processes:
            started.kill()
            started.wait()
    return json.loads(output.splitlines()[-1])


def _process(process: int, port: str, own_port: str) -> None:
    """Run one of the two processes: process 0 prints the figures as a line of JSON, after all other output."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[process % len(cores)]})
    jpipe.keep_freed_memory()  # as `jpipe train` does
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_cross_host_transfer_socket_address", f"127.0.0.1:{own_port}")  # for `device_put` on CPUs
    jax.config.update("jax_cross_host_transport_addresses", "127.0.0.1:0,127.0.0.1:0")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    rows = _dispatch()
    for name, (size, count) in SIZES.items():
        rows += _transfers(name, size, count, Connection) + _transfers(f"{name} by device_put", size, count, DevicePutConnection)
    rows += _reductions()
    if process == 0:
        print(json.dumps(rows), flush=True)


def _transfers(name: str, size: int, count: int, way: type[Connection] | type[DevicePutConnection]) -> list[dict[str, Any]]:
    """Measure round trips: half the time is one transfer; the processor time of one process is that of both ends of a transfer."""
    local, remote = jax.local_devices()[0], next(d for d in jax.devices() if d.process_index != jax.process_index())
    first, second = (local, remote) if jax.process_index() == 0 else (remote, local)
    links = way(first, second), way(second, first)
    spec = jax.ShapeDtypeStruct((size,), jnp.float32)
    for link in links:
        if isinstance(link, Connection):
            link.compile(spec)
    x = jnp.zeros(size, jnp.float32, device=local)

    def round_trip() -> None:
        if jax.process_index() == 0:
            links[0].send(x)
            jax.block_until_ready(links[1].receive(spec))
        else:
            jax.block_until_ready(links[0].receive(spec))
            links[1].send(x)

    seconds, processor = _timed(round_trip, count)
    return [
        {"figure": f"{name}: µs per transfer", "measured": seconds / 2 * 1e6},
        {"figure": f"{name}: MB/s", "measured": size * 4 / (seconds / 2) / 1e6},
        {"figure": f"{name}: µs of processor time, both ends", "measured": processor * 1e6},
    ]


def _dispatch() -> list[dict[str, Any]]:
    """Measure Python's and JAX's work for a transfer, with a program that moves nothing: the rest is gloo and the network."""
    x = jnp.zeros((), jnp.float32, device=jax.local_devices()[0])
    still = Group(jax.devices()).compile(lambda x: x, x)
    seconds, _ = _timed(lambda: still(x), 2000)
    return [{"figure": "µs of a transfer in Python and JAX, at each end", "measured": seconds * 1e6}]


def _reductions() -> list[dict[str, Any]]:
    local = jax.local_devices()[0]
    rows = []
    for name, leaves, size, count in (("a scalar", 1, 1, 500), (f"{LEAVES} leaves, {LEAVES * LEAF * 4 / 1e6:.0f} MB", LEAVES, LEAF, 20)):
        tree = [jnp.ones(size, jnp.float32, device=local) for _ in range(leaves)]
        reduction = Reduction(jax.devices())
        reduction.compile(tree)
        seconds, processor = _timed(lambda: reduction(tree), count)  # noqa: B023 - called at once
        rows.append({"figure": f"sum of {name}: ms", "measured": seconds * 1e3})
        rows.append({"figure": f"sum of {name}: ms of processor time, each process", "measured": processor * 1e3})
    return rows


def _timed(call: Callable[[], Any], count: int) -> tuple[float, float]:
    """Return the median time of a call and the mean of its processor time in this process."""
    for _ in range(5):
        call()
    times, before = [], time.process_time()
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times), (time.process_time() - before) / count


def main() -> None:
    """Measure and print."""
    machine = describe()
    print(f"{machine['device']}, {machine['cores']} cores, jax {machine['jax']}; two processes, a core each")
    for row in measure():
        print(f"{row['figure']:<62} {row['measured']:>12.4g}")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        _process(int(sys.argv[1]), *sys.argv[2:])
    else:
        main()
