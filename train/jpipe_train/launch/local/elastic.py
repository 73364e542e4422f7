"""`jpipe launch --elastic MIN:MAX`: when processes are lost, continue training with the others; when they return, with more.

The processes of a run cannot change while it trains, so a job is a sequence of runs that resume from each other's checkpoints. Each has new
processes, a new port and a plan for their number (`jpipe train --elastic`). Which processes are started, and when, is in `slots`.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jpipe_train.launch.local import launch, reported_progress
from jpipe_train.launch.local.process_group import BAD_INPUT, say
from jpipe_train.launch.local.reported_progress import Progress
from jpipe_train.launch.local.slots import Limits, Slots

_GPUS = "CUDA_VISIBLE_DEVICES"


def limits(text: str, options: Mapping[str, Any]) -> Limits | str:
    """Return the limits from `--elastic MIN:MAX` and its related options, or an error message.

    Args:
        text: the value of `--elastic`.
        options: the remaining fields of `Limits` that are given.
    """
    match, most = re.fullmatch(r"(\d{1,4}):(\d{1,4})", text, re.ASCII), launch.MOST_PROCESSES
    minimum, maximum = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= minimum <= most or not 1 <= maximum <= most:
        return f"launch --elastic: expected MIN:MAX, the fewest and the most processes, such as 2:4, at most {most}, found '{text}'"
    if minimum > maximum:
        return f"launch --elastic: expected MIN:MAX, found '{text}', in which MIN is larger than MAX; write {maximum}:{minimum}"
    chosen = Limits(minimum, maximum, **options)
    if chosen.max_failures < 1:
        return f"launch --max-failures: expected 1 or more, found {chosen.max_failures}"
    for name, seconds in (("--retry-after", chosen.retry_after), ("--shortage-limit", chosen.shortage_limit)):
        if not 0 <= seconds <= 1e9:
            return f"launch {name}: expected seconds, 0 to 1e9, found {seconds:g}"
    return chosen


def main(
    limits: Limits,
    command: Sequence[str],
    *,
    pin: bool = False,
    program: Sequence[str] = launch.JPIPE,
    grace: float = launch.GRACE,
    pause: float = launch.PAUSE,
) -> int:
    """Train with `limits.maximum` processes, or with the remaining ones, until the run is complete.

    When a process fails, all end, and new ones start: all again, or without those that have failed `limits.max_failures` times in a row.
    One that was left out is tried again after `limits.retry_after` seconds: once the smaller run has written a checkpoint, it is asked to
    save and end, and a larger one resumes there. Signals are handled as in `launch.main`; after one, and after bad input, nothing starts.

    Args:
        limits: numbers of processes, of failures and of seconds.
        command: arguments of each process; `--elastic`, the coordinator, the number of processes and the process number are added.
        pin: whether each process has one CPU core, as in `launch.main`.
        program: the program that gets these arguments.
        grace: seconds from SIGTERM to SIGKILL after a failure.
        pause: seconds before the first restart; doubled each time, up to a minute, until there is a new checkpoint.

    Returns:
        The exit code: 0 if the run is complete or was saved at a signal; otherwise as in `launch.main`, of the last attempt.
    """
    with launch.started_again([*program, *command], pin, grace) as processes:
        job = _Job(limits, processes)
        code, failures = 1, 0
        while job.wait_for_members(_pause(pause, failures)):
            before = job.progress
            code = job.run()
            if processes.signals or code == BAD_INPUT or (code == 0 and not job.is_unfinished(before)):
                return code
            failures = 0 if job.progress != before else failures + 1
        return 128 + processes.signals[0] if processes.signals else code


def _pause(first: float, failures: int) -> float:
    """Return the seconds to wait after `failures` failures in a row without a new checkpoint."""
    return min(first * 2 ** min(failures - 1, 10), launch.LONGEST_PAUSE) if failures else 0.0


def _only_gpu(slot: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable by which a single process uses the GPU of its slot: only several processes read `JAX_LOCAL_DEVICE_IDS`."""
    if "JAX_LOCAL_DEVICE_IDS" in environment:  # the user's choice for all
        return {}
    visible = [name for name in environment.get(_GPUS, "").split(",") if name]
    return {_GPUS: visible[slot] if slot < len(visible) else str(slot)}


def _named(slots: Sequence[int]) -> str:
    return f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"


class _Job:
    """The processes of an elastic job, one run after the other."""

    def __init__(self, limits: Limits, processes: launch.Job) -> None:
        self._limits, self._processes, self._slots = limits, processes, Slots(limits)
        self._members: list[int] = []  # the slots of the next run; process i is in slot `members[i]`

    @property
    def progress(self) -> Progress | None:
        """The newest checkpoint that the processes have reported."""
        return reported_progress.read(self._processes.progress)

    def is_unfinished(self, before: Progress | None) -> bool:
        """Return whether a run that has succeeded was only saved; `before` is the progress when it began."""
        now = self.progress
        return now is not None and now != before and not now.is_complete

    def wait_for_members(self, pause: float) -> bool:
        """Wait until enough processes can be started, then pause; return whether to start them."""
        most = self._limits.maximum
        while (seconds := self._slots.wait(time.monotonic())) != 0:
            short = f"{len(self._slots.startable(time.monotonic()))} of at least {self._limits.minimum} processes can be started"
            if seconds is None:
                words = reported_progress.how_it_goes_on(self._processes.progress)
                resumes = f"; {words}" if words else ""
                say(f"{short}, and no more within {self._limits.shortage_limit:g} s (--shortage-limit); giving up{resumes}")
                return False
            say(f"{short}; waiting {seconds:.0f} s for another one")
            if self._processes.is_stopped_within(seconds):
                return False
        able = self._slots.startable(time.monotonic())
        if self._members or len(able) < most:
            left_out = [slot for slot in range(most) if slot not in able]
            without = f", without {_named(left_out)}" if left_out else ""
            say(f"starting {len(able)} of {most} processes{f' in {pause:g} s' if pause else ''}{without}")
        self._members = able
        return not self._processes.is_stopped_within(pause)

    def run(self) -> int:
        """Start a process in each of the slots, wait until all have ended, and return the exit code."""
        before = self.progress
        code, failed = self._processes.run(
            self._members,
            ["--elastic", str(self._limits.maximum)],
            _only_gpu(self._members[0], os.environ) if len(self._members) == 1 else {},
            stop=lambda: self._should_grow(before),
        )
        if self.progress != before:
            self._slots.save(self._members)
        for slot in failed if code != BAD_INPUT and not self._processes.signals else ():
            if seconds := self._slots.fail(slot, time.monotonic()):
                times = "once" if self._slots.failures[slot] == 1 else f"{self._slots.failures[slot]} times"
                say(f"slot {slot} has failed {times} without a new checkpoint; it is left out for {seconds:.0f} s")
        return code

    def _should_grow(self, before: Progress | None) -> bool:
        """Return whether to end the running processes so that more can start: only once they have written a checkpoint."""
        back = [slot for slot in self._slots.startable(time.monotonic()) if slot not in self._members]
        if not back or not self.is_unfinished(before):
            return False
        count = len(self._members) + len(back)
        say(f"{_named(back)} can be used again: the run saves, and goes on with {count} of {self._limits.maximum} processes")
        return True
