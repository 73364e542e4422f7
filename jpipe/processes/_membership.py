"""The processes of one run: they compare facts before they start, broadcast bytes, and notice which process died, hangs or stopped.

This module does not depend on pipelines, and sends no arrays.
"""

import base64
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jpipe.errors import InputError, PeerLost
from jpipe.processes._channel import Channel, Limits
from jpipe.processes._coordinator import END, Message
from jpipe.processes._rendezvous import Rendezvous
from jpipe.processes._waits import Wait, Waits

_MEETING_LIMIT = 600.0  # seconds that processes wait for each other, because one of them may compile for so long
_MAX_UNREAD = 65536  # unread messages; if there are more, the oldest are dropped
_BLAME_SECONDS = 20.0  # seconds after which it is known whether another process's death has caused a failure


class Processes:
    """All processes of a run, as seen by one process; `join` creates it. If a process is lost, the run is lost: all processes end.

    A process that is stuck, for example in a collective, when the run is lost, is ended after `Limits.grace` with exit code 1 and the
    message of `PeerLost` on standard error. If process 0 dies, the others are ended at once, because JAX aborts them 50 ms later.

    Attributes:
        index: the index of this process.
        count: the number of processes. A single process waits for nothing and is not watched.
    """

    def __init__(self, index: int, count: int, limits: Limits, progress: Callable[[], int] = lambda: 0) -> None:
        self.index, self.count, self._limits = index, count, limits
        self._waits = Waits(limits.beat, progress)
        self._changed = threading.Condition()  # guards the next three attributes
        self._arrived: dict[tuple[str, str], Any] = {}  # unread messages by name, and answers by the place of a meeting
        self._lost: InputError | PeerLost | None = None  # how the run was lost; all waits raise it
        self._failed: BaseException | None = None  # the error of a thread that nobody awaits
        self._closed = False
        self._has_left = False  # whether the caller knows how the run ended, and reports it
        self._channel = Channel(index, count, limits, self._take, self._waits.beat)

    @classmethod
    def join(
        cls,
        *,
        limit: float = 300.0,
        limits: Limits | None = None,
        rendezvous: Rendezvous | None = None,
        progress: Callable[[], int] = lambda: 0,
        secret: bytes | None = None,
    ) -> "Processes":
        """Join the processes of this run; arguments and errors are as for `jpipe.join_processes`, which calls this.

        Args:
            limit: seconds to wait for the other processes.
            limits: how long silence and waits may last; the same in all processes.
            rendezvous: where the processes find each other; by default the store of `jax.distributed`, which must be initialized.
            progress: returns a number that grows while this process exchanges data with others. While it grows, waits may last longer.
            secret: the secret by which the processes of the run recognize each other.
        """
        rendezvous = Rendezvous.of_jax() if rendezvous is None else rendezvous
        processes = cls(rendezvous.index, rendezvous.count, Limits() if limits is None else limits, progress)
        if processes.count > 1:
            processes._channel.open(rendezvous, limit, secret)
        return processes

    def agree(self, facts: Mapping[str, str]) -> None:
        """Check that all processes state the same facts; all processes call this.

        Args:
            facts: texts that must be the same in all processes, by name, such as the config, the plan and versions.

        Raises:
            InputError: a fact differs. Every process raises it; the message names the fact and the processes, and quotes the difference.
            PeerLost: the run is lost, or a process did not come within ten minutes.
        """
        if differences := self._meet("agreement", dict(facts), "all processes to agree"):
            raise InputError(*differences)

    def barrier(self, name: str) -> None:
        """Wait until all processes have arrived at the place of this name.

        Raises:
            PeerLost: the run is lost, or a process did not come within ten minutes.
        """
        self._meet(f"barrier {name}", {}, f"all processes to reach '{name}'")

    def compare(self, name: str, facts: Mapping[str, str], hint: str) -> None:
        """Compare facts between all processes, without waiting for them. All processes must call this at some time.

        If a fact differs, the run is lost: every wait of every process raises `InputError`, which names the processes that differ from most
        others.

        Args:
            name: the name of the comparison, the same in all processes and unique in a run.
            facts: texts that must be the same in all processes, by name. A process that does not know a fact passes an empty text.
            hint: the advice in the message if a fact differs.
        """
        self._channel.post({"meet": name, "facts": dict(facts), "hint": hint})

    def broadcast(self, name: str, data: bytes) -> None:
        """Send bytes to all processes, including this one, without waiting.

        Args:
            name: the name for `receive`. Only one process may broadcast under this name, once in a run.
            data: the bytes, at most 3 GiB.
        """
        self._waits.moved()
        self._channel.post({"broadcast": name, "data": base64.b64encode(data).decode()})

    def receive(self, name: str, on: int | None = None, what: object = None) -> bytes:
        """Wait for the bytes that a process broadcasts under a name. They can be read once. At most 65,536 unread messages are kept.

        Args:
            name: the name under which the bytes are broadcast.
            on: the process that broadcasts them, if known; it is named if they do not arrive.
            what: a description of the bytes for messages; by default `name`.

        Raises:
            PeerLost: the run is lost.
        """
        with self.waiting(name if what is None else what, on):
            return self._await("message", name)

    def has_message(self, name: str) -> bool:
        """Return whether unread bytes have arrived under a name, without waiting.

        If nobody reads them, several processes may broadcast under this name, repeatedly.
        """
        return ("message", name) in self._arrived

    def gather(self, name: str, data: bytes, what: object = None) -> list[bytes]:
        """Return the bytes that each process passes, in the order of the processes; all processes call this.

        Args:
            name: the name of these bytes, the same in all processes and unique in a run.
            data: the bytes of this process.
            what: a description of the bytes for messages; by default `name`.

        Raises:
            PeerLost: the run is lost.
        """
        self.broadcast(f"{name} of process {self.index}", data)
        return [self.receive(f"{name} of process {k}", k, what) for k in range(self.count)]

    @contextlib.contextmanager
    def waiting(self, what: object, on: int | Sequence[int] | None = None, limit: float | None = None) -> Iterator[None]:
        """Record that this thread waits, so that a wait without end is detected. It takes about a microsecond and sends no message.

        Also use it, with a longer `limit`, around long work of this process alone, such as writing a file: the other processes then wait
        for this process until that limit.

        Args:
            what: a description of the wait, converted to text when needed.
            on: the process or processes for which the thread waits, if they are known.
            limit: seconds after which the run is lost; by default `Limits.wait`.

        Raises:
            PeerLost: the block in the context failed because the run is lost; some collectives raise when one of their processes dies.
        """
        awaited = () if on is None else (on,) if isinstance(on, int) else tuple(on)
        outer = self._waits.begin(Wait(what, awaited, self._limits.wait if limit is None else limit))
        try:
            yield
            self._waits.moved()
        except Exception as error:  # if a death caused it, the channel learns of the death at about the same time
            if self.count > 1 and self._is_lost_within(1.0):
                self._check_lost(error)
            raise
        finally:
            self._waits.end(outer)

    def check(self) -> None:
        """Raise an error if the run is lost or a thread has failed (see `fail`). Call this in loops that wait in Python.

        Raises:
            PeerLost: the run is lost.
            InputError: the run is lost because the user's arguments differ between processes.
        """
        self._check_lost(None)
        if self._failed is not None:
            raise self._failed

    def still(self) -> float:
        """In process 0, return the seconds since the last progress in any process: an array, a finished wait or an instruction."""
        return self._channel.coordinator.still()

    def finished(self) -> set[int]:
        """In process 0, return the processes that have called `close`; they send no further messages."""
        return self._channel.coordinator.finished()

    def fail(self, error: BaseException) -> None:
        """Report the error of a thread that nobody waits for. The waits of all other threads of this process raise the first such error.

        It first waits some seconds to see whether the run is lost, because another process's death is often the cause; then waits raise
        that.
        """
        if not self._is_lost_within(_BLAME_SECONDS):
            with self._changed:
                self._failed = self._failed or error
                self._changed.notify_all()

    def stop(self, reason: str) -> None:
        """Announce that this process gives up and ends. All other processes raise `PeerLost`: "process 0 stopped: " and the reason."""
        self._has_left = True
        self._channel.post({"stop": reason})
        self._is_lost_within(self._limits.grace)  # when process 0's answer is back, it has gone to all

    def close(self, leave: Callable[[], None] = lambda: None, limit: float = 10.0) -> None:
        """Wait until all processes call this, and leave the run. After that the end of a process is no loss. A second call does nothing.

        Process 0 leaves last. Also call this after a loss, once it is reported: then, if the process has not ended by itself within
        `Limits.grace`, because JAX waits at its exit for lost processes, it is ended without a message.

        Args:
            leave: a function that closes this process's other connections.
            limit: seconds that process 0 waits for the others to disconnect.

        Raises:
            PeerLost: a process was lost before all had called this.
        """
        error: Exception | None = None
        if self._lost is None and not self._has_left:
            try:
                self._meet(END, {}, "all processes to finish")
            except (InputError, PeerLost) as lost:
                error = lost
        self._has_left = error is None
        if not self._closed:
            self._closed = True
            self._channel.be_last(limit)
            leave()
            if self._lost is None:
                self._channel.hang_up()
        sys.stdout.flush()
        if error is not None:
            raise error

    def end(self) -> None:
        """For `atexit`: leave the run, or report the uncaught exception to the other processes. After `close` it does nothing.

        After a loss it ends the process with exit code 1, because the exit functions of JAX would wait for the lost processes.
        """
        if self._has_left and self._lost is None:
            return
        error, reported = getattr(sys, "last_value", None), self._has_left  # the uncaught exception, which Python has printed
        try:
            if error is not None:
                raise error
            self.close()
            if self._lost is None:
                return
        except BaseException as failure:
            reported = reported or failure is error
            if self._lost is None:
                self.stop(traceback.format_exception_only(failure)[-1].strip())
        self._has_left = True
        if not reported:
            os.write(2, f"jpipe: {self._lost}\n".encode())
        sys.stdout.flush()
        sys.stderr.flush()
        self._channel.be_last()
        os._exit(1)

    def _meet(self, place: str, facts: dict[str, str], what: str) -> list[str]:
        with self.waiting(what, limit=_MEETING_LIMIT):
            self._channel.post({"meet": place, "facts": facts})
            return self._await("answer", place)

    def _await(self, kind: str, name: str) -> Any:
        """Wait until a message or an answer has arrived, remove it and return it; raise errors as `check` does."""
        key = kind, name
        with self._changed:
            self._changed.wait_for(lambda: key in self._arrived or self._lost is not None or self._failed is not None)
            if key not in self._arrived:
                self.check()
            return self._arrived.pop(key)

    def _check_lost(self, cause: Exception | None) -> None:
        if self._lost is not None:
            raise type(self._lost)(*self._lost.args) from cause  # a new exception, because several threads raise it

    def _is_lost_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._lost is not None, timeout=seconds)

    # Called by the channel's thread.

    def _take(self, message: Message) -> None:
        """Handle a message from process 0 to all processes, or the loss of a connection."""
        match message:
            case {"met": place, "differences": differences}:
                if place == END:
                    self._channel.part()
                self._put("answer", place, differences)
            case {"broadcast": name, "data": data}:
                self._put("message", name, base64.b64decode(data))
            case {"refused": why}:
                self._lose(InputError(_printable(why)))
            case {"lost": how}:
                wait = self._waits.longest()
                waits = "" if wait is None else f" while waiting for {wait}"
                lost = self._lost or PeerLost(_printable(f"{how}; process {self.index} stops{waits}"))
                self._lose(lost, at_once=message.get("at once", False))

    def _put(self, kind: str, name: str, value: Any) -> None:
        with self._changed:
            self._arrived[kind, name] = value
            if len(self._arrived) > _MAX_UNREAD:  # but never an answer, because somebody waits for it
                del self._arrived[next(key for key in self._arrived if key[0] == "message")]
            self._changed.notify_all()

    def _lose(self, lost: InputError | PeerLost, *, at_once: bool = False) -> None:
        if at_once:  # before any of the caller's threads notices the loss
            self._end(lost)
        if self._lost is None:
            # Process 0 ends last, because JAX aborts the other processes when its coordinator ends.
            self._channel.later(self._limits.grace + (self.index == 0), lambda: self._end(lost))
            with self._changed:
                self._lost = lost
                self._changed.notify_all()

    def _end(self, lost: Exception) -> None:
        """End this process at once: its threads may be stuck in collectives, and JAX's exit would wait for lost processes."""
        if not self._has_left:
            os.write(2, f"jpipe: {lost}\n".encode())
        os._exit(1)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
