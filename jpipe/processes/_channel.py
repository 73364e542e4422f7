"""The channel between the processes of a run. Each process connects to process 0, has one thread, and sends messages in JSON.

Process 0 listens, the other processes connect. A process posts its messages to process 0, where the `Coordinator` answers to all processes.
A main thread can be stuck in a collective, which never raises by itself; the channel's thread still listens and sends heartbeats. The
channel carries no arrays. Each end proves that it belongs to the run (`jpipe.processes.handshake`).
"""

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass

from jpipe.processes._coordinator import Beat, Coordinator, Message
from jpipe.processes._rendezvous import Host, Rendezvous, connect

_HEAD = 4  # bytes before a message, with its length


@dataclass(frozen=True)
class Limits:
    """How long a process may be silent, or let others wait, before it counts as lost: in all less than a minute.

    In `agree`, `barrier` and `close`, processes wait ten minutes for each other, because one of them may compile that long. Even there, the
    death of a process is noticed at once.
    """

    silence: float = 30.0  # seconds without a heartbeat that are allowed, because a main thread may hold Python's lock that long
    wait: float = 45.0  # seconds that one wait inside `Processes.waiting` may last while no process makes progress
    grace: float = 5.0  # seconds from the loss of the run until processes that have not ended by themselves are ended

    @property
    def beat(self) -> float:
        """Seconds between two heartbeats."""
        return min(1.0, self.silence / 10, self.wait / 10)


class Channel:
    """One process's end of the channel. A run of one process has no thread and no connection: the coordinator answers at once.

    The channel's thread calls `take` with each message of process 0 to all processes, and with `{"lost": how, "at once": …}` if a
    connection is lost; "at once" says whether process 0 is lost. It calls `beat` for each heartbeat.
    """

    def __init__(self, index: int, count: int, limits: Limits, take: Callable[[Message], None], beat: Callable[[], Beat]) -> None:
        self._index, self._limits, self._take, self._beat = index, limits, take, beat
        self.coordinator = Coordinator(count)  # used in process 0 only
        self._peers: dict[int, asyncio.StreamWriter] = {}  # in process 0: for all other processes; elsewhere: for process 0
        self._silent: dict[int, int] = {}  # by process, the beats since its last message
        self._ready: Future[None] = Future()  # messages posted earlier would be lost
        self._parting = False
        self._closing = asyncio.Event()
        self._thread: threading.Thread | None = None

    def open(self, rendezvous: Rendezvous, limit: float, secret: bytes | None = None) -> None:
        """Start the thread, and return when all processes have connected to process 0, within `limit` seconds; errors as in `Host`."""

        def run() -> None:
            try:
                asyncio.run(self._run(rendezvous, limit, secret))
            except BaseException as error:
                if self._ready.done():
                    raise
                self._ready.set_exception(error)

        self._thread = threading.Thread(target=run, name="jpipe-processes", daemon=True)
        self._thread.start()
        self._ready.result()

    def post(self, message: Message) -> None:
        """Send a message to process 0. Any thread may call this."""
        if self._thread is None:
            self._send(message)
        else:
            self._loop.call_soon_threadsafe(self._send, message)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call a function later in the channel's thread, the only caller of `later`. In a run of one process it does nothing."""
        if self._thread is not None:
            self._loop.call_later(seconds, action)

    def part(self) -> None:
        """From now on, disconnections are no loss. The channel's thread calls this when all processes have finished."""
        self._parting = True

    def hang_up(self) -> None:
        """Close the connections, and wait until the channel's thread has ended."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    def be_last(self, limit: float = math.inf) -> None:
        """In process 0, wait until all other processes have disconnected, for `limit` seconds at most. Elsewhere return at once."""
        end = time.monotonic() + limit
        while self._index == 0 and self._peers and time.monotonic() < end:
            time.sleep(0.005)

    async def _run(self, rendezvous: Rendezvous, limit: float, secret: bytes | None) -> None:
        """Connect to process 0, or in process 0 accept all other processes; then send heartbeats until the end."""
        self._loop, callers = asyncio.get_running_loop(), []
        if self._index == 0:
            callers = await Host(rendezvous, secret).gathered(limit)
            streams = {caller.index: (caller.reader, caller.writer) for caller in callers}
        else:
            rendezvous.find(limit)
            streams = {0: await connect(rendezvous, limit, secret)}
            await self._loop.shutdown_default_executor()  # its thread has looked up the name of a host
        talks = []
        for peer, (reader, writer) in streams.items():
            # Otherwise a message waits 40 ms for an acknowledgement. asyncio sets it for one end only.
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[peer] = writer
            talks.append(asyncio.create_task(self._listen(reader, peer)))
        for caller in callers:  # not earlier, because the answer to a message goes to all
            caller.answer("go")
        self._ready.set_result(None)
        await self._keep_beating()
        for writer in self._peers.values():
            writer.close()
        await asyncio.gather(*talks)

    async def _keep_beating(self) -> None:
        """Send heartbeats, and count the missing heartbeats of others. Time in which this process was suspended does not count."""
        while not self._closing.is_set():
            self._send({"beat": asdict(self._beat())})
            if self._index == 0:
                self._broadcast({})
            for peer in self._peers:
                self._silent[peer] = beats = self._silent.get(peer, 0) + 1
                if beats * self._limits.beat > self._limits.silence and not self._parting:
                    self._lose(
                        f"process {peer} gave no sign of life for {self._limits.silence:.0f} s: it is suspended, or its network is cut off"
                    )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._limits.beat)

    async def _listen(self, reader: asyncio.StreamReader, peer: int) -> None:
        """Handle the messages of a process until its connection ends."""
        with contextlib.suppress(OSError, EOFError, ValueError):  # a reset, or what is no message, also ends a connection
            while True:
                message = json.loads(await reader.readexactly(int.from_bytes(await reader.readexactly(_HEAD))))
                self._silent[peer] = 0
                if self._index == 0:
                    self._decide(peer, message)
                else:
                    self._take(message)
        if not self._parting:
            how = f"process {peer} disconnected unexpectedly: it was killed or crashed, see its own output"
            self._lose(how, at_once=peer == 0)
        self._peers.pop(peer).close()

    def _send(self, message: Message) -> None:
        if self._index == 0:
            self._decide(0, message)
        elif 0 in self._peers:
            self._peers[0].write(_framed(message))

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
        data = _framed(message)
        for writer in self._peers.values():
            writer.write(data)


def _framed(message: Message) -> bytes:
    text = json.dumps(message).encode()
    return len(text).to_bytes(_HEAD) + text
