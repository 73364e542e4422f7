"""Runs in several processes: get the processes' addresses and numbers from flags or the cluster, and start JAX's runtime."""

import atexit
import ipaddress
import math
import os
import secrets
import socket
import ssl
import sys
import threading
from typing import NamedTuple

import jax

from jpipe import InputError, join_processes
from jpipe.errors import short
from jpipe.processes import Address, NotConnected, Processes, Rendezvous, handshake, jax_internals
from jpipe_train.console.options import Process

_FLAGS = ("--coordinator", "--num-processes", "--process-id")
_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"  # one of several networks of process 0's host; JAX also reads it

_LAUNCHERS = {  # launchers, each with its variables for the number of processes and the number of this process
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "MVAPICH": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    "MPI": ("PMI_SIZE", "PMI_RANK"),  # MPICH, Intel MPI
    "torchrun": ("WORLD_SIZE", "RANK"),
}

# After this time without a heartbeat JAX ends the process by SIGABRT. It includes time in which this process is stopped, so it has to be
# longer than a laptop sleeps. jpipe's own channel does not include that time, and detects a lost process within a minute.
_HEARTBEAT_TIMEOUT = 24 * 3600
_SHUTDOWN_TIMEOUT = 10

# Seconds from the last message until process 0 and the other processes exit. The library ends stuck processes after 5 s, process 0 after 6
# s. When process 0 ends, JAX aborts the other processes.
_LEAVE = 5.5, 4.0

_CERTIFICATES = "jax_mtls_cert_file", "jax_mtls_key_file", "jax_mtls_ca_file"
CERTIFICATES = ", ".join(_CERTIFICATES).upper()
"""The variables of certificates; all processes set them, or none."""

_Values = tuple[str | None, int | None, int | None]

_joined: Processes | None = None  # the processes of this run; one object per process, like JAX's runtime


class Membership(NamedTuple):
    """The address of process 0, the number of processes, the number of this process, and its accelerators of this host; None for all."""

    coordinator: Address
    num_processes: int
    process_id: int
    devices: list[int] | None = None


def start(process: Process) -> int:
    """Join the other processes of this run, before JAX uses a device, and return their number. A single process joins nothing.

    Without arguments it uses the environment: `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, then the clusters that
    JAX detects (SLURM, Open MPI, Kubernetes). If an unknown launcher has started several processes, it raises an error, because each
    process would run alone. With one process as the only argument it ignores the environment.

    The processes find each other at the coordinator's address before JAX listens there. JAX's runtime also waits for all processes. But if
    one is missing, JAX ends the others by SIGABRT, with a C++ stack trace that does not name it.

    Raise InputError if arguments do not fit together, a port is in use, the coordinator cannot be reached, processes do not connect, or the
    secret is invalid or differs between processes.
    """
    global _joined
    _check_limit("--wait-limit", process.wait_limit)
    member = membership(process)
    if member is None or member.num_processes == 1:
        return 1
    coordinator, secret, bind = member.coordinator, handshake.find_secret(process.secret_file), os.environ.get(_BIND)
    listen = coordinator.loopback or (None if bind is None else Address.parse(bind, _BIND))
    certificates = uses_certificates()
    if member.process_id == 0 and secret is None and coordinator.loopback is None:
        print(
            f"jpipe: no secret is set: whoever reaches port {coordinator.port} of this host can pose as one of the processes; "
            f"set {handshake.VARIABLE} (docs/how-to/security.md)",
            file=sys.stderr,
            flush=True,
        )
    rendezvous = Rendezvous(coordinator, member.process_id, member.num_processes, listen)
    _joined = join_processes(process.connect_limit, process.wait_limit, secret, rendezvous)
    assert _joined is not None, "there are several processes"
    try:
        _joined.agree({CERTIFICATES: "set" if certificates else "not set"})
        _start_jax(member, listen, process.connect_limit)
    except BaseException as error:
        _joined.stop(str(error) or type(error).__name__)
        raise
    return member.num_processes


def _start_jax(member: Membership, listen: Address | None, limit: float) -> None:
    """Connect JAX's runtimes after the rendezvous; process 0 listens at `listen`, or on all networks."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # With it JAX would handle SIGTERM from here on, even if the process should end immediately; see console/preemption.py.
    jax.config.update("jax_enable_preemption_service", False)
    # Without it JAX ends all processes when one of them dies, before they can report which. If process 0 dies, JAX ends them anyway.
    jax.config.update("jax_enable_recoverability", True)
    try:
        jax.distributed.initialize(
            str(member.coordinator),
            member.num_processes,
            member.process_id,
            local_device_ids=member.devices,
            cluster_detection_method="deactivate",  # all values are passed; the cluster may have others
            initialization_timeout=math.ceil(limit),
            heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT,
            shutdown_timeout_seconds=_SHUTDOWN_TIMEOUT,
            coordinator_bind_address=None if listen is None else str(listen),
        )
    except jax.errors.JaxRuntimeError as error:
        change = "try again, or with another port, or without the variables of a proxy"
        raise NotConnected(f"{member.coordinator}: JAX cannot connect the processes: {error}; {change}") from None
    jax_internals.keep_programs_of_all()
    if member.coordinator.loopback is not None:
        jax_internals.keep_gloo_at(private_loopback())


def private_loopback() -> str:
    """Choose a loopback address for this process alone, if the system has more than one; otherwise return 127.0.0.1.

    A program that tries the ports of 127.0.0.1, as scanners do, does not find listeners at this address.
    """
    address = str(ipaddress.IPv4Address("127.0.0.0") + 2 + secrets.randbelow(2**24 - 4))
    try:
        with socket.create_server((address, 0)):
            return address
    except OSError:  # macOS has only 127.0.0.1
        return "127.0.0.1"


def uses_certificates() -> bool:
    """Return whether connections to JAX's coordinator use certificates of both ends (mutual TLS), after checking the files.

    JAX would end the process by SIGABRT if they do not fit. Raise InputError if some of the three are missing or cannot be read, or this
    version of JAX does not support them.
    """
    chain, private, authority = files = [jax.config.values.get(name) or os.environ.get(name.upper(), "") for name in _CERTIFICATES]
    if not any(files):
        return False
    if _CERTIFICATES[0] not in jax.config.values:
        raise InputError(f"{CERTIFICATES}: JAX {jax.__version__} has no certificates, JAX 0.12 has; unset them, or install a newer JAX")
    try:
        if not all(files):
            raise ValueError("JAX needs all three")
        ssl.create_default_context(cafile=authority).load_cert_chain(chain, private, password=lambda: "")  # never prompt for a password
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        expected = "PEM files of a certificate, its key and its authority"
        raise InputError(where=CERTIFICATES, expected=expected, found=f"{', '.join(map(short, files))}: {error}") from None
    return True


def stop() -> None:
    """Leave the run when this process is done; process 0 leaves last. A single process does nothing.

    Print the result of the run first: from this call on, the process may be killed without a message. The remaining processes do not wait
    for a lost process, and wait only some seconds for a process that hangs. Raise PeerLost if another process was lost before all were
    done.
    """
    if _joined is not None:  # process 0 leaves last, because JAX ends the other processes when their coordinator ends
        _joined.close(jax.distributed.shutdown, _SHUTDOWN_TIMEOUT)


def is_alone() -> bool:
    """Return whether this process has not joined other processes."""
    return _joined is None


def leave_in_time(code: int) -> None:
    """If there are several processes, end this one with the exit code after some seconds, because JAX may wait long for the others.

    Print the result of the run first. After the loss of a process, the library would end this one soon, but always with exit code 1.
    """
    if _joined is not None:
        timer = threading.Timer(_LEAVE[_joined.index > 0], os._exit, (code,))
        timer.daemon = True
        timer.start()


def leave_at_once(code: int) -> None:
    """Register a function that ends this process with this exit code when Python exits, without the usual clean-up.

    After a loss, threads are stuck in collectives that never end. Python 3.11 would unwind them through C++, which aborts, and JAX would
    wait for the lost processes.
    """

    def leave() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    atexit.register(leave)  # the last one registered is the first to be called


def membership(process: Process) -> Membership | None:
    """Return the membership from the flags or the environment, or None for a single process; errors as in `start`."""
    _check_limit("--connect-limit", process.connect_limit)
    values: _Values = process.coordinator, process.num_processes, process.process_id
    if values == (None, 1, None):
        return None
    if values != (None, None, None):
        return _validated(values, _FLAGS, None)
    values, devices = (os.environ.get(_VARIABLES[0]), _whole(_VARIABLES[1]), _whole(_VARIABLES[2])), None
    if None in values:
        values, devices = _detect(values, process.connect_limit)
    if values != (None, None, None):
        return _validated(values, _VARIABLES, devices)
    _check_alone()
    return None


def _check_alone() -> None:
    """Check that no launcher unknown to JAX has started several processes: each would run alone.

    The variables of such a launcher do not give a free port for a coordinator: torchrun uses its port for its own store.
    """
    for launcher, names in _LAUNCHERS.items():
        count, number = map(os.environ.get, names)
        if count is not None and number is not None and count.strip().isdecimal() and int(count) > 1:
            raise InputError(
                f"{' and '.join(names)}: {launcher} has started {count} processes, but the address of process 0 is unknown, so each would "
                f"run alone; give {_FLAGS[0]} HOST:PORT {_FLAGS[1]} ${names[0]} {_FLAGS[2]} ${names[1]}, with the host of "
                f"process 0 and a port that is free there, or {_FLAGS[1]} 1 to run alone"
            )


def _check_limit(flag: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise InputError(where=flag, expected="seconds, more than 0", found=f"{seconds:g}")


def _validated(values: _Values, names: tuple[str, ...], devices: list[int] | None) -> Membership:
    coordinator, num_processes, process_id = values
    if coordinator is None or num_processes is None or process_id is None:
        missing = [name for name, value in zip(names, values, strict=True) if value is None]
        raise InputError(
            f"{', '.join(missing)}: missing; each of several processes needs all of {', '.join(names)}, a single process needs none"
        )
    address = Address.parse(coordinator, names[0])
    if num_processes < 1:
        raise InputError(where=names[1], expected="1 or more", found=num_processes)
    if not 0 <= process_id < num_processes:
        raise InputError(f"{names[2]}: expected a number from 0 to {num_processes - 1}, for {num_processes} processes, found {process_id}")
    return Membership(address, num_processes, process_id, devices)


def _whole(variable: str) -> int | None:
    text = os.environ.get(variable)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InputError(where=variable, expected="a whole number", found=repr(text), change="set the number, or unset the variable")
    return int(text)


def _detect(known: _Values, limit: float) -> tuple[_Values, list[int] | None]:
    """Return the arguments with each None replaced by JAX's value for the cluster, and the devices of this process."""
    try:
        coordinator, num_processes, process_id, devices = jax_internals.detect_cluster(*known, math.ceil(limit))
    except Exception as error:  # the tools of a cluster may raise any exception
        raise InputError(
            "JAX detects a cluster, but cannot read this process from its settings: "
            f"{' '.join(str(error).split()) or type(error).__name__}; give {', '.join(_FLAGS)}, or --num-processes 1 for a single process"
        ) from None
    is_chosen = bool(os.environ.get("JAX_LOCAL_DEVICE_IDS"))  # by the user; JAX reads it
    return (coordinator, num_processes, process_id), None if devices is None or is_chosen else list(devices)
