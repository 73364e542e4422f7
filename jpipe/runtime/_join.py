"""How this process joins the others of its run."""

import atexit

import jax

from jpipe.errors import InputError
from jpipe.processes._channel import Limits
from jpipe.processes._membership import Processes
from jpipe.processes.handshake import find_secret
from jpipe.runtime._transport import progress

_joined: list[Processes] = []  # the processes of this run, once they have joined


def join_processes(limit: float = 300.0, wait: float = Limits.wait, secret: bytes | None = None) -> Processes | None:
    """Join the processes of this run; returns None if there is only one. All processes call it; only the first call of each joins.

    It does not start JAX devices. When Python ends, a process leaves by itself (`Processes.end`).

    Args:
        limit: seconds that the first call waits for the others.
        wait: seconds without progress in any process after which the run counts as hanging. The first call sets it; it must be the same
            in all processes, and longer than a computation of a microbatch and anything that one process does alone.
        secret: shared by all processes, which authenticate each other by it (`jpipe.processes.handshake`); by default the value of the
            variable `JPIPE_SECRET`. Without a secret, whoever reaches JAX's coordinator can join.

    Raises:
        InputError: process 0 cannot be reached or has another secret, the secret is too short, or `wait` is not above 0.
        PeerLost: not all processes joined in time.
    """
    if not wait > 0:
        raise InputError(f"wait limit: expected more than 0 seconds, found {wait:g}")
    if not _joined and jax.distributed.is_initialized():
        secret = find_secret() if secret is None else secret
        _joined.append(Processes.join(limit=limit, limits=Limits(wait=wait), progress=progress, secret=secret))
        atexit.register(_joined[0].end)  # registered after JAX's own exit, and so called before it
    return _joined[0] if _joined and _joined[0].count > 1 else None
