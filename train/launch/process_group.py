"""The processes of `jpipe launch`: each in a session of its own, what they print marked by process, and ended together."""

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, TextIO

BAD_INPUT = 2  # the exit code of a job that would fail in the same way again
_LAST_WORDS = 3.0  # seconds from the first failure to the signal that ends the others
_TICK = 0.05  # seconds between two looks at the processes
_LONGEST_LINE = 1 << 16
_GLOO = b"[Gloo] Rank "  # printed for every connection; it cannot be turned off
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class ProcessGroup:
    """The processes, from the start of the first to the end of the last.

    Args:
        grace: seconds from the signal that asks them to end to the one that ends them.
        variables: of the environment, for all of them, besides those of this process.
    """

    def __init__(self, grace: float, variables: dict[str, str]) -> None:
        self._grace = grace
        self._variables = variables
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
            env=_environment(number, one_thread=core is not None) | self._variables,
            start_new_session=True,  # Ctrl-C comes here only; and what the process starts is ended with it
            preexec_fn=_prepared(core),  # no thread runs here that could hold a lock
        )
        self._processes.append(process)
        for stream, target in (process.stdout, sys.stdout), (process.stderr, sys.stderr):
            if stream is not None:
                self._outputs.register(stream, selectors.EVENT_READ, _Output(stream, f"[{number}] " if number else "", target))

    def watch(self, signals: Sequence[int], again: str = "") -> int:
        """Copy what they print until all have ended; when one fails, say so and end the others.

        Args:
            signals: those that this process gets, as they come: the first one is passed on, the second ends all at once.
            again: what follows when one fails, as it is printed; but after `BAD_INPUT` nothing does.

        Returns:
            The exit code: 0 if all have ended with it, whatever made them; or that of the process that failed first, or 128 and the number
            of the signal that ended it or this process.
        """
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
                what = [f"process {failed} {how}", "ending the others" if living else "", again if code != BAD_INPUT else ""]
                say("; ".join(filter(None, what)))
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
        return code if code and any(process.returncode for process in self._processes) else 0

    def close(self) -> None:
        """End all that are left."""
        self._end(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for key in self._outputs.get_map().values():
            key.data.source.close()
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
                key.data.source.close()
        return bool(ready)


@dataclass
class _Output:
    """One of the two outputs of a process: whole lines go from `source` to `target`, each behind `prefix`."""

    source: IO[bytes]
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


def say(message: str) -> None:
    """Print a line of the launcher's own."""
    _print(f"jpipe: {message}\n", sys.stderr)


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
    # The same modules in the same places as here; lines that do not wait in a buffer; a GPU each, as NCCL wants it, which listens at
    # a loopback address; and no warning that recoverability is experimental.
    changes = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
    changes["JPIPE_LAUNCHER"] = str(os.getpid())  # train.console.preemption, which imports JAX, has the name too
    changes["JAX_LOCAL_DEVICE_IDS"] = own.get("JAX_LOCAL_DEVICE_IDS", str(number))
    changes["NCCL_SOCKET_IFNAME"] = own.get("NCCL_SOCKET_IFNAME", "lo")
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
