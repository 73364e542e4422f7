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

from jpipe_train.console import interrupt
from jpipe_train.launch.local import reported_progress
from jpipe_train.launch.local.process_group import BAD_INPUT, ProcessGroup, say
from jpipe_train.launch.local.reported_progress import VARIABLE

MOST_PROCESSES = 256  # more is a typo: JAX needs some hundred megabytes in each
GRACE = 30.0  # seconds from the signal that asks the processes to end, at which they save, to the one that kills them
PAUSE = 1.0  # seconds before a failed job is restarted
SECRET = "JPIPE_SECRET"  # the variable with the secret of the processes; also in jpipe.processes.handshake, which imports more
JOB = "JPIPE_JOB"  # the variable that identifies a job; it is the same for all its attempts
LONGEST_PAUSE = 60.0  # limits the load of a job that always fails immediately
JPIPE = (sys.executable, "-P", "-m", "jpipe_train.cli")  # -P: no module of the current folder replaces a library
_TICK = 0.05  # seconds between two looks at the signals
_SEVERAL = ("train", "plan", "evaluate", "generate", "doctor")  # commands that run in several processes
_RESERVED = ("--coordinator", "--num-processes", "--process-id")


def problem(
    num_processes: int | None, command: Sequence[str], *, pin: bool = False, max_restarts: int | None = None, elastic: str | None = None
) -> str | None:
    """Return an error message for invalid arguments of `main` or of `jpipe_train.launch.local.elastic`, or None, without importing JAX."""
    if elastic is not None:
        options = {"-n": num_processes, "--max-restarts": max_restarts}
        if given := [name for name, value in options.items() if value is not None]:
            return f"launch --elastic: expected neither -n nor --max-restarts beside it, found {given[0]}; leave out one of them"
        if command and command[0] != "train":
            return f"launch --elastic: expected `train CONFIG …` after --, found '{command[0]}'; the other commands have no checkpoints"
    elif num_processes is None:
        return "launch: expected -n N or --elastic MIN:MAX, found neither; such as jpipe launch -n 2 -- train CONFIG"
    elif not 1 <= num_processes <= MOST_PROCESSES:
        return f"launch -n: expected 1 to {MOST_PROCESSES} processes, found {num_processes}"
    if max_restarts is not None and max_restarts < 0:
        return f"launch --max-restarts: expected 0 or more, found {max_restarts}; 0 starts nothing again"
    if not command:
        return "launch: expected a command after --, found none; such as jpipe launch -n 2 -- train CONFIG"
    if command[0] not in _SEVERAL:
        some = ", ".join(_SEVERAL[:-1])
        return f"launch: expected `train CONFIG …` after --, found '{command[0]}'; only {some} and {_SEVERAL[-1]} run in several processes"
    reserved = _RESERVED if elastic is None else (*_RESERVED, "--elastic")
    for argument in command:
        if (name := argument.partition("=")[0].replace("_", "-")) in reserved:
            return f"launch: {name} after -- is given to each process by launch; leave it out there"
    if pin and not hasattr(os, "sched_setaffinity"):
        return f"launch --pin: {sys.platform} has no way to give a process a core; leave it out"
    return None


def main(
    num_processes: int,
    command: Sequence[str],
    *,
    pin: bool = False,
    max_restarts: int = 0,
    program: Sequence[str] = JPIPE,
    grace: float = GRACE,
    pause: float = PAUSE,
) -> int:
    """Start the processes, forward their output, and wait for all; if one fails, restart all, up to `max_restarts` times.

    After the last failure it prints the newest checkpoint of the run, and how to continue from it.

    If one fails, all other processes are ended, by SIGTERM and `grace` seconds later by SIGKILL. The same happens if this process gets
    SIGINT (Ctrl-C), SIGTERM or SIGHUP; a second signal kills all processes. A run that writes checkpoints saves at these signals, and ends
    normally if `grace` is long enough (`jpipe_train.console.preemption`). On Linux the processes also end if this one is killed; on other
    systems they continue.

    After such a signal, or after bad input, the job is not restarted. All attempts have the same command and the same `JPIPE_JOB`, by which
    they find their run folder (`jpipe_train.checkpoint.run_folder`), but different ports. The processes of a job share a secret that nobody
    else knows, and listen on loopback addresses only.

    Args:
        num_processes: the number of processes.
        command: the arguments of each process; the coordinator, the number of processes and the process number are added.
        pin: whether each process runs on one CPU core, in turn, and XLA uses one thread.
        max_restarts: how often the job is restarted at most.
        program: the program that gets these arguments.
        grace: seconds from SIGTERM to SIGKILL.
        pause: seconds before the first restart; doubled each time, up to a minute.

    Returns:
        The exit code: 0 if all processes have ended with 0; otherwise the exit code of the process that failed first, or 128 plus the
        number of the signal that ended that process or this one.
    """
    restarts = 0
    with started_again([*program, *command], pin, grace) as job:
        if not max_restarts:
            del job.variables[JOB]
        while True:
            again = f"starting all again in {pause:g} s ({restarts + 1} of {max_restarts})" if restarts < max_restarts else ""
            used_up = f"--max-restarts {max_restarts} is used up" if restarts else ""
            code, _ = job.run(range(num_processes), again=again or used_up)
            if code in (0, BAD_INPUT) or not again:
                words = "" if code in (0, BAD_INPUT) or job.signals else reported_progress.how_it_goes_on(job.progress)
                if words:
                    say(words + ("; dmesg says whether memory ran out" if code == 128 + signal.SIGKILL else ""))
                return code
            if job.is_stopped_within(pause):
                return 128 + job.signals[0]
            restarts, pause = restarts + 1, min(2 * pause, LONGEST_PAUSE)


class Job:
    """The processes of one command, which are started again and again, each time with a new port.

    Args:
        arguments: the command of each process; the coordinator, the number of processes and the process number are added.
        pin: whether each process has one CPU core, in turn.
        grace: seconds from SIGTERM to SIGKILL.
        progress: the file in which the processes report their progress.
        signals: a list to which the signals to this process are appended as they arrive.

    Attributes:
        variables: the additional environment variables of all processes.
    """

    def __init__(self, arguments: Sequence[str], pin: bool, grace: float, progress: Path, signals: Sequence[int]) -> None:
        self.progress, self.signals, self._arguments, self._grace = progress, signals, arguments, grace
        self._cores = sorted(os.sched_getaffinity(0)) if pin else [None]
        self.variables = {SECRET: secrets.token_hex(32), JOB: secrets.token_hex(8), VARIABLE: str(progress)}

    def run(
        self,
        slots: Sequence[int],
        flags: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        again: str = "",
        stop: Callable[[], bool] | None = None,
    ) -> tuple[int, list[int]]:
        """Start a process in each slot, wait until all have ended, and return the exit code and the slots that were the first to fail.

        Args:
            slots: the GPUs, and in turn the cores, of the processes.
            flags: more arguments.
            variables: more variables.
            again: as in `ProcessGroup.watch`.
            stop: as in `ProcessGroup.watch`.
        """
        flags = (*flags, "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(len(slots)), "--process-id")
        with contextlib.closing(ProcessGroup(self._grace, self.variables | dict(variables or {}))) as group:
            for number, slot in enumerate(slots):
                group.start([*self._arguments, *flags, str(number)], number, self._cores[slot % len(self._cores)], slot)
            code = group.watch(self.signals, again, stop)
            return code, [slots[number] for number in group.to_blame]

    def is_stopped_within(self, seconds: float) -> bool:
        """Wait for some seconds. If a signal arrives, print this and return True at once; `time.sleep` would continue after a signal."""
        end = time.monotonic() + seconds
        while not self.signals and (remaining := end - time.monotonic()) > 0:
            time.sleep(min(remaining, _TICK))
        if self.signals:
            say(f"{signal.Signals(self.signals[0]).name} received; not starting again")
        return bool(self.signals)


@contextlib.contextmanager
def started_again(arguments: Sequence[str], pin: bool, grace: float) -> Iterator[Job]:
    """Yield a job in a context in which signals are recorded."""
    with interrupt.recorded() as signals, tempfile.TemporaryDirectory(prefix="jpipe-") as folder:
        yield Job(arguments, pin, grace, Path(folder) / "progress", signals)


def free_port() -> int:
    """Return a port that is free now; if another program takes it before process 0 does, process 0 reports that."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
