"""The processes of `jpipe launch`: each has its own session, its output is marked with its number, and all end together."""

import contextlib
import functools
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, TextIO

from jpipe_train.console import interrupt
from jpipe_train.launch.local.child import end_with

BAD_INPUT = 2  # the exit code of a job that would fail again
_REPORT_LIMIT = 3.0  # seconds from the first failure to the signal that ends the other processes
_SAVE_LIMIT = 600.0  # seconds that a run may take to save and end when there is no hurry
_TICK = 0.05  # seconds between two checks of the processes
_LONGEST_LINE = 1 << 16
_GLOO = b"[Gloo] Rank "  # gloo always prints this for every connection


class ProcessGroup:
    """The processes, from the start of the first to the end of the last.

    `grace` is the number of seconds from the signal that asks them to end to the signal that kills them.
    """

    def __init__(self, grace: float, variables: dict[str, str]) -> None:
        self._grace, self._variables = grace, variables
        self._processes: list[subprocess.Popen[bytes]] = []
        self._outputs = selectors.DefaultSelector()
        self._deadline = math.inf  # time at which processes that have not ended are killed
        self._first: int | None = None  # the number of the process that failed first
        self._killed: set[int] = set()  # numbers of the processes that did not end when they were asked to

    def start(self, arguments: Sequence[str], number: int, core: int | None, slot: int) -> None:
        """Start process `number`, on CPU core `core` unless it is None, and on GPU `slot`."""
        outputs = [None if number == 0 and target.isatty() else subprocess.PIPE for target in (sys.stdout, sys.stderr)]
        piped = number == 0 and sys.stdin is not None and not sys.stdin.isatty()  # the terminal belongs to another session
        process = subprocess.Popen(  # noqa: S603, the command is the user's own
            arguments,
            stdin=None if piped else subprocess.DEVNULL,
            stdout=outputs[0],
            stderr=outputs[1],
            env=_environment(slot, one_thread=core is not None) | self._variables,
            start_new_session=True,  # only the launcher gets Ctrl-C; a process and its children are ended together
            preexec_fn=functools.partial(_prepare, os.getpid(), core),  # safe: no thread runs here that could hold a lock
        )
        self._processes.append(process)
        for stream, target in (process.stdout, sys.stdout), (process.stderr, sys.stderr):
            if stream is not None:
                self._outputs.register(stream, selectors.EVENT_READ, _Output(stream, f"[{number}] " if number else "", target))

    def watch(self, signals: Sequence[int], again: str = "", stop: Callable[[], bool] | None = None) -> int:
        """Copy the output until all processes have ended. If one fails, report it and end the others.

        The first signal to this process is forwarded, and the second kills all processes. Messages about a failure announce what follows by
        `again`, except after `BAD_INPUT`. Once `stop` returns True, the processes must save and end, and no exit code is a failure. Return
        the exit code, as `launch.main` does.
        """
        code: int | None = None
        report_until = math.inf  # until then the other processes may report the failure; then they are asked to end
        living, was_stopped = True, False
        while living:
            for process in self._processes:
                if process.returncode is None and process.poll() is not None:
                    _signal(process, signal.SIGKILL)  # its children
            living = any(process.returncode is None for process in self._processes)
            self._copy(_TICK)
            now, failed = time.monotonic(), self._failed()
            if code is None and signals:
                code = 128 + signals[0]
                self._end(signals[0], self._grace)
            elif code is None and failed is not None and was_stopped:
                self._deadline = min(self._deadline, now + self._grace)
            elif code is None and failed is not None:
                self._first, report_until = failed, now + min(_REPORT_LIMIT, self._grace)
                code = self._processes[failed].returncode
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                code = 128 - code if code < 0 else code  # as in a shell
                announced = "ending the other processes" if living else "", again if code != BAD_INPUT else ""
                say("; ".join(filter(None, (f"process {failed} {how}", *announced))))
            if now > report_until and self._deadline == math.inf:
                self._end(signal.SIGTERM, self._grace)
            if code is None and failed is None and living and not was_stopped and stop is not None and stop():
                was_stopped = True
                self._end(signal.SIGTERM, _SAVE_LIMIT)
            if len(signals) > 1 or now > self._deadline:
                self._end(signal.SIGKILL)
        end = time.monotonic() + self._grace
        while self._copy(_TICK) and time.monotonic() < end:  # output left in the pipes; processes outside the group may still print
            pass
        if sys.stdout.isatty():
            _print("\x1b[?25h", sys.stdout)  # an interrupted progress bar has hidden the cursor
        return code if code and any(process.returncode for process in self._processes) else 0

    @property
    def to_blame(self) -> list[int]:
        """After `watch`, return the numbers of the processes that caused the failure; empty if none failed.

        When a process is lost, the others end with an error, perhaps even earlier: a killed process closes its connections before it has
        ended. If a process hangs, the others fail first, and the hanging process must be killed.
        """
        if self._first is None:
            return []
        if self._processes[self._first].returncode > 0 and self._killed:
            return sorted(self._killed)
        killed = [n for n, process in enumerate(self._processes) if process.returncode == -signal.SIGKILL and n not in self._killed]
        return killed or [self._first]

    def close(self) -> None:
        """Kill all remaining processes."""
        self._end(signal.SIGKILL)
        for process in self._processes:
            process.wait()
        for key in self._outputs.get_map().values():
            key.data.source.close()
        self._outputs.close()

    def _failed(self) -> int | None:
        """Return the number of a failed process, preferably one that a signal ended, because others may fail as a consequence."""
        failed = [(process.returncode > 0, number) for number, process in enumerate(self._processes) if process.returncode]
        return min(failed)[1] if failed else None

    def _end(self, number: int, limit: float = math.inf) -> None:
        """Send the signal to the live processes; `watch` kills those that have not ended after `limit` seconds."""
        alive = {n for n, process in enumerate(self._processes) if process.returncode is None}
        if number == signal.SIGKILL:
            self._killed |= alive
        for n in alive:
            _signal(self._processes[n], number)
        self._deadline = time.monotonic() + limit

    def _copy(self, seconds: float) -> bool:
        """Wait for output and copy it. Return whether there was any."""
        ready = self._outputs.select(seconds)
        for key, _ in ready:
            if data := os.read(key.fd, 1 << 16):
                key.data.take(data)
            else:
                key.data.take(b"\n" if key.data.remainder else b"")
                self._outputs.unregister(key.fileobj)
                key.data.source.close()
        return bool(ready)


@dataclass
class _Output:
    """One output stream of a process. Whole lines are copied from `source` to `target` after `prefix`."""

    source: IO[bytes]
    prefix: str
    target: TextIO
    remainder: bytes = b""  # an incomplete line

    def take(self, data: bytes) -> None:
        """Copy the complete lines, except gloo's."""
        *lines, self.remainder = (self.remainder + data).split(b"\n")
        if len(self.remainder) > _LONGEST_LINE:
            lines, self.remainder = [*lines, self.remainder], b""
        for line in lines:
            if not line.startswith(_GLOO):
                _print(f"{self.prefix}{line.decode(errors='replace')}\n", self.target)


def say(message: str) -> None:
    """Print a line from the launcher."""
    _print(f"jpipe: {message}\n", sys.stderr)


def _print(text: str, target: TextIO) -> None:
    # On a terminal this may overwrite the progress bar of process 0, which is drawn again below.
    target.write(f"\r\x1b[2K{text}" if target.isatty() else text)
    target.flush()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process and to its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _environment(slot: int, *, one_thread: bool) -> dict[str, str]:
    # One GPU each, listening at a loopback address; and no warning that recoverability is experimental.
    defaults = {"JAX_LOCAL_DEVICE_IDS": str(slot), "NCCL_SOCKET_IFNAME": "lo", "TF_CPP_MIN_LOG_LEVEL": "2"}
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:  # the user's choice for all: processes on one GPU must be different hosts for NCCL
        defaults["NCCL_HOSTID"] = f"slot-{slot}"
    # The same import path as here, and unbuffered lines.
    fixed = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1", interrupt.LAUNCHER: str(os.getpid())}
    if one_thread:
        fixed["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    return defaults | os.environ | fixed


def _prepare(parent: int, core: int | None) -> None:
    """In a child, before its command runs: tie it to its parent, and bind it to a core."""
    end_with(parent)
    if core is not None:
        os.sched_setaffinity(0, {core})
