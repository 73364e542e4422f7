"""The rendezvous of the processes of a run: process 0 stores its address, the other processes connect to it."""

import itertools
import json
import math
import secrets
import socket
from typing import Any, Protocol, runtime_checkable

from jpipe.errors import InputError
from jpipe.processes import handshake, jax_internals
from jpipe.processes.addresses import is_loopback, listen_everywhere
from jpipe.processes.handshake import Door

_PURPOSE = "channel"  # of these connections, for the handshake


@runtime_checkable
class Store(Protocol):
    """A store through which the processes find each other."""

    index: int
    """The index of this process."""
    count: int
    """The number of processes."""
    host: str
    """A name or an address at which the other processes reach process 0."""

    def put(self, value: str) -> None:
        """Store a value, in process 0."""

    def get(self, seconds: float) -> str:
        """Wait for a value of process 0; raise InputError if it does not come in time."""


class JaxStore:
    """The key-value store of `jax.distributed`.

    The host is the coordinator's: the one address of process 0 that all other processes have just reached. All processes join equally
    often.
    """

    _joins = itertools.count()

    def __init__(self) -> None:
        state = jax_internals.distributed_state()
        self.index, self.count = state.process_id, state.num_processes
        self.host = (state.coordinator_address or "").rpartition(":")[0].strip("[]")
        self._client: Any = state.client
        self._key = f"jpipe/processes/{next(self._joins)}"

    def put(self, value: str) -> None:
        try:
            self._client.key_value_set(self._key, value)
        except RuntimeError as error:
            raise InputError(
                f"process 0 cannot leave word of where it can be reached ({_status(error)}): somebody else has written there; "
                "start the run again, on a network that strangers cannot reach"
            ) from None

    def get(self, seconds: float) -> str:
        try:
            return self._client.blocking_key_value_get(self._key, math.ceil(seconds * 1000))
        except RuntimeError as error:
            raise InputError(
                f"process {self.index} did not get the address of process 0 within {seconds:g} s ({_status(error)}); see what "
                "process 0 says, and let all processes of a run join at the same place"
            ) from None


def _status(error: RuntimeError) -> str:
    """Return the first word of an error of JAX's."""
    return (str(error).splitlines() or [""])[0].partition(":")[0]


def listen_for_processes(store: Store, secret: bytes | None) -> Door:
    """Listen in process 0, and store the address: host, port, and a token of this channel."""
    listener, token = _listen_at(store.host), secrets.token_hex(16)
    store.put(json.dumps([store.host, listener.getsockname()[1], token]))
    return Door(listener, handshake.key(secret, token), _PURPOSE)


def connect_to_first(store: Store, limit: float, secret: bytes | None) -> socket.socket:
    """Connect to process 0 from any other process, with a proof from both ends.

    Raises:
        InputError: process 0 cannot be reached within `limit` seconds, or has another secret.
    """
    host, port, token = _address(store.get(limit))
    try:
        connection = socket.create_connection((host, port), timeout=limit)
    except OSError as error:
        raise InputError(
            f"process {store.index} cannot reach process 0 at {host}, port {port}: {error.strerror or error}; "
            "let the processes of a run connect to each other at any port (a firewall may forbid it)"
        ) from None
    try:
        if handshake.call(connection, handshake.key(secret, token), _PURPOSE, store.index, store.count, limit) is not None:
            connection.settimeout(None)
            return connection
        how = "it closes the connection; see what process 0 says"
    except TimeoutError:
        how = f"it does not answer within {limit:g} s; see what process 0 says"
    except handshake.UnknownHere:
        how = f"it has another secret; give all processes of the run the same {handshake.VARIABLE}, or none of them any"
    except handshake.NotOfThisRun:
        how = "somebody else answers there; start the run again, on a network that strangers cannot reach"
    connection.close()
    raise InputError(f"process {store.index} cannot join process 0: {how}")


def _address(text: str) -> tuple[str, int, str]:
    """Parse the host, port and token that process 0 has stored; raise InputError for anything else."""
    try:
        host, port, token = json.loads(text)
        if not (isinstance(host, str) and isinstance(token, str) and isinstance(port, int) and 0 < port < 65536):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise InputError(
            f"expected the address of process 0 in JAX's store, found {text[:80]!r}: somebody else has written there"
        ) from None
    return host, port, token


def _listen_at(host: str) -> socket.socket:
    """Listen at that address alone, or at all addresses where the other processes know this host by another one.

    The same where the name is a loopback address in this host only: Debian has 127.0.1.1 for the host's own name.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        hidden = is_loopback(str(address[0])) and not is_loopback(host)
        listener = listen_everywhere() if hidden else socket.create_server(address[:2], family=family)
    except OSError:
        listener = listen_everywhere()
    # For its connections, which asyncio overlooks: else a line waits 40 ms for the acknowledgement of the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener
