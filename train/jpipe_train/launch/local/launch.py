"""`jpipe launch`: start several processes of one command on this machine, for development, and restart them if they fail.

All processes end together. Process 0 uses the terminal, if there is one, as a single process does, and reads piped input. Lines of the
other processes are printed with the number of the process: `[2] …`.
"""

import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jpipe.processes.handshake import VARIABLE as SECRET
from jpipe_train.console import interrupt
from jpipe_train.launch.local import reported_progress
from jpipe_train.launch.local.launch_request import Request
from jpipe_train.launch.local.process_group import BAD_INPUT, ProcessGroup, say

GRACE = 30.0  # seconds from SIGTERM, at which the processes save and end, to SIGKILL
PAUSE = 1.0  # seconds before a failed job is restarted
JOB = "JPIPE_JOB"  # the variable that identifies a job; it is the same for all its attempts
JPIPE = (sys.executable, "-P", "-m", "jpipe_train.cli")  # -P: no module of the current folder replaces a library
_LONGEST_PAUSE = 60.0  # the longest pause; it limits the load of a job that always fails at once
_TICK = 0.05  # seconds between two checks for signals


def main(request: Request, *, program: Sequence[str] = JPIPE, grace: float = GRACE, pause: float = PAUSE) -> int:
    """Start the processes, forward their output, and wait for all. If one fails, restart all, up to `max_restarts` times.

    If one fails, all other processes are ended, by SIGTERM and `grace` seconds later by SIGKILL. The same happens if this process gets
    SIGINT (Ctrl-C), SIGTERM or SIGHUP; a second signal kills all processes. A run that writes checkpoints saves at these signals
    (`jpipe_train.console.preemption`). After a signal, or after bad input, the job is not restarted. On Linux the processes also end if
    this one is killed. All attempts have the same `JPIPE_JOB`, which identifies the run folder (`jpipe_train.checkpoint.run_folder`).

    `program` gets the command, the coordinator and the numbers of processes as arguments. The pause before the first restart, in seconds,
    is doubled each time, up to a minute. Return 0 if all processes have ended with 0; otherwise the exit code of the process that failed
    first, or 128 plus the number of the signal that ended that process or this one.
    """
    assert request.num_processes is not None, "the request is valid"
    allowed, restarts = request.max_restarts or 0, 0
    with started(request, program, grace) as job:
        if not allowed:
            del job.variables[JOB]
        while True:
            seconds = pause_after(restarts + 1, pause)
            again = f"starting all again in {seconds:g} s ({restarts + 1} of {allowed})" if restarts < allowed else ""
            used_up = f"--max-restarts {allowed} is used up" if restarts else ""
            code, _ = job.run(range(request.num_processes), again=again or used_up)
            if code in (0, BAD_INPUT) or not again:
                words = "" if code in (0, BAD_INPUT) or job.signals else reported_progress.how_it_goes_on(job.progress)
                if words:
                    say(words + ("; see dmesg whether memory ran out" if code == 128 + signal.SIGKILL else ""))
                return code
            if job.is_stopped_within(seconds):
                return 128 + job.signals[0]
            restarts += 1


def pause_after(failures: int, first: float) -> float:
    """Return the seconds to wait after this many failures in a row; `first` is the wait after one failure."""
    return min(first * 2 ** min(failures - 1, 10), _LONGEST_PAUSE) if failures else 0.0


class Job:
    """The processes of one command. They can be restarted, each time with a new port.

    Attributes:
        progress: the file in which the processes report their progress.
        signals: the signals to this process, which are appended as they arrive.
        variables: the additional environment variables of all processes.
    """

    def __init__(self, arguments: Sequence[str], pin: bool, grace: float, progress: Path, signals: Sequence[int]) -> None:
        self.progress, self.signals, self._arguments, self._grace = progress, signals, arguments, grace
        self._cores = sorted(os.sched_getaffinity(0)) if pin else [None]
        self.variables = {SECRET: secrets.token_hex(32), JOB: secrets.token_hex(8), reported_progress.VARIABLE: str(progress)}

    def run(
        self,
        slots: Sequence[int],
        flags: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        again: str = "",
        stop: Callable[[], bool] | None = None,
    ) -> tuple[int, list[int]]:
        """Start a process in each slot, wait until all have ended, and return the exit code and the slots that failed first.

        A slot is a GPU and, if processes are pinned, in turn a CPU core. `again` and `stop` are as in `ProcessGroup.watch`.
        """
        with socket.create_server(("127.0.0.1", 0)) as free:  # if another program takes the port, process 0 reports that
            port = free.getsockname()[1]
        flags = (*flags, "--coordinator", f"127.0.0.1:{port}", "--num-processes", str(len(slots)), "--process-id")
        with contextlib.closing(ProcessGroup(self._grace, self.variables | dict(variables or {}))) as group:
            for number, slot in enumerate(slots):
                group.start([*self._arguments, *flags, str(number)], number, self._cores[slot % len(self._cores)], slot)
            code = group.watch(self.signals, again, stop)
            return code, [slots[number] for number in group.to_blame]

    def is_stopped_within(self, seconds: float) -> bool:
        """Wait for some seconds. If a signal arrives, print it and return True at once; `time.sleep` would go on sleeping."""
        end = time.monotonic() + seconds
        while not self.signals and (remaining := end - time.monotonic()) > 0:
            time.sleep(min(remaining, _TICK))
        if self.signals:
            say(f"{signal.Signals(self.signals[0]).name} received; the processes are not restarted")
        return bool(self.signals)


@contextlib.contextmanager
def started(request: Request, program: Sequence[str], grace: float) -> Iterator[Job]:
    """Yield a job while recording signals to this process."""
    with interrupt.recorded() as signals, tempfile.TemporaryDirectory(prefix="jpipe-") as folder:
        yield Job([*program, *request.command], request.pin, grace, Path(folder) / "progress", signals)
