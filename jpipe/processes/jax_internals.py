"""JAX functionality without a public name in 0.10 and 0.12: the only module that imports private modules of JAX.

JAX is imported late: the channel between the processes needs none of it.
"""

from collections.abc import Callable, Sequence
from typing import Any

__all__ = [
    "detect_cluster",
    "distributed_state",
    "keep_gloo_at",
]


def distributed_state() -> Any:
    """Return the state of `jax.distributed`, with `process_id`, `num_processes`, `coordinator_address` and `client`, its key-value store.

    `jax.process_index` and `jax.process_count` give two of them, but start the devices for that, and these wait for all processes.
    """
    from jax._src import distributed

    return distributed.global_state


def detect_cluster(
    coordinator: str | None, num_processes: int | None, process_id: int | None, limit: int
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Return what JAX detects of the cluster around this process: values for the arguments that are None, and this process's devices.

    `jax.distributed.initialize` does this too, but connects at once, and may then end the process.

    Args:
        coordinator: `host:port` of process 0.
        num_processes: how many there are.
        process_id: the number of this one.
        limit: seconds that a cluster's own tools may take.
    """
    from jax._src.clusters import ClusterEnv

    return ClusterEnv.auto_detect_unset_distributed_params(
        coordinator, num_processes, process_id, local_device_ids=None, cluster_detection_method=None, initialization_timeout=limit
    )


def keep_gloo_at(host: str) -> None:
    """Make gloo, which carries arrays between CPUs, listen at `host` instead of at the address of this host's own name.

    `jax_cpu_collectives_implementation` chooses gloo, and no setting where it listens. Where a version of JAX has other private names,
    gloo listens as before. Call it before JAX starts a device.
    """
    from jax.extend import backend

    try:
        from jax._src.xla_bridge import make_cpu_client
        from jaxlib import _jax

        make_collectives: Callable[..., Any] = _jax.make_gloo_tcp_collectives
    except (ImportError, AttributeError):
        return

    def client() -> Any:
        collectives = make_collectives(distributed_client=distributed_state().client, hostname=host)
        return make_cpu_client(collectives=collectives)

    backend.register_backend_factory("cpu", client, priority=0, fail_quietly=False)
