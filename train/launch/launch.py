"""`jpipe launch`: several processes of one command on this machine, for development, started again when they fail.

They end together, whatever happens. Process 0 has the terminal, if there is one, as if it were alone; each line of another one is printed
with its number: `[2] …`.
"""

import contextlib
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from types import FrameType

from train.launch.process_group import BAD_INPUT, ProcessGroup, say

MOST_PROCESSES = 256  # a typo beyond it: JAX takes some hundred megabytes in each
GRACE = 30.0  # seconds from the signal that asks the processes to end, for which they save, to the one that ends them
PAUSE = 1.0  # seconds before a failed job is started again
SECRET = (
    "JPIPE_SECRET"  # the variable by which the processes recognize each other; jpipe.processes.handshake, which imports more, has it too
)
JOB = "JPIPE_JOB"  # the variable that is the same for all attempts of one job, and different for all jobs
_LONGEST_PAUSE = 60.0  # a job that fails at once each time then takes no more of the machine than one that works
_JPIPE = (sys.executable, "-P", "-m", "jpipe_command")  # -P: nothing of the current folder's in place of a library
_TICK = 0.05  # seconds between two looks at the signals
_GIVEN = ("--coordinator", "--num-processes", "--process-id")


def problem(num_processes: int, command: Sequence[str], *, pin: bool, max_restarts: int) -> str | None:
    """What is wrong with the arguments of `main`, as they were typed; None if nothing is. JAX is not imported for that."""
    if not 1 <= num_processes <= MOST_PROCESSES:
        return f"launch -n: expected 1 to {MOST_PROCESSES} processes, found {num_processes}"
    if max_restarts < 0:
        return f"launch --max-restarts: expected 0 or more, found {max_restarts}; 0 starts nothing again"
    if not command:
        return "launch: expected a command after --, found none; such as jpipe launch -n 2 -- train CONFIG"
    if command[0] != "train":
        return f"launch: expected `train CONFIG …` after --, found '{command[0]}'; only train runs in several processes"
    for argument in command:
        if (name := argument.partition("=")[0].replace("_", "-")) in _GIVEN:
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
    program: Sequence[str] = _JPIPE,
    grace: float = GRACE,
    pause: float = PAUSE,
) -> int:
    """Start the processes, pass on what they print, and wait for all; where one fails, start all again, as often as `max_restarts` says.

    When one fails, all others are ended, by SIGTERM and `grace` seconds later by SIGKILL. The same with the signal that this process
    gets, if it is SIGINT (Ctrl-C), SIGTERM or SIGHUP; the second one ends all at once. A run that writes checkpoints saves at them, and
    ends well where `grace` is enough for that (`train.console.preemption`). On Linux the processes end, too, when this one is killed;
    elsewhere they lose it and go on.

    A job that was ended by such a signal or by bad input is not started again. All attempts have the same command and the same
    `JPIPE_JOB`, by which they find their run folder (`train.checkpoint.run_folder`); each has a port of its own. The processes of a job
    share a secret that nobody else knows, and listen at loopback addresses only.

    Args:
        num_processes: how many.
        command: arguments of each; where process 0 is, how many there are and which this one is are added.
        pin: each process has one CPU core, by turns, and XLA computes in one thread.
        max_restarts: how often all are started again.
        program: what is run with these arguments.
        grace: seconds.
        pause: seconds before they are started again for the first time; then twice as many each time, a minute at most.

    Returns:
        The exit code: 0 if all have ended with it, or that of the process that failed first, or 128 and the number of the signal that
        ended it or this process.
    """
    cores = sorted(os.sched_getaffinity(0)) if pin else [None]
    variables = {SECRET: secrets.token_hex(32)} | ({JOB: secrets.token_hex(8)} if max_restarts else {})
    restarts = 0
    with _received() as signals:
        while True:
            again = f"starting all again in {pause:g} s ({restarts + 1} of {max_restarts})" if restarts < max_restarts else ""
            flags = "--coordinator", f"127.0.0.1:{_free_port()}", "--num-processes", str(num_processes), "--process-id"
            with contextlib.closing(ProcessGroup(grace, variables)) as group:
                for number in range(num_processes):
                    group.start([*program, *command, *flags, str(number)], number, cores[number % len(cores)])
                code = group.watch(signals, again)
            if code in (0, BAD_INPUT) or not again:
                return code
            _wait(pause, signals)
            if signals:
                say(f"{signal.Signals(signals[0]).name} received; not starting again")
                return 128 + signals[0]
            restarts, pause = restarts + 1, min(2 * pause, _LONGEST_PAUSE)


def _wait(seconds: float, signals: Sequence[int]) -> None:
    """Until then, or until a signal comes; `time.sleep` alone goes on after one."""
    end = time.monotonic() + seconds
    while not signals and (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _TICK))


def _free_port() -> int:
    """Free now: another program could take it before process 0 does, which then says so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def _received() -> Iterator[list[int]]:
    """The signals that ask this process to end, as they come; those that it has to ignore, as after nohup, stay ignored."""
    received: list[int] = []
    asking = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]

    def hear(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGHUP or not received:  # when a connection drops several come, and with SIGTERM
            received.append(number)

    before = {number: signal.signal(number, hear) for number in asking}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
