"""`jpipe launch`: several processes of one command on this machine, for development. They end together, whatever happens.

Process 0 has the terminal, if there is one, as if it were alone; each line of another one is told with its number: `[2] …`.
"""

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

MOST_PROCESSES = 256  # a slip of the keyboard beyond it: JAX takes some hundred megabytes in each
GRACE = 6.0  # seconds from the signal that asks the processes to end to the one that ends them
_JPIPE = (sys.executable, "-P", "-m", "train.cli")  # -P: no train.py of the current folder's
_LAST_WORDS = 3.0  # seconds from the first failure to the signal that ends the others
_TICK = 0.05  # seconds between two looks at the processes
_LONGEST_LINE = 1 << 16
_GLOO = b"[Gloo] Rank "  # it tells of every connection, and nothing stops it
_GIVEN = ("--coordinator", "--num-processes", "--process-id")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def problem(num_processes: int, command: Sequence[str], *, pin: bool) -> str | None:
    """What is wrong with the arguments of `main`, as they were typed; None if nothing is. JAX is not imported for that."""
    if not 1 <= num_processes <= MOST_PROCESSES:
        return f"launch -n: expected 1 to {MOST_PROCESSES} processes, found {num_processes}"
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


def main(num_processes: int, command: Sequence[str], *, pin: bool = False, program: Sequence[str] = _JPIPE, grace: float = GRACE) -> int:
    """Start the processes, pass on what they print, and wait for all.

    When one fails, all others are ended, by SIGTERM and `grace` seconds later by SIGKILL. The same with the signal that this process
    gets, if it is SIGINT (Ctrl-C), SIGTERM or SIGHUP; the second one ends all at once. On Linux the processes end, too, when this one
    is killed; elsewhere they lose it and go on.

    Args:
        num_processes: how many.
        command: arguments of each; where process 0 is, how many there are and which this one is are added.
        pin: each process has one CPU core, by turns, and XLA computes in one thread.
        program: what is run with these arguments.
        grace: seconds.

    Returns:
        The exit code: 0, or that of the process that failed first, or 128 and the number of the signal that ended it or this process.
    """
    cores = sorted(os.sched_getaffinity(0)) if pin else [None]
    flags = "--coordinator", f"127.0.0.1:{_free_port()}", "--num-processes", str(num_processes), "--process-id"
    with _heard() as signals, contextlib.closing(_Tree(grace)) as tree:
        for number in range(num_processes):
            tree.start([*program, *command, *flags, str(number)], number, cores[number % len(cores)])
        return tree.watch(signals)


class _Tree:
    """The processes, from the start of the first to the end of the last."""

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._processes: list[subprocess.Popen[bytes]] = []
        self._outputs = selectors.DefaultSelector()
        self._deadline: float | None = None  # when those that were asked to end are killed
        self._patience: float | None = None  # until when the others of one that failed may say what they waited for

    def start(self, arguments: Sequence[str], number: int, core: int | None) -> None:
        """Start process `number`, on `core` if there is one for it."""
        outputs = [None if number == 0 and target.isatty() else subprocess.PIPE for target in (sys.stdout, sys.stderr)]
        process = subprocess.Popen(  # noqa: S603, the command is the user's own
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=outputs[0],
            stderr=outputs[1],
            env=_environment(number, one_thread=core is not None),
            start_new_session=True,  # Ctrl-C comes here only; and what the process starts is ended with it
            preexec_fn=_prepared(core),  # no thread runs here that could hold a lock
        )
        self._processes.append(process)
        for stream, target in (process.stdout, sys.stdout), (process.stderr, sys.stderr):
            if stream is not None:
                self._outputs.register(stream, selectors.EVENT_READ, _Output(f"[{number}] " if number else "", target))

    def watch(self, signals: Sequence[int]) -> int:
        """Copy what they print until all have ended, and return the exit code; `signals` grows with each that this process gets."""
        code: int | None = None
        living = True
        while living:
            living = self._reap()
            self._copy(_TICK)
            failed = next((number for number, process in enumerate(self._processes) if process.returncode), None)
            if code is None and signals:
                code = 128 + signals[0]
                self._end(signals[0])
            elif code is None and failed is not None:
                code, how = _ending(self._processes[failed].returncode)
                _print(f"jpipe: process {failed} {how}{'; ending the others' if living else ''}\n", sys.stderr)
                self._patience = time.monotonic() + min(_LAST_WORDS, self._grace)
            if self._patience is not None and time.monotonic() > self._patience and self._deadline is None:
                self._end(signal.SIGTERM)
            if len(signals) > 1 or (self._deadline is not None and time.monotonic() > self._deadline):
                self._end(signal.SIGKILL)
        end = time.monotonic() + self._grace
        while self._copy(_TICK) and time.monotonic() < end:  # what is still in the pipes; what has left the tree may go on printing
            pass
        if sys.stdout.isatty():
            _print("\x1b[?25h", sys.stdout)  # a progress bar that was ended in the middle has hidden the cursor
        return code or 0

    def close(self) -> None:
        """End all that are left."""
        self._end(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for key in self._outputs.get_map().values():
            os.close(key.fd)
        self._outputs.close()

    def _reap(self) -> bool:
        """Note which have ended, and end what they started themselves; true if any lives."""
        for process in self._processes:
            if process.returncode is None and process.poll() is not None:
                _signal(process, signal.SIGKILL)
        return any(process.returncode is None for process in self._processes)

    def _end(self, number: int) -> None:
        """Send the signal to those that live, and have the others killed later."""
        for process in self._processes:
            if process.returncode is None:
                _signal(process, number)
        self._deadline = None if number == signal.SIGKILL else time.monotonic() + self._grace

    def _copy(self, seconds: float) -> bool:
        """Copy what is printed, waiting for it; true if there was any."""
        ready = self._outputs.select(seconds)
        for key, _ in ready:
            if data := os.read(key.fd, 1 << 16):
                key.data.take(data)
            else:
                key.data.take(b"\n" if key.data.rest else b"")
                self._outputs.unregister(key.fileobj)
                os.close(key.fd)
        return bool(ready)


@dataclass
class _Output:
    """One of the two outputs of a process: whole lines go to `target`, each behind `prefix`."""

    prefix: str
    target: TextIO
    rest: bytes = b""  # of a line that has not ended

    def take(self, data: bytes) -> None:
        """Copy the lines that are whole now, but for those that nobody wants."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > _LONGEST_LINE:
            lines, self.rest = [*lines, self.rest], b""
        for line in lines:
            if not line.startswith(_GLOO):
                _print(f"{self.prefix}{line.decode(errors='replace')}\n", self.target)


def _print(text: str, target: TextIO) -> None:
    # On a terminal the bar of process 0 may stand where this goes; it is drawn again below.
    target.write(f"\r\x1b[2K{text}" if target.isatty() else text)
    target.flush()


def _ending(returncode: int) -> tuple[int, str]:
    """The exit code as a shell has it, and what happened in words."""
    if returncode < 0:
        return 128 - returncode, f"was ended by {signal.Signals(-returncode).name}"
    return returncode, f"ended with exit code {returncode}"


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To the process and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _environment(number: int, *, one_thread: bool) -> dict[str, str]:
    own = os.environ
    # The same modules in the same places as here; lines that do not wait in a buffer; a GPU each, as NCCL wants it; and no warning
    # that recoverability is experimental.
    changes = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
    changes["JAX_LOCAL_DEVICE_IDS"] = own.get("JAX_LOCAL_DEVICE_IDS", str(number))
    changes["TF_CPP_MIN_LOG_LEVEL"] = own.get("TF_CPP_MIN_LOG_LEVEL", "2")
    if one_thread:
        changes["XLA_FLAGS"] = f"{own.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    return own | changes


def _prepared(core: int | None) -> Callable[[], None]:
    """What a process does before it becomes the command: it ends with this one from now on, and moves to its core."""
    parent = os.getpid()
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # killed in the moment before
            os._exit(1)
        if core is not None:
            os.sched_setaffinity(0, {core})

    return prepare


def _free_port() -> int:
    """Free now: another program could take it before process 0 does, which then says so."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def _heard() -> Iterator[list[int]]:
    """The signals that ask this process to end, as they come; those that it was told to ignore, as by nohup, stay ignored."""
    heard: list[int] = []
    asking = [number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, _frame: heard.append(number)) for number in asking}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
