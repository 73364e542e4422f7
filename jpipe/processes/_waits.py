"""What each heartbeat reports: the current waits of this process's threads, and without progress where the main thread is."""

import faulthandler
import os
import re
import tempfile
import threading
from collections.abc import Callable

from jpipe.processes._coordinator import Beat, named

LOOK_AFTER = 5
"""Beats without progress after which heartbeats say where the main thread is. A process is blamed after ten or more."""

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Wait:
    """A wait of a thread. Its length is counted in beats, so that the time during which this process is stopped does not count."""

    __slots__ = ("beats", "limit", "on", "what")

    def __init__(self, what: object, on: tuple[int, ...], limit: float) -> None:
        self.what, self.on, self.limit, self.beats = what, on, limit, 0

    def __str__(self) -> str:
        return f"{self.what} of {named(self.on)}" if self.on else str(self.what)


class Waits:
    """The waits of this process's threads, one per thread, and whether there is progress.

    Args:
        seconds: between two beats.
        progress: returns a number that grows while this process exchanges data with others.
    """

    def __init__(self, seconds: float, progress: Callable[[], int]) -> None:
        self._seconds, self._progress = seconds, progress
        self._of_threads: dict[int, Wait] = {}
        self._moves = 0  # messages sent and waits that are over
        self._seen, self._still = 0, 0  # progress at the last beat, and beats since it grew
        self._place = ""  # where the main thread was when it was looked at last, if there has been no progress since

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
        """Count one more beat, and report what the longest wait is for; for one thread only.

        Where the main thread is, a beat says only without progress. To read its stack is not quite safe, so this is done after
        `LOOK_AFTER` beats, after twice as many, and so on; the beats in between repeat what was read.
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
    """Return `file.py:12 (function)` for each call of the main thread, innermost first; empty if unknown, as with more than 100 threads.

    Python prints them while no other thread runs. Call it rarely, because no way to read them is quite safe. In a day of tests, which
    called it every second, `faulthandler` ended three processes by SIGSEGV on Python 3.13.0. Reading them as objects
    (`sys._current_frames`) ended one start of four processes in some hundreds on Python 3.11.
    """
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:  # no space for the file
        return []
    calls, is_main = [], False
    for line in lines:
        if thread := _THREAD.match(line):
            is_main = int(thread[1], 16) == threading.main_thread().ident
        elif is_main and (call := _CALL.match(line)):
            calls.append(f"{os.path.basename(call[1])}:{call[2]} ({call[3]})")
    return calls
