"""The content of heartbeats: the longest wait of this process's threads and, without progress, the calls of the main thread."""

import faulthandler
import os
import re
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass

from jpipe.processes._coordinator import Beat, named

LOOK_AFTER = 5
"""After this many beats without progress, heartbeats report the calls of the main thread. Ten or more are needed to blame a process."""

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(slots=True)
class Wait:
    """A wait of a thread. Its duration is counted in beats, so that time in which this process is stopped does not count."""

    what: object
    on: tuple[int, ...]
    limit: float
    beats: int = 0

    def __str__(self) -> str:
        return f"{self.what} of {named(self.on)}" if self.on else str(self.what)


class Waits:
    """The waits of this process's threads, one per thread, and whether there is progress: whether the number `progress()` grows."""

    def __init__(self, seconds: float, progress: Callable[[], int]) -> None:
        self._seconds, self._progress = seconds, progress  # the time between two beats
        self._of_threads: dict[int, Wait] = {}
        self._moves = 0  # the number of messages sent and waits ended
        self._seen, self._still = 0, 0  # the progress at the last beat, and the beats since the progress grew
        self._place = ""  # the calls of the main thread when they were last read; "" if there has been progress since

    def __len__(self) -> int:
        return len(self._of_threads)

    def begin(self, wait: Wait) -> Wait | None:
        """Begin a wait of this thread and return the enclosing wait, for `end`."""
        thread = threading.get_ident()
        outer, self._of_threads[thread] = self._of_threads.get(thread), wait
        return outer

    def end(self, outer: Wait | None) -> None:
        """End the wait of this thread and restore the enclosing wait `outer`, if any."""
        if outer is None:
            del self._of_threads[threading.get_ident()]
        else:
            self._of_threads[threading.get_ident()] = outer

    def moved(self) -> None:
        """Count one more sign of progress."""
        self._moves += 1

    def longest(self) -> Wait | None:
        """Return the wait that has lasted the most beats, or None if no thread waits."""
        return max(list(self._of_threads.values()), key=lambda wait: wait.beats, default=None)

    def beat(self) -> Beat:
        """Count one more beat, and return a report of the longest wait; only one thread may call this.

        Without progress, the report has the calls of the main thread. Reading them is not quite safe, so this happens after `LOOK_AFTER`
        beats, after twice as many, and so on; the beats in between repeat the last reading.
        """
        for wait in list(self._of_threads.values()):
            wait.beats += 1
        seen, self._seen = self._seen, self._progress() + self._moves
        self._still = self._still + 1 if self._seen == seen else 0
        if self._still < LOOK_AFTER:
            self._place = ""
        elif self._still % LOOK_AFTER == 0 and (self._still // LOOK_AFTER).bit_count() == 1:
            self._place = " called by ".join(main_thread_calls()[:3])
        still = self._still * self._seconds
        longest = self.longest()
        if longest is None:
            return Beat(self._place, still=still)
        return Beat(self._place, str(longest.what)[:500], longest.on, longest.beats * self._seconds, longest.limit, still)


def main_thread_calls() -> list[str]:
    """Return `file.py:12 (function)` for each call of the main thread, innermost first; nothing with more than 100 threads.

    Python's `faulthandler` prints the calls while no other thread runs. Call this rarely, because no way to read the calls is quite safe.
    In tests that called this every second for a day, `faulthandler` ended three processes by SIGSEGV on Python 3.13.0. On Python 3.11,
    reading the calls as objects (`sys._current_frames`) ended one in some hundreds of runs with four processes.
    """
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # the disk has no space for the file
        return []
    calls, is_main = [], False
    for line in lines:
        if thread := _THREAD.match(line):
            is_main = int(thread[1], 16) == threading.main_thread().ident
        elif is_main and (call := _CALL.match(line)):
            calls.append(f"{os.path.basename(call[1])}:{call[2]} ({call[3]})")
    return calls
