"""Functions of JAX that have no public name in versions 0.10 to 0.12. Only this module imports private modules of JAX.

JAX is imported inside functions, because the channel between the processes does not need JAX.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

__all__ = [
    "cudnn_attention",
    "detect_cluster",
    "distributed_state",
    "keep_gloo_at",
    "keep_programs_of_all",
]


def distributed_state() -> Any:
    """Return the state of `jax.distributed`, with `process_id`, `num_processes`, `coordinator_address` and `client`, its key-value store.

    `jax.process_index` and `jax.process_count` return two of these values, but start the devices, which waits for all processes.
    """
    from jax._src import distributed

    return distributed.global_state


def detect_cluster(
    coordinator: str | None, num_processes: int | None, process_id: int | None, limit: int
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Return the values that JAX detects in a cluster for arguments that are None, and the devices of this process.

    `jax.distributed.initialize` also detects them, but it connects at once, and may end the process. The tools of the cluster may take
    `limit` seconds.
    """
    from jax._src.clusters import ClusterEnv

    return ClusterEnv.auto_detect_unset_distributed_params(
        coordinator, num_processes, process_id, local_device_ids=None, cluster_detection_method=None, initialization_timeout=limit
    )


def keep_gloo_at(host: str) -> None:
    """Make gloo, which sends arrays between CPUs, listen at `host` instead of at the address to which this host's name resolves.

    JAX's setting `jax_cpu_collectives_implementation` selects gloo, but no setting gives gloo an address. If JAX's private names differ,
    this function has no effect. Call it before JAX starts a device.
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


def keep_programs_of_all() -> None:
    """Let every process write to JAX's persistent compilation cache, because each process of a pipeline compiles other stages.

    JAX writes the programs of process 0 only, so the other processes would compile at every start. JAX 0.10 also passes the host callbacks
    of a program; a program with callbacks cannot be kept. If JAX's private names differ, this function has no effect.
    """
    import jax
    from jax._src import compilation_cache, compiler

    try:
        write_in_first, write = compiler._cache_write, compilation_cache.put_executable_and_time
    except AttributeError:
        return

    def write_in_all(cache_key: str, compile_time_secs: float, module_name: str, backend: Any, executable: Any, *callbacks: Any) -> None:
        if distributed_state().process_id == 0:
            write_in_first(cache_key, compile_time_secs, module_name, backend, executable, *callbacks)
        elif not any(callbacks) and compile_time_secs >= jax.config.values["jax_persistent_cache_min_compile_time_secs"]:
            with contextlib.suppress(OSError):  # then the program is compiled at the next start, too
                write(cache_key, module_name, executable, backend, int(compile_time_secs))

    compiler._cache_write = write_in_all


def cudnn_attention() -> Any:
    """Return the module of cuDNN's attention. `jax.nn.dot_product_attention` does not offer its packed layout."""
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo
