"""The channel between the processes of a run: a star of connections, lines of JSON, one thread a process that does the talking.

Process 0 listens, the others connect. What a process posts goes to process 0, whose `Coordinator` answers to all. The thread keeps
listening and sending heartbeats while the main thread is stuck in a collective, which by itself never raises. No arrays pass here. Who
connects proves that it belongs to the run (`jpipe.processes.handshake`).
"""

import asyncio
import contextlib
import ipaddress
import itertools
import json
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from jpipe.errors import InputError
from jpipe.processes import handshake
from jpipe.processes._coordinator import Beat, Coordinator, Message
from jpipe.processes.handshake import Caller, Door

_PURPOSE = "channel"  # of these connections, for the handshake
_LOOK = 0.01  # seconds between two looks at who wants to come in
_LINE = 2**24  # bytes of the longest line; configs and plans travel in one


@dataclass(frozen=True)
class Limits:
    """How long a process may be silent or be waited for before the run is given up; in all, less than a minute.

    Where all processes meet (`agree`, `barrier`, `close`) the others wait ten minutes, for one may compile that long; who dies is
    noticed at once there, too.

    Attributes:
        silence: seconds without a sign of life of a process; a main thread may hold Python's lock that long.
        wait: seconds that one wait inside of `Processes.waiting` may last while nothing moves in any process.
        grace: seconds from the loss of the run until a process that has not ended by itself is ended.
    """

    silence: float = 30.0
    wait: float = 45.0
    grace: float = 5.0

    @property
    def beat(self) -> float:
        """Seconds between two signs of life."""
        return min(1.0, self.silence / 10, self.wait / 10)


@runtime_checkable
class Store(Protocol):
    """How the processes find each other."""

    index: int
    """Which process this is."""
    count: int
    """How many there are."""
    host: str
    """A name or an address at which the others reach process 0."""

    def put(self, value: str) -> None:
        """Process 0 leaves a value for the others."""

    def get(self, seconds: float) -> str:
        """The others take it, and wait for it so long; InputError if it does not come."""


class JaxStore:
    """The key-value store of `jax.distributed`. JAX has no public name for it: what is private of JAX is used here and nowhere else.

    The host is the coordinator's: the one address of process 0 that all others have just reached. All processes join equally often.
    """

    _joins = itertools.count()

    def __init__(self) -> None:
        from jax._src import distributed  # late: nothing else here needs JAX

        state = distributed.global_state  # unlike `jax.process_count` it starts no devices
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
                f"process {self.index} was not told within {seconds:g} s where process 0 can be reached ({_status(error)}); see what "
                "process 0 says, and let all processes of a run join at the same place"
            ) from None


def _status(error: RuntimeError) -> str:
    """The first word of an error of JAX's."""
    return (str(error).splitlines() or [""])[0].partition(":")[0]


class Channel:
    """One process's end of the channel. A run of one process has no thread and no connection: the desk answers at once.

    Args:
        index: which process this is.
        count: how many there are.
        limits: how long a process may be silent.
        take: is given what process 0 says to all, and `{"lost": how, "at once": …}` for a process that this one sees no more, at once
            if it was process 0; called by the talking thread.
        beat: what this process says of itself; called once a beat by the talking thread.
    """

    def __init__(self, index: int, count: int, limits: Limits, take: Callable[[Message], None], beat: Callable[[], Beat]) -> None:
        self._index, self._count, self._limits, self._take, self._beat = index, count, limits, take, beat
        self._coordinator = Coordinator(count)  # of process 0 alone
        self._peers: dict[int, asyncio.StreamWriter] = {}  # process 0: all the others; any other: process 0
        self._talks: set[asyncio.Task[None]] = set()  # of process 0, one with each of the others
        self._silent: dict[int, int] = {}  # beats since each of them was heard
        self._ready: Future[None] = Future()  # what is posted earlier would be lost
        self._closing = asyncio.Event()
        self._thread: threading.Thread | None = None

    def open(self, store: Store, limit: float, secret: bytes | None = None) -> None:
        """Find the others and begin to talk; does not wait until all are there.

        Args:
            store: where process 0 leaves its address, and a token of this channel.
            limit: seconds to wait for that.
            secret: that all processes share. Without one whoever can read the store can join.

        Raises:
            InputError: process 0 cannot be reached, or has another secret.
            OSError: the talking thread cannot begin.
        """
        if self._index == 0:
            listener, token = _listen_at(store.host), secrets.token_hex(16)
            store.put(json.dumps([store.host, listener.getsockname()[1], token]))
            talk = self._serve(Door(listener, handshake.key(secret, token), _PURPOSE))
        else:
            host, port, token = _address(store.get(limit))
            connection = _connect_to(host, port, self._index, limit)
            _introduce(connection, handshake.key(secret, token), self._index, self._count, limit)
            talk = self._join(connection)
        # With a factory of its own the loop does not become the event loop of the caller's thread.
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = runner.get_loop()

        def run() -> None:
            try:
                with runner:
                    runner.run(talk)
            except BaseException as error:
                if self._ready.done():
                    raise
                self._ready.set_exception(error)

        self._thread = threading.Thread(target=run, name="jpipe-processes", daemon=True)
        self._thread.start()
        self._ready.result()

    def post(self, message: Message) -> None:
        """Send to process 0, from any thread of the caller."""
        if self._thread is None:
            self._send(message)
        else:
            self._loop.call_soon_threadsafe(self._send, message)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Let the talking thread, which asks for it, do something later; nothing where there is none."""
        if self._thread is not None:
            self._loop.call_later(seconds, action)

    def hang_up(self) -> None:
        """All are at the end; called by the talking thread."""
        self._closing.set()

    def join(self) -> None:
        """Wait until the talking thread has ended, after `hang_up`."""
        if self._thread is not None:
            self._thread.join()

    def be_last(self) -> None:
        """Return when all that talk to this process are gone; at once in any but process 0. A loss ends the process if they stay."""
        while self._index == 0 and self._peers:
            time.sleep(0.01)

    async def _serve(self, door: Door) -> None:
        """Process 0: let the others in, until all are here, and beat."""
        admitting = asyncio.create_task(self._admit(door))
        self._ready.set_result(None)
        try:
            await self._keep_beating()
        finally:
            admitting.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.grace):
                while self._peers:  # they hang up when they have read that all are at the end
                    await asyncio.sleep(0.005)

    async def _admit(self, door: Door) -> None:
        """Let each of the others in once; strangers are dropped, and counted."""
        absent = set(range(1, self._count))
        try:
            with door:
                while absent:
                    for caller in door.poll(0):
                        if caller.index in absent and caller.count == self._count:
                            absent.remove(caller.index)
                            self._talks.add(asyncio.create_task(self._talk_with(caller)))
                        else:
                            door.dropped["with a wrong number"] += 1
                            caller.link.close()
                    await asyncio.sleep(_LOOK)
        finally:
            if told := door.summary():
                os.write(2, f"jpipe: {told} while the processes joined\n".encode())

    async def _talk_with(self, caller: Caller) -> None:
        caller.answer("welcome")
        reader, writer = await asyncio.open_connection(sock=caller.link, limit=_LINE)
        self._peers[caller.index] = writer
        try:
            await self._listen(reader, caller.index)
        finally:
            del self._peers[caller.index]
            writer.close()

    async def _join(self, connection: socket.socket) -> None:
        """Any other process: listen and beat."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=_LINE)
        self._peers[0] = writer
        self._ready.set_result(None)
        listening = asyncio.create_task(self._listen(reader, 0))
        await self._keep_beating()
        writer.close()
        await listening

    async def _keep_beating(self) -> None:
        """Say what this process does, and count the beats since the others did: the time this one is stopped itself does not count."""
        while not self._closing.is_set():
            self._send({"beat": asdict(self._beat())})
            if self._index == 0:
                self._broadcast({})
            for peer in self._peers:
                self._silent[peer] = beats = self._silent.get(peer, 0) + 1
                if beats * self._limits.beat > self._limits.silence:
                    self._lose(f"process {peer} gave no sign of life for {self._limits.silence:.0f} s: it is stopped, or cut off")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._limits.beat)

    async def _listen(self, reader: asyncio.StreamReader, peer: int) -> None:
        with contextlib.suppress(OSError, ValueError):  # a reset, a line without end: an end like any other
            while (line := await reader.readline()).endswith(b"\n"):
                self._silent[peer] = 0
                if self._index == 0:
                    self._decide(peer, json.loads(line))
                else:
                    self._take(json.loads(line))
        if not self._closing.is_set():
            how = f"process {peer} disconnected unexpectedly: it was killed or crashed, see its own output"
            self._lose(how, at_once=peer == 0)

    def _send(self, message: Message) -> None:
        if self._index == 0:
            self._decide(0, message)
        elif 0 in self._peers:
            self._peers[0].write(_line(message))

    def _decide(self, sender: int, message: Message) -> None:
        answer = self._coordinator.answer(sender, message)
        if answer is not None:
            self._broadcast(answer)
            self._take(answer)

    def _lose(self, how: str, at_once: bool = False) -> None:
        if self._index == 0:
            self._broadcast({"lost": how})
        self._take({"lost": how, "at once": at_once})

    def _broadcast(self, message: Message) -> None:
        line = _line(message)
        for writer in self._peers.values():
            writer.write(line)


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _address(text: str) -> tuple[str, int, str]:
    """Host, port and token, as process 0 has left them; InputError for anything else, which is then no word of process 0's."""
    try:
        host, port, token = json.loads(text)
        if not (isinstance(host, str) and isinstance(token, str) and isinstance(port, int) and 0 < port < 65536):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        raise InputError(
            f"expected the address of process 0 in JAX's store, found {text[:80]!r}: somebody else has written there"
        ) from None
    return host, port, token


def _introduce(connection: socket.socket, key: bytes, index: int, count: int, limit: float) -> None:
    """Prove to process 0 that this one belongs to the run, and have it prove the same."""
    try:
        if handshake.call(connection, key, _PURPOSE, index, count, limit) is not None:
            connection.settimeout(None)
            return
        how = "it closes the connection; see what process 0 says"
    except TimeoutError:
        how = f"it does not answer within {limit:g} s; see what process 0 says"
    except handshake.UnknownHere:
        how = f"it has another secret; give all processes of the run the same {handshake.VARIABLE}, or none of them any"
    except handshake.NotOfThisRun:
        how = "somebody else answers there; start the run again, on a network that strangers cannot reach"
    connection.close()
    raise InputError(f"process {index} cannot join process 0: {how}")


def _listen_at(host: str) -> socket.socket:
    """A port at that address alone; at all addresses where the others know this host by one that is not its own.

    The same where the name is a loopback address in this host only: Debian has 127.0.1.1 for the host's own name.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        hidden = _is_loopback(str(address[0])) and host != "localhost" and not _is_loopback(host)
        listener = _listen_everywhere() if hidden else socket.create_server(address[:2], family=family)
    except OSError:
        listener = _listen_everywhere()
    # For its connections, which asyncio overlooks: else a line waits 40 ms for the acknowledgement of the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _listen_everywhere() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _is_loopback(host: str) -> bool:
    """Whether that is an address, no name, which only this host can reach."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _connect_to(host: str, port: int, index: int, limit: float) -> socket.socket:
    try:
        return socket.create_connection((host, port), timeout=limit)
    except OSError as error:
        raise InputError(
            f"process {index} cannot reach process 0 at {host}, port {port}: {error.strerror or error}; "
            "let the processes of a run connect to each other at any port (a firewall may forbid it)"
        ) from None
