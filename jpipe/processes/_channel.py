"""The channel between the processes of a run: a star of connections, lines of JSON, one thread per process.

Process 0 listens, the other processes connect. What a process posts goes to process 0, where the `Coordinator` answers to all. The
channel's thread keeps listening and sending heartbeats while the main thread is stuck in a collective, which by itself never raises. No
arrays pass here. Who connects proves that it belongs to the run (`jpipe.processes.handshake`).
"""

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass

from jpipe.processes._coordinator import Beat, Coordinator, Message
from jpipe.processes._rendezvous import Store, connect_to_first, listen_for_processes
from jpipe.processes.handshake import Caller, Door

_LOOK = 0.01  # seconds between two polls of the door
_LINE = 2**24  # bytes of the longest line; configs and plans travel in one


@dataclass(frozen=True)
class Limits:
    """The time limits of a run before a silent or awaited process counts as lost; in all less than a minute.

    Where all processes meet (`agree`, `barrier`, `close`) they wait ten minutes, because one may compile that long; a death is
    noticed at once there, too.

    Attributes:
        silence: seconds without a heartbeat of a process; a main thread may hold Python's lock that long.
        wait: seconds that one wait inside `Processes.waiting` may last while no process progresses.
        grace: seconds from the loss of the run until a process that has not ended by itself is ended.
    """

    silence: float = 30.0
    wait: float = 45.0
    grace: float = 5.0

    @property
    def beat(self) -> float:
        """Seconds between two heartbeats."""
        return min(1.0, self.silence / 10, self.wait / 10)


class Channel:
    """One process's end of the channel. A run of one process has no thread and no connection: the coordinator answers at once.

    Args:
        index: the index of this process.
        count: the number of processes.
        limits: how long a process may be silent.
        take: handles the messages of process 0 to all, and `{"lost": how, "at once": …}` for a process that has lost its connection, at
            once if it is process 0; called by the channel's thread.
        beat: returns the heartbeat of this process; called once per beat by the channel's thread.
    """

    def __init__(self, index: int, count: int, limits: Limits, take: Callable[[Message], None], beat: Callable[[], Beat]) -> None:
        self._index, self._count, self._limits, self._take, self._beat = index, count, limits, take, beat
        self.coordinator = Coordinator(count)  # of process 0 alone
        self._peers: dict[int, asyncio.StreamWriter] = {}  # in process 0: all other processes; elsewhere: process 0
        self._talks: set[asyncio.Task[None]] = set()  # of process 0, one with each other process
        self._silent: dict[int, int] = {}  # beats since the last message of each of them
        self._ready: Future[None] = Future()  # messages posted earlier would be lost
        self._closing = asyncio.Event()
        self._thread: threading.Thread | None = None

    def open(self, store: Store, limit: float, secret: bytes | None = None) -> None:
        """Find the other processes and start the thread, without waiting until all have joined.

        Args:
            store: where process 0 leaves its address, and a token of this channel.
            limit: seconds to wait for that.
            secret: that all processes share. Without one, anybody who can read the store can join.

        Raises:
            InputError: process 0 cannot be reached, or has another secret.
            OSError: the thread cannot start.
        """
        if self._index == 0:
            talk = self._serve(listen_for_processes(store, secret))
        else:
            talk = self._join(connect_to_first(store, limit, secret))
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
        """Send a message to process 0, from any thread of the caller."""
        if self._thread is None:
            self._send(message)
        else:
            self._loop.call_soon_threadsafe(self._send, message)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call a function later in the channel's thread, which calls this; do nothing in a run of one process."""
        if self._thread is not None:
            self._loop.call_later(seconds, action)

    def hang_up(self) -> None:
        """Close the channel when all have finished; the channel's thread calls this."""
        self._closing.set()

    def join(self) -> None:
        """Wait until the channel's thread has ended, after `hang_up`."""
        if self._thread is not None:
            self._thread.join()

    def be_last(self) -> None:
        """Return when all connections to process 0 are closed, at once elsewhere. After a loss end the process if they stay open."""
        while self._index == 0 and self._peers:
            time.sleep(0.01)

    async def _serve(self, door: Door) -> None:
        """Admit the other processes in process 0 until all have joined, and send heartbeats."""
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
        """Admit each other process once; drop and count strangers."""
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
            if summary := door.summary():
                os.write(2, f"jpipe: {summary} while the processes joined\n".encode())

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
        """Listen and send heartbeats, in any process but process 0."""
        reader, writer = await asyncio.open_connection(sock=connection, limit=_LINE)
        self._peers[0] = writer
        self._ready.set_result(None)
        listening = asyncio.create_task(self._listen(reader, 0))
        await self._keep_beating()
        writer.close()
        await listening

    async def _keep_beating(self) -> None:
        """Send heartbeats and count missed ones; ignore the time in which this process was suspended."""
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
        answer = self.coordinator.answer(sender, message)
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
