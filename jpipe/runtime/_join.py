"""How this process finds the others of its run."""

import atexit

import jax

from jpipe.errors import InputError
from jpipe.processes._channel import Limits
from jpipe.processes._membership import Processes
from jpipe.processes.handshake import find_secret
from jpipe.runtime._transport import progress

_joined: list[Processes] = []  # the processes of this run, once they have joined


def join_processes(limit: float = 300.0, wait: float = Limits.wait, secret: bytes | None = None) -> Processes | None:
    """Join the processes of this run; None where there is only this one. All processes call it; only the first call of each joins.

    It starts no JAX device. When Python ends, a process leaves by itself (`Processes.end`).

    Args:
        limit: seconds that the first call waits for the others.
        wait: seconds without progress in any process after which the run is given up; the first call sets it, the same in all processes.
            Choose more than the longest computation of a microbatch takes, and more than whatever one process does alone.
        secret: shared by all processes, which recognize each other by it (`jpipe.processes.handshake`); by default that of the variable
            `JPIPE_SECRET`. Without a secret, whoever reaches JAX's coordinator can join.

    Raises:
        InputError: process 0 cannot be reached or has another secret, the secret is too short, or `wait` is not above 0.
        PeerLost: not all have joined in time.
    """
    if not wait > 0:
        raise InputError(f"wait limit: expected more than 0 seconds, found {wait:g}")
    if not _joined and jax.distributed.is_initialized():
        secret = find_secret() if secret is None else secret
        _joined.append(Processes.join(limit=limit, limits=Limits(wait=wait), progress=progress, secret=secret))
        atexit.register(_joined[0].end)  # registered after JAX's own exit, and so called before it
    return _joined[0] if _joined and _joined[0].count > 1 else None
