"""The processes of one run: they agree before they start, broadcast numbers, and notice who died, hangs or stopped.

Nothing here knows of pipelines, and no arrays pass.
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
from jpipe.processes._channel import LONGEST_LINE, Channel, Limits
from jpipe.processes._coordinator import END, Message
from jpipe.processes._rendezvous import JaxStore, Rendezvous
from jpipe.processes._waits import Wait, Waits

_MAX_UNREAD = 65536  # unread messages; beyond that the oldest are dropped
_BLAME_SECONDS = 20.0  # after a failure: by then it is known whether the death of another process caused it


class Processes:
    """All processes of a run, as one of them sees them; created by `join`. After a loss no process continues.

    A process that is stuck when the run is lost, in a collective say, is ended after `Limits.grace` with exit code 1 and the message
    of `PeerLost` on standard error. When process 0 dies this is done at once: JAX aborts the other processes 50 ms after its coordinator
    ended.

    Attributes:
        index: the index of this process.
        count: the number of processes. A single one waits for nothing and is not watched.
    """

    def __init__(self, index: int, count: int, limits: Limits, progress: Callable[[], int] = lambda: 0) -> None:
        self.index, self.count, self._limits = index, count, limits
        self._waits = Waits(limits.beat, progress)
        self._changed = threading.Condition()  # guards the three below
        self._arrived: dict[tuple[str, str], Any] = {}  # unread messages by name, and answers by the place of a meeting
        self._lost: InputError | PeerLost | None = None  # how the run was lost: all waits raise it
        self._failed: BaseException | None = None  # of a thread that nobody awaits
        self._closed = False
        self._has_left = False  # whether the caller knows how the run ended, and says so itself
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
        """Join the processes of this run; all call it, best before anything else, and return when all have.

        Args:
            limit: seconds to wait for the other processes.
            limits: how long silence and waits may last; the same in all processes.
            rendezvous: where the processes find each other; by default the store of `jax.distributed`, which is initialized.
            progress: returns a number that grows while this process exchanges data with others: waits may then last longer.
            secret: that all processes share, to recognize each other by.

        Raises:
            InputError: process 0 cannot be reached, or has another secret; processes did not join in time, and are named.
        """
        rendezvous = JaxStore() if rendezvous is None else rendezvous
        processes = cls(rendezvous.index, rendezvous.count, Limits() if limits is None else limits, progress)
        if processes.count > 1:
            processes._channel.open(rendezvous, limit, secret)
        return processes

    def agree(self, facts: Mapping[str, str], limit: float = 600.0) -> None:
        """Check that all processes state the same facts; all call it.

        Args:
            facts: what has to be the same, by name: the text of the config, the plan, versions.
            limit: seconds to wait for the other processes.

        Raises:
            InputError: in every process, if any fact differs: names it, the processes, and where the texts part.
            PeerLost: the run is lost, or a process did not come in time.
        """
        differences = self._meet("agreement", dict(facts), "all processes to agree", limit)
        if differences:
            raise InputError(*differences)

    def barrier(self, name: str, limit: float = 600.0) -> None:
        """Wait until all processes have arrived.

        Args:
            name: the name of the place, the same in all processes.
            limit: seconds to wait for the other processes.

        Raises:
            PeerLost: the run is lost, or a process did not come in time.
        """
        self._meet(f"barrier {name}", {}, f"all processes to reach '{name}'", limit)

    def compare(self, name: str, facts: Mapping[str, str], hint: str) -> None:
        """Compare facts with the other processes', without waiting for them; all call it, sooner or later.

        Where a fact differs, the run is lost: every wait of every process raises `InputError`, which names the processes that differ from
        most others.

        Args:
            name: the name of the comparison, the same in all processes and unique in a run.
            facts: what has to be the same, by name. A process that does not know a fact leaves it empty.
            hint: what to change where a fact differs.
        """
        self._channel.post({"compare": name, "facts": dict(facts), "hint": hint})

    def broadcast(self, name: str, data: bytes) -> None:
        """Send bytes to all processes, including this one, without waiting.

        Args:
            name: under which to ask for them; broadcast once in a run, by one process.
            data: at most 48 MiB.
        """
        self._waits.moved()
        text = base64.b64encode(data).decode()
        assert len(text) < LONGEST_LINE - 1000, f"{name}: {len(data)} bytes are too many for a message"
        self._channel.post({"broadcast": name, "data": text})

    def receive(self, name: str, on: int | None = None, what: object = None) -> bytes:
        """Wait for bytes that a process broadcasts. They can be read once; the last 65,536 unread ones are kept.

        Args:
            name: under which they are broadcast.
            on: the process that broadcasts them, where known: to be named if they do not come.
            what: a description of them; by default their name.

        Raises:
            PeerLost: the run is lost.
        """
        with self.waiting(name if what is None else what, on):
            return self._await("message", name)

    def has_message(self, name: str) -> bool:
        """Return whether unread bytes have come from a process, without waiting.

        Args:
            name: under which they are broadcast; where none are read, several processes may do so, and more than once.
        """
        return ("message", name) in self._arrived

    def gather(self, name: str, data: bytes, what: object = None) -> list[bytes]:
        """Return what each process passes, by process; all call it.

        Args:
            name: of these bytes, the same in all processes and unique in a run.
            data: of this process.
            what: a description of them; by default their name.

        Raises:
            PeerLost: the run is lost.
        """
        self.broadcast(f"{name} of process {self.index}", data)
        return [self.receive(f"{name} of process {k}", k, what) for k in range(self.count)]

    @contextlib.contextmanager
    def waiting(self, what: object, on: int | Sequence[int] | None = None, limit: float | None = None) -> Iterator[None]:
        """Record that this thread waits, so that a wait without end is detected. Costs about a microsecond, and no message.

        Use it around long work of this process alone, such as writing a file, with a longer `limit`: the other processes wait for it that
        long.

        Args:
            what: a description of the wait, converted to text when needed.
            on: the process or processes waited for, where they are known.
            limit: seconds after which the run is lost; by default `Limits.wait`.

        Raises:
            PeerLost: what was waited for failed because the run is lost: some collectives raise when a process of theirs dies.
        """
        awaited = () if on is None else (on,) if isinstance(on, int) else tuple(on)
        outer = self._waits.begin(Wait(what, awaited, self._limits.wait if limit is None else limit))
        try:
            yield
            self._waits.moved()
        except Exception as error:  # the channel learns of a death behind it at about the same time
            if self.count > 1 and self._is_lost_within(1.0):
                self._check_lost(error)
            raise
        finally:
            self._waits.end(outer)

    def check(self) -> None:
        """Return unless the run is lost, or a thread has failed (see `fail`); for loops that wait in Python.

        Raises:
            PeerLost: the run is lost.
            InputError: the run is lost because the user's arguments differ between processes.
        """
        self._check_lost(None)
        if self._failed is not None:
            raise self._failed

    def still(self) -> float:
        """Return the seconds since the last progress in any process, as process 0 knows: an array, a finished wait, an instruction."""
        return self._channel.coordinator.still()

    def finished(self) -> set[int]:
        """Return the processes that have called `close`, as process 0 knows; they send nothing more."""
        return self._channel.coordinator.finished()

    def fail(self, error: BaseException) -> None:
        """Report that an unawaited thread of this process failed: the waits of all other threads raise the first such error.

        Returns when they do so, or when the run is lost: the cause is mostly a death that is known soon.

        Args:
            error: the error of the thread.
        """
        if not self._is_lost_within(_BLAME_SECONDS):
            with self._changed:
                self._failed = self._failed or error
                self._changed.notify_all()

    def stop(self, reason: str) -> None:
        """Give up and end this process: all other processes raise `PeerLost` with its reason.

        Args:
            reason: completes "process 0 stopped: ".
        """
        self._has_left = True
        self._channel.post({"stop": reason})
        self._is_lost_within(self._limits.grace)  # what comes back has gone to all

    def close(self, leave: Callable[[], None] = lambda: None, limit: float = 10.0) -> None:
        """Leave the run when all processes have arrived; later the end of a process is no loss. Calling it again does nothing.

        Process 0 goes last. After a loss: the caller has reported how the run ended, and ends by itself. JAX waits at its exit for
        processes that never come, so this one is still ended, now without a message, when `Limits.grace` is over.

        Args:
            leave: what else ends the connections of this process with the others.
            limit: seconds that process 0 waits for the others to do so.

        Raises:
            PeerLost: a process was lost before all were here.
        """
        error: Exception | None = None
        if self._lost is None and not self._has_left:
            try:
                self._meet(END, {}, "all processes to finish", 600.0)
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
        """Leave the run when Python exits, or report the exception to the other processes; for `atexit`. After `close` it does nothing.

        After a loss the process ends here with exit code 1: what JAX does at its exit would wait for those that are lost.
        """
        if self._has_left and self._lost is None:
            return
        error, reported = getattr(sys, "last_value", None), self._has_left  # Python leaves there what nobody caught, once it is printed
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

    def _meet(self, place: str, facts: dict[str, str], what: str, limit: float) -> list[str]:
        with self.waiting(what, limit=limit):
            self._channel.post({"meet": place, "facts": facts})
            return self._await("answer", place)

    def _await(self, kind: str, name: str) -> Any:
        """Wait for something that arrives, and remove it; raise as `check`."""
        key = kind, name
        with self._changed:
            self._changed.wait_for(lambda: key in self._arrived or self._lost is not None or self._failed is not None)
            if key not in self._arrived:
                self.check()
            return self._arrived.pop(key)

    def _check_lost(self, cause: Exception | None) -> None:
        if self._lost is not None:
            raise type(self._lost)(*self._lost.args) from cause  # a new one, for several threads raise it

    def _is_lost_within(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._lost is not None, timeout=seconds)

    # Called by the channel's thread.

    def _take(self, message: Message) -> None:
        """Handle a message of process 0 to all, or an event of this process."""
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
                self._lose(self._lost or PeerLost(self._what_is_lost(how)), at_once=message.get("at once", False))

    def _put(self, kind: str, name: str, value: Any) -> None:
        with self._changed:
            self._arrived[kind, name] = value
            if len(self._arrived) > _MAX_UNREAD:  # but never an answer: somebody waits for it
                del self._arrived[next(key for key in self._arrived if key[0] == "message")]
            self._changed.notify_all()

    def _lose(self, lost: InputError | PeerLost, *, at_once: bool = False) -> None:
        if at_once:  # before a thread of the caller learns of it
            self._end(lost)
        if self._lost is None:
            # Process 0 goes last, for JAX aborts the other processes when its coordinator ends.
            self._channel.later(self._limits.grace + (self.index == 0), lambda: self._end(lost))
            with self._changed:
                self._lost = lost
                self._changed.notify_all()

    def _what_is_lost(self, how: str) -> str:
        """Describe in one line how the run was lost, and what this process was waiting for."""
        wait = self._waits.longest()
        return _printable(f"{how}; process {self.index} stops" + (f" while waiting for {wait}" if wait is not None else ""))

    def _end(self, lost: Exception) -> None:
        """End this process whatever its threads are stuck in: a pending collective never raises, and JAX's exit waits for the lost."""
        if not self._has_left:
            os.write(2, f"jpipe: {lost}\n".encode())
        os._exit(1)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
