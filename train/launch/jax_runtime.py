"""JAX's runtime between the processes of a run: how it starts, and at which addresses it listens."""

import math
import os

import jax

from jpipe import InputError
from jpipe.processes import jax_internals
from jpipe.processes.addresses import is_loopback
from train.launch.rendezvous import Address

# Without a heartbeat for so long JAX ends the process by SIGABRT. It counts the time in which this process itself is stopped, so it has to
# be longer than a laptop sleeps. jpipe's own channel, which does not count that, finds who is lost within a minute.
HEARTBEAT_TIMEOUT = 24 * 3600
SHUTDOWN_TIMEOUT = 10


def start(
    coordinator: Address, num_processes: int, process_id: int, devices: list[int] | None, listen: Address | None, limit: float
) -> None:
    """Connect JAX's runtimes of processes that have met.

    Args:
        coordinator: where all reach process 0.
        num_processes: how many there are.
        process_id: the number of this one, from 0.
        devices: those of this host's accelerators that belong to this process; None for all.
        listen: where process 0 listens; None for all networks.
        limit: seconds to wait.

    Raises:
        InputError: JAX cannot connect them.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # With it JAX would catch SIGTERM from here on, also where the process is to end at once; see train/console/preemption.py.
    jax.config.update("jax_enable_preemption_service", False)
    # Without it JAX ends all processes when one of them dies, before they can say which. When process 0 does, it ends them anyway.
    jax.config.update("jax_enable_recoverability", True)
    try:
        jax.distributed.initialize(
            str(coordinator),
            num_processes,
            process_id,
            local_device_ids=devices,
            cluster_detection_method="deactivate",  # all is known; a cluster around us may mean something else
            initialization_timeout=math.ceil(limit),
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
            coordinator_bind_address=None if listen is None else str(listen),
        )
    except jax.errors.JaxRuntimeError as error:
        raise InputError(f"{coordinator}: JAX cannot connect the processes: {error}; try again, or with another port") from None
    if is_loopback(coordinator.host):
        jax_internals.keep_gloo_at("127.0.0.1")


def listening(coordinator: Address) -> Address | None:
    """Where process 0 listens: at the coordinator's address only where that is a loopback address; None for all networks.

    `JAX_COORDINATOR_BIND_ADDRESS`, which JAX reads too, chooses one network of several.

    Raises:
        InputError: the variable holds no address.
    """
    if is_loopback(coordinator.host):
        return Address("127.0.0.1", coordinator.port) if coordinator.host == "localhost" else coordinator
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    return None if bind is None else Address.parse(bind, "JAX_COORDINATOR_BIND_ADDRESS")
