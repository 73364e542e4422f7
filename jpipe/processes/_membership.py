"""The processes of one run: they agree before they start, tell each other numbers, and notice who died, hangs or stopped.

Nothing here knows of pipelines, and no arrays pass.
"""

import contextlib
import os
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence

from jpipe.errors import InputError
from jpipe.processes._channel import Channel, JaxStore, Limits, Store
from jpipe.processes._coordinator import Beat, Message
from jpipe.processes._main_thread import main_thread_calls

_NUMBERS = 65536  # that wait to be read; where nobody reads them the oldest go
_END = "the end"  # where all meet last
_BLAME_SECONDS = 20.0  # in which a death is heard of that made something fail here


class PeerLost(RuntimeError):
    """A process of the run died, hung or stopped: the message names it, how, and what this process was waiting for, in one line."""


class _Wait:
    """A wait of a thread. Its length is counted in beats: the time this process itself is stopped does not count."""

    __slots__ = ("beats", "limit", "on", "what")

    def __init__(self, what: object, on: tuple[int, ...], limit: float) -> None:
        self.what, self.on, self.limit, self.beats = what, on, limit, 0

    def __str__(self) -> str:
        who = f" of process{'es' if len(self.on) > 1 else ''} {', '.join(map(str, self.on))}" if self.on else ""
        return f"{self.what}{who}"


class Processes:
    """All processes of a run, as one of them sees them; made by `join`. After a loss none of them goes on.

    A process that is stuck when the run is lost, in a collective say, is ended after `Limits.grace` with exit code 1 and the message
    of `PeerLost` on standard error. When process 0 dies this is done at once: JAX aborts the others 50 ms after its coordinator ended.

    Attributes:
        index: which process this is.
        count: how many there are. With one there is nothing to wait for and nothing is watched.
    """

    def __init__(self, index: int, count: int, limits: Limits, progress: Callable[[], int] = lambda: 0) -> None:
        self.index, self.count, self._limits = index, count, limits
        self._progress, self._seen, self._still = progress, 0, 0  # beats since it was seen to grow
        self._calls = 0  # what was told, and waits that are over: progress, too
        self._changed = threading.Condition()  # guards the next four, which threads of the caller wait for
        self._lost: str | None = None
        self._failed: BaseException | None = None
        self._answers: dict[str, list[str]] = {}
        self._messages: dict[str, tuple[float, ...]] = {}
        self._left = False  # whether the caller knows how the run ended, and says so itself
        self._waits: dict[int, _Wait] = {}  # one a thread
        self._channel = Channel(index, count, limits, self._take, self._beat)

    @classmethod
    def join(
        cls,
        *,
        limit: float = 300.0,
        limits: Limits | None = None,
        store: Store | None = None,
        progress: Callable[[], int] = lambda: 0,
        secret: bytes | None = None,
    ) -> "Processes":
        """Join the processes of this run; all call it, after `jax.distributed.initialize` and best before anything else.

        Args:
            limit: seconds to wait for the others.
            limits: how long silence and waits may last; the same in all processes.
            store: how the processes find each other; by `jax.distributed` where not given.
            progress: a number that grows as long as this process exchanges anything with others: waits may then last longer.
            secret: that all processes share, to recognize each other by.

        Raises:
            InputError: process 0 cannot be reached, or has another secret.
            PeerLost: not all have joined in time.
        """
        store = JaxStore() if store is None else store
        processes = cls(store.index, store.count, Limits() if limits is None else limits, progress)
        if processes.count > 1:
            processes._channel.open(store, limit, secret)
            processes._meet("joining", {}, "all processes to join", limit)
        return processes

    def agree(self, facts: Mapping[str, str], limit: float = 600.0) -> None:
        """Go on only if all processes state the same facts; all call it.

        Args:
            facts: what has to be the same, by name: the text of the config, the plan, versions.
            limit: seconds to wait for the others.

        Raises:
            InputError: in every process, if any fact differs: names it, the processes, and where the texts part.
            PeerLost: the run is lost, or a process did not come in time.
        """
        differences = self._meet("agreement", dict(facts), "all processes to agree", limit)
        if differences:
            raise InputError(*differences)

    def barrier(self, name: str, limit: float = 600.0) -> None:
        """Wait until all processes are here.

        Args:
            name: of the place, the same in all processes.
            limit: seconds to wait for the others.

        Raises:
            PeerLost: the run is lost, or a process did not come in time.
        """
        self._meet(f"barrier {name}", {}, f"all processes to reach '{name}'", limit)

    def broadcast(self, name: str, values: Sequence[float]) -> None:
        """Send numbers to all processes, this one too; does not wait.

        Args:
            name: under which to ask for them; told once in a run, by one process.
            values: they arrive bit for bit.
        """
        self._calls += 1
        self._channel.post({"broadcast": name, "values": struct.pack(f"<{len(values)}d", *values).hex()})

    def receive(self, name: str, on: int | None = None, what: object = None) -> tuple[float, ...]:
        """Wait for numbers that a process tells. They can be read once; of those nobody reads the last 65,536 are kept.

        Args:
            name: under which they are told.
            on: the process that tells them, where known: to be named if they do not come.
            what: they are, in words; their name where not given.

        Raises:
            PeerLost: the run is lost.
        """
        with self.waiting(name if what is None else what, on):
            self._await(lambda: name in self._messages)
            return self._messages.pop(name)

    def has_message(self, name: str) -> bool:
        """Whether numbers that a process tells have come here and nobody has read them; does not wait.

        Args:
            name: under which they are told; where none are read, several processes may tell them, and more than once.
        """
        return name in self._messages

    @contextlib.contextmanager
    def waiting(self, what: object, on: int | Sequence[int] | None = None, limit: float | None = None) -> Iterator[None]:
        """Say that this thread now waits, so that a wait without end is noticed. Costs about a microsecond, and no message.

        Around something long that this process does alone, such as writing a file, with a `limit` above that of the others: as long as
        that, they wait for this process.

        Args:
            what: is waited for; its text is taken when it is needed.
            on: the process or processes waited for, where they are known.
            limit: seconds after which the run is lost; `Limits.wait` where not given.

        Raises:
            PeerLost: what was waited for failed because the run is lost: some collectives raise when a process of theirs dies.
        """
        thread = threading.get_ident()
        outer = self._waits.get(thread)
        others = () if on is None else (on,) if isinstance(on, int) else tuple(on)
        self._waits[thread] = _Wait(what, others, self._limits.wait if limit is None else limit)
        try:
            yield
            self._calls += 1
        except Exception as error:
            with self._changed:  # of the death behind it the channel hears at about the same time
                if self.count > 1 and self._changed.wait_for(lambda: self._lost is not None, timeout=1.0):
                    raise PeerLost(self._lost) from error
            raise
        finally:
            if outer is None:
                del self._waits[thread]
            else:
                self._waits[thread] = outer

    def check(self) -> None:
        """Return unless the run is lost, or something failed in a thread (see `fail`); for loops that wait in Python.

        Raises:
            PeerLost: the run is lost.
        """
        if self._lost is not None:
            raise PeerLost(self._lost)
        if self._failed is not None:
            raise self._failed

    def fail(self, error: BaseException) -> None:
        """Say that a thread of this process failed that nobody waits for: the waits of all others raise the first such error.

        Returns when they do so, or when the run is lost, for mostly a death is behind it that is known soon.

        Args:
            error: what it failed by.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._lost is not None, timeout=_BLAME_SECONDS):
                self._failed = self._failed or error
                self._changed.notify_all()

    def stop(self, reason: str) -> None:
        """This process gives up and ends: all others raise `PeerLost` with its reason.

        Args:
            reason: completes "process 0 stopped: ".
        """
        self._left = True
        self._channel.post({"stop": reason})
        with self._changed:  # what comes back has gone to all
            self._changed.wait_for(lambda: self._lost is not None, timeout=self._limits.grace)

    def close(self) -> None:
        """Leave the run: wait until all are here; from then on the end of a process is no loss. Once more does nothing.

        After a loss: the caller has told the user how the run ended, and ends by itself. JAX waits at its exit for processes that
        never come, so this one is still ended, now without a message, when `Limits.grace` is over.

        Raises:
            PeerLost: a process was lost before all were here.
        """
        if self._lost is None and not self._left:
            self._meet(_END, {}, "all processes to finish", 600.0)
            self._channel.join()
        self._left = True
        sys.stdout.flush()

    def end(self) -> None:
        """Leave when Python ends: leave the run, or tell the others what ends this process; for `atexit`. After `close` it does nothing.

        After a loss the process ends here with exit code 1: what JAX does at its exit would wait for those that are lost.
        """
        if self._left and self._lost is None:
            return
        error, told = getattr(sys, "last_value", None), self._left  # Python leaves there what nobody caught, once it is printed
        try:
            if error is not None:
                raise error
            self.close()
            if self._lost is None:
                return
        except BaseException as failure:
            told = told or failure is error
            if self._lost is None:
                self.stop(traceback.format_exception_only(failure)[-1].strip())
        self._left = True
        if not told:
            os.write(2, f"jpipe: {self._lost}\n".encode())
        sys.stdout.flush()
        sys.stderr.flush()
        self._channel.be_last()
        os._exit(1)

    def _meet(self, place: str, facts: dict[str, str], what: str, limit: float) -> list[str]:
        with self.waiting(what, limit=limit):
            self._channel.post({"meet": place, "facts": facts})
            self._await(lambda: place in self._answers)
            return self._answers.pop(place)

    def _await(self, found: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: found() or self._lost is not None or self._failed is not None)
            if not found():
                self.check()

    # The rest is done by the talking thread.

    def _beat(self) -> Beat:
        for wait in list(self._waits.values()):
            wait.beats += 1
        seen, self._seen = self._seen, self._progress() + self._calls
        self._still = self._still + 1 if self._seen == seen else 0
        place = " called by ".join(main_thread_calls()[:3])
        longest = self._longest_wait()
        if longest is None:
            return Beat(place, still=self._still * self._limits.beat)
        seconds, still = longest.beats * self._limits.beat, self._still * self._limits.beat
        return Beat(place, str(longest.what)[:500], longest.on, seconds, longest.limit, still)

    def _longest_wait(self) -> _Wait | None:
        return max(list(self._waits.values()), key=lambda wait: wait.beats, default=None)

    def _take(self, message: Message) -> None:
        """What process 0 says to all, and what this one has noticed itself."""
        with self._changed:
            match message:
                case {"met": place, "differences": differences}:
                    self._answers[place] = differences
                    if place == _END:
                        self._channel.hang_up()
                case {"broadcast": name, "values": values}:
                    data = bytes.fromhex(values)
                    self._messages[name] = struct.unpack(f"<{len(data) // 8}d", data)
                    if len(self._messages) > _NUMBERS:
                        del self._messages[next(iter(self._messages))]
                case {"lost": how}:
                    self._lose(how, message.get("at once", False))
            self._changed.notify_all()

    def _lose(self, how: str, at_once: bool) -> None:
        if self._lost is None:
            wait = self._longest_wait()
            text = f"{how}; process {self.index} stops" + (f" while waiting for {wait}" if wait is not None else "")
            self._lost = "".join(c if c.isprintable() else " " for c in text)
            # Process 0 goes last, for JAX aborts the others when its coordinator ends.
            self._channel.later(self._limits.grace + (self.index == 0), self._end)
        if at_once:
            self._end()

    def _end(self) -> None:
        """End this process whatever its threads are stuck in: a pending collective never raises, and JAX's exit waits for the lost."""
        if not self._left:
            os.write(2, f"jpipe: {self._lost}\n".encode())
        os._exit(1)
