"""`jpipe launch --elastic MIN:MAX`: continue training with fewer processes when some are lost, and with more when they return.

The processes of a run cannot change while it trains, so a job is a sequence of runs, and each resumes from the last checkpoint. Each has
new processes, a new port and a plan for their number (`jpipe train --elastic`). `slots` decides when which processes start.
"""

import os
import time
from collections.abc import Mapping, Sequence

from jpipe_train.launch.local import launch, reported_progress
from jpipe_train.launch.local.launch_request import Request
from jpipe_train.launch.local.process_group import BAD_INPUT, say
from jpipe_train.launch.local.reported_progress import Progress
from jpipe_train.launch.local.slots import Slots

_GPUS = "CUDA_VISIBLE_DEVICES"


def main(request: Request, *, program: Sequence[str] = launch.JPIPE, grace: float = launch.GRACE, pause: float = launch.PAUSE) -> int:
    """Train with `request.maximum` processes, or with the remaining ones, until the run is complete, and return the exit code.

    When a process fails, all end and start again, except those that have failed `max_failures` times in a row. Such a process is tried
    again after `retry_after` seconds: once the smaller run has written a checkpoint, it is asked to save and end, and a larger run resumes
    there. Signals are handled as in `launch.main`. Nothing starts again after a signal or bad input.

    The arguments are as for `launch.main`. The pause before a restart is doubled each time until there is a new checkpoint. The exit code
    is 0 if the run is complete or was saved at a signal; otherwise as in `launch.main`, of the last attempt.
    """
    with launch.started(request, program, grace) as processes:
        job = _Job(request, processes)
        code, failures = 1, 0
        while job.wait_for_members(launch.pause_after(failures, pause)):
            before = job.progress
            code = job.run()
            if processes.signals or code == BAD_INPUT or (code == 0 and not job.is_unfinished(before)):
                return code
            failures = 0 if job.progress != before else failures + 1
        return 128 + processes.signals[0] if processes.signals else code


def _only_gpu(slot: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that gives a single process the GPU of its slot, because it ignores `JAX_LOCAL_DEVICE_IDS`."""
    if "JAX_LOCAL_DEVICE_IDS" in environment:  # the user's choice for all
        return {}
    visible = [name for name in environment.get(_GPUS, "").split(",") if name]
    return {_GPUS: visible[slot] if slot < len(visible) else str(slot)}


def _named(slots: Sequence[int]) -> str:
    return f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"


class _Job:
    """The successive processes of an elastic job."""

    def __init__(self, request: Request, processes: launch.Job) -> None:
        self._limits, self._processes, self._slots = request, processes, Slots(request)
        self._members: list[int] = []  # the slots of the next run: process i runs in slot `members[i]`

    @property
    def progress(self) -> Progress | None:
        """The newest checkpoint that the processes have reported."""
        return reported_progress.read(self._processes.progress)

    def is_unfinished(self, before: Progress | None) -> bool:
        """Return whether a successful run has only been saved; `before` is the progress when it began."""
        now = self.progress
        return now is not None and now != before and not now.is_complete

    def wait_for_members(self, pause: float) -> bool:
        """Wait until enough processes can be started, then pause. Return whether to start them."""
        most = self._limits.maximum
        while (seconds := self._slots.wait(time.monotonic())) != 0:
            short = f"{len(self._slots.startable(time.monotonic()))} of the required {self._limits.minimum} processes can be started"
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
        """Return whether to end the running processes so that more can start. They must have written a checkpoint."""
        back = [slot for slot in self._slots.startable(time.monotonic()) if slot not in self._members]
        if not back or not self.is_unfinished(before):
            return False
        count = len(self._members) + len(back)
        say(f"{_named(back)} can be used again: the run saves, and goes on with {count} of {self._limits.maximum} processes")
        return True
