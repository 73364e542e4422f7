"""JAX's runtime that connects the processes of a run: how it starts, and on which addresses it listens."""

import math
import os
import ssl

import jax

from jpipe import InputError
from jpipe.errors import short
from jpipe.processes import Address, NotConnected, jax_internals
from jpipe.processes.addresses import is_loopback, private_loopback

# After this time without a heartbeat JAX ends the process by SIGABRT. It includes time in which this process is stopped, so it has to be
# longer than a laptop sleeps. jpipe's own channel does not include that time, and detects a lost process within a minute.
HEARTBEAT_TIMEOUT = 24 * 3600
SHUTDOWN_TIMEOUT = 10

_CERTIFICATES = "jax_mtls_cert_file", "jax_mtls_key_file", "jax_mtls_ca_file"
CERTIFICATES = ", ".join(_CERTIFICATES).upper()
"""The variables of certificates; all processes set them, or none."""


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
    # With it JAX would handle SIGTERM from here on, even if the process should end immediately; see console/preemption.py.
    jax.config.update("jax_enable_preemption_service", False)
    # Without it JAX ends all processes when one of them dies, before they can report which. If process 0 dies, JAX ends them anyway.
    jax.config.update("jax_enable_recoverability", True)
    try:
        jax.distributed.initialize(
            str(coordinator),
            num_processes,
            process_id,
            local_device_ids=devices,
            cluster_detection_method="deactivate",  # all values are passed; the cluster may have others
            initialization_timeout=math.ceil(limit),
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT,
            coordinator_bind_address=None if listen is None else str(listen),
        )
    except jax.errors.JaxRuntimeError as error:
        raise NotConnected(f"{coordinator}: JAX cannot connect the processes: {error}; try again, or with another port") from None
    if is_loopback(coordinator.host):
        jax_internals.keep_gloo_at(private_loopback())


def uses_certificates() -> bool:
    """Return whether connections to JAX's coordinator use certificates of both ends (mutual TLS), after checking the files.

    JAX would end the process by SIGABRT if they do not fit.

    Raises:
        InputError: some of the three are missing or cannot be read, or this version of JAX does not support them.
    """
    files = {name.upper(): jax.config.values.get(name) or os.environ.get(name.upper()) for name in _CERTIFICATES}
    if not any(files.values()):
        return False
    if _CERTIFICATES[0] not in jax.config.values:
        raise InputError(f"{CERTIFICATES}: JAX {jax.__version__} has no certificates, JAX 0.12 has; unset them, or install a newer JAX")
    if missing := [name for name, file in files.items() if not file]:
        raise InputError(f"{', '.join(missing)}: missing; JAX needs all of {CERTIFICATES}")
    chain, private, authority = (file or "" for file in files.values())
    try:
        ssl.create_default_context(cafile=authority).load_cert_chain(chain, private, password=lambda: "")  # never prompt for a password
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        shown = ", ".join(short(file) for file in (chain, private, authority))
        expected = "PEM files of a certificate, its key and its authority"
        raise InputError(where=CERTIFICATES, expected=expected, found=f"{shown}: {error}") from None
    return True


def listen_address(coordinator: Address) -> Address | None:
    """Return the address on which process 0 listens: the coordinator's, if it is a loopback address, or None for all networks.

    `JAX_COORDINATOR_BIND_ADDRESS`, which JAX also reads, selects one of several networks.

    Raises:
        InputError: the variable is not an address.
    """
    if is_loopback(coordinator.host):
        return Address("127.0.0.1", coordinator.port) if coordinator.host == "localhost" else coordinator
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    return None if bind is None else Address.parse(bind, "JAX_COORDINATOR_BIND_ADDRESS")
