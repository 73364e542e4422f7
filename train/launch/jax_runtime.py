"""JAX's runtime between the processes of a run: how it starts, and on which addresses it listens."""

import math
import os

import jax

from jpipe.processes import jax_internals
from jpipe.processes.addresses import is_loopback, own_loopback
from train.launch.rendezvous import Address, NotConnected

# After this time without a heartbeat JAX ends the process by SIGABRT. It includes time in which this process is stopped, so it has to be
# longer than a laptop sleeps. jpipe's own channel does not include that time, and detects a lost process within a minute.
HEARTBEAT_TIMEOUT = 24 * 3600
SHUTDOWN_TIMEOUT = 10


def start(
    coordinator: Address, num_processes: int, process_id: int, devices: list[int] | None, listen: Address | None, limit: float
) -> None:
    """Connect JAX's runtimes after the rendezvous.

    Args:
        coordinator: the address of process 0.
        num_processes: the number of processes.
        process_id: the number of this process, from 0.
        devices: the accelerators of this host that belong to this process; None for all.
        listen: the address on which process 0 listens; None for all networks.
        limit: seconds to wait.

    Raises:
        InputError: JAX cannot connect them.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # With it JAX would handle SIGTERM from here on, even if the process should end immediately; see train/console/preemption.py.
    jax.config.update("jax_enable_preemption_service", False)
    # Without it JAX ends all processes when one of them dies, before they can report which. If process 0 dies, JAX ends them anyway.
    jax.config.update("jax_enable_recoverability", True)
    try:
        jax.distributed.initialize(
            str(coordinator),
            num_processes,
            process_id,
            local_device_ids=devices,
            cluster_detection_method="deactivate",  # everything is given; the cluster may have other values
            initialization_timeout=math.ceil(limit),
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
            coordinator_bind_address=None if listen is None else str(listen),
        )
    except jax.errors.JaxRuntimeError as error:
        raise NotConnected(f"{coordinator}: JAX cannot connect the processes: {error}; try again, or with another port") from None
    if is_loopback(coordinator.host):
        jax_internals.keep_gloo_at(own_loopback())


def listening(coordinator: Address) -> Address | None:
    """The address on which process 0 listens: the coordinator's, if that is a loopback address; None for all networks.

    `JAX_COORDINATOR_BIND_ADDRESS`, which JAX also reads, selects one of several networks.

    Raises:
        InputError: the variable is not an address.
    """
    if is_loopback(coordinator.host):
        return Address("127.0.0.1", coordinator.port) if coordinator.host == "localhost" else coordinator
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    return None if bind is None else Address.parse(bind, "JAX_COORDINATOR_BIND_ADDRESS")
