"""Measured programs: processes that start once and then run steps on request, in turn with others, always with time limits."""

import bisect
import contextlib
import json
import math
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

READY_SECONDS, RUN_SECONDS = 240.0, 300.0
_ERROR = re.compile(r"(\[rank\d+\]: )?[\w.]+(Error|Exception|Exit): ")  # as a traceback of Python ends


class ProgramFailed(Exception):
    """A program failed; the message has its name and last lines."""


class Program:
    """Several processes that run one program together, to use in a `with` statement, which always kills them at its end.

    Args:
        name: of the program, for messages.
        commands: the command line of each process.
        cores: the core that each process is pinned to.
        environment: variables in addition to those of this process.
    """

    def __init__(
        self, name: str, commands: Sequence[Sequence[str]], cores: Sequence[int], environment: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._processes: list[_Process] = []
        try:
            for command, core in zip(commands, cores, strict=True):
                self._processes.append(_Process(command, core, {**os.environ, **(environment or {})}))
        except BaseException:
            self.close()
            raise

    def facts(self, seconds: float = READY_SECONDS) -> list[dict[str, Any]]:
        """Return what each process prints when it is ready.

        Args:
            seconds: how long to wait for each.

        Raises:
            ProgramFailed: a process ended, or the time is over.
        """
        return [self._answer(process, seconds) for process in self._processes]

    def run(self, steps: int, seconds: float = RUN_SECONDS) -> list[dict[str, Any]]:
        """Let all processes run `steps` steps, and return their answers.

        Args:
            steps: how many, at least 2.
            seconds: how long to wait for each.

        Raises:
            ProgramFailed: a process ended, or the time is over.
        """
        return self.ask(str(steps), seconds)

    def ask(self, line: str, seconds: float = RUN_SECONDS) -> list[dict[str, Any]]:
        """Send a line to all processes, and return their answers.

        Args:
            line: what the program understands.
            seconds: how long to wait for each.

        Raises:
            ProgramFailed: a process ended, or the time is over.
        """
        for process in self._processes:
            process.tell(line)
        return [self._answer(process, seconds) for process in self._processes]

    def close(self) -> None:
        """Kill all processes."""
        for process in self._processes:
            process.kill()

    def __enter__(self) -> "Program":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, process: "_Process", seconds: float) -> dict[str, Any]:
        try:
            answer = process.answers.get(timeout=seconds)
        except queue.Empty:
            raise ProgramFailed(f"{self.name}: no answer within {seconds:.0f} s{self._last_words()}") from None
        if answer is None:
            raise ProgramFailed(f"{self.name}: a process ended with exit code {process.exit_code()}{self._last_words()}")
        return answer

    def _last_words(self) -> str:
        """Return the error of the process that ended first; the other processes may only have lost their peer."""
        ended = [process for process in self._processes if process.exit_code() is not None]
        words = [line for process in sorted(ended, key=lambda process: process.ended) if (line := process.last_words())]
        return f": {words[0]}" if words else ""


class _Process:
    def __init__(self, command: Sequence[str], core: int, environment: Mapping[str, str]) -> None:
        self.answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.ended = math.inf
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill
        self._process: Any  # Any, because the type of Popen says that its pipes may be None
        # A session of its own: its children, if it has any, are killed with it, and Ctrl-C reaches only the one who cleans up.
        self._process = subprocess.Popen(  # noqa: S603 - our own programs
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment, text=True, start_new_session=True
        )
        os.sched_setaffinity(self._process.pid, {core})  # before it has started any thread: they inherit it
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # it ended: the reader says so
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        with contextlib.suppress(BrokenPipeError):  # it ended without reading its input
            self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def exit_code(self) -> int | None:
        try:
            return self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if _ERROR.match(line)]  # lines from C++ may follow it
        return (errors or lines or [""])[-1][:400]

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.startswith("{"):  # gloo writes to standard output as well
                self.answers.put(json.loads(line))
        self.ended = time.monotonic()
        self.answers.put(None)


def python_module(module: str, *arguments: object, python: str = sys.executable) -> list[str]:
    """Return the command line that runs a module of this project.

    Args:
        module: its full name.
        arguments: what it is given.
        python: which Python.
    """
    return [python, "-m", module, *map(str, arguments)]


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def steps_per_second(ends: Sequence[Sequence[float]]) -> float:
    """Return the steps per second of all processes together, while all of them run; a step counts once for each process.

    Args:
        ends: for each process when each of its steps ended. The time before the first end, such as filling a pipeline, is excluded.

    Raises:
        ValueError: the processes did not run at the same time.
    """
    begin, end = max(times[0] for times in ends), min(times[-1] for times in ends)
    if end <= begin:
        raise ValueError("the processes did not run at the same time")
    return sum(_steps_until(end, times) - _steps_until(begin, times) for times in ends) / (end - begin)


def _steps_until(moment: float, ends: Sequence[float]) -> float:
    """Count steps since the first end, including fractions of a step."""
    after = min(max(bisect.bisect_left(ends, moment), 1), len(ends) - 1)
    before = after - 1
    return before + (moment - ends[before]) / (ends[after] - ends[before])
