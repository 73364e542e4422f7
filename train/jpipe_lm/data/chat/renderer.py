"""Render chat templates in a separate process that cannot run forever, fill the memory or open files."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from jpipe_lm.data.chat.template import Template
from jpipe_train.console.terminal import printable

_PROGRAM = Path(__file__).with_name("render_in_child.py")
_ENVIRONMENT = "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TZ"
"""The environment variables that the process gets: those that Python needs, without secrets."""
_BLOCK = 2**16
TRAINING_TIME = "2024-07-26T12:00:00"
"""The time that `strftime_now` returns in training data, so that a run that resumes on another day has the same rows. It is the default
date in Llama 3's template."""


class Failure(Exception):
    """A conversation cannot be rendered. The message says why."""


class Ended(Failure):
    """The process has ended because it reached a limit."""


class NoTemplate(Failure):
    """The template cannot be compiled, so it renders no conversation."""


@dataclass(frozen=True)
class Limits:
    """The limits for rendering a conversation."""

    seconds: int = 10  # the largest computing time in seconds
    memory: int = 2**29  # the largest memory of the process in bytes
    characters: int = 2**24  # the largest number of characters in the text


class Rendered(NamedTuple):
    """The text of a conversation, or of a part of a conversation that ends with an answer."""

    text: str  # the whole text
    # the position of the first character of each answer of the assistant, and the position after its last character
    answers: tuple[tuple[int, int], ...]
    is_marked: bool = False  # whether the template marks answers. If not, an answer may include spaces after its final special token.


class Renderer:
    """A context that renders conversations with a template. Leaving the context ends its processes.

    Args:
        template: the template to render.
        now: the time that `strftime_now` returns; None for the current time.
        limits: the limits of each conversation.
    """

    def __init__(self, template: Template, now: str | None = None, limits: Limits | None = None) -> None:
        self._template, self._now, self._limits = template, now, limits or Limits()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # the keys are sources of templates

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for source in list(self._processes):
            self._end(source)

    def _end(self, source: str) -> None:
        process = self._processes.pop(source)
        process.kill()
        process.communicate()

    def start(self) -> None:
        """Compile the template now, and not for the first conversation. Raise NoTemplate if it cannot be compiled."""
        self._start(self._template.source())

    def answers(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> list[Rendered]:
        """Render a whole conversation, and find the answers of the assistant. Raise Failure if the template cannot render it.

        Usually one text is returned. If the template writes an answer differently once messages follow it, there are several texts. Each
        ends with an answer, and its spans mark the answers that are written as at the end of their own text.
        """
        return self._ask({"messages": messages, "tools": tools, "answers": True})

    def text(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None, *, generation_prompt: bool = False) -> str:
        """Render a conversation without looking for answers, and possibly with the beginning of an answer at the end.

        `tools` are those that the assistant may call. Raise Failure if the template cannot render the conversation.
        """
        request = {"messages": messages, "tools": tools, "answers": False, "generation_prompt": generation_prompt}
        return self._ask(request)[0].text

    def _ask(self, request: Mapping[str, Any]) -> list[Rendered]:
        source = self._template.source(with_tools=request["tools"] is not None)
        if source not in self._processes:
            self._start(source)
        return self._exchange(source, request)

    def _start(self, source: str) -> None:
        command = [sys.executable, "-P", str(_PROGRAM)]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        # In a session of its own the process does not receive Ctrl-C from the terminal.
        options: dict[str, Any] = {"env": environment, "cwd": "/", "bufsize": 0, "start_new_session": True}
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, **options)  # noqa: S603 - our own program
        except OSError as error:
            raise Ended(f"cannot start a process for the template: {error.strerror}") from None
        self._processes[source] = process
        limits = {"seconds": self._limits.seconds, "memory": self._limits.memory, "characters": self._limits.characters}
        try:
            self._exchange(source, {"template": source, "variables": dict(self._template.variables), "now": self._now, **limits})
        except Failure as error:
            if source in self._processes:
                self._end(source)
            raise NoTemplate(f"{self._template.where}: {error}") from None

    def _exchange(self, source: str, request: Mapping[str, Any]) -> list[Rendered]:
        """Send a request and return the reply. The reply is checked, because the template may be a stranger's."""
        try:
            line = self._reply(self._processes[source], json.dumps(request).encode() + b"\n")
        except BaseException:  # even for Ctrl-C, because a late reply would be taken for the reply to the next request
            self._end(source)
            raise
        try:
            reply = json.loads(line)
            if "error" in reply:
                raise Failure(printable(str(reply["error"])))
            is_marked = reply.get("is_marked") is True
            found = [Rendered(text, tuple((start, stop) for start, stop in spans), is_marked) for text, spans in reply["texts"]]
            numbers = [number for each in found for span in each.answers for number in span]
            if not all(isinstance(each.text, str) for each in found) or not all(type(number) is int for number in numbers):
                raise ValueError("another form")
        except (ValueError, TypeError, KeyError, RecursionError):
            self._end(source)
            raise Ended("expected text from the template, found other data") from None
        for each in found:
            ends = [0, *(number for span in each.answers for number in span), len(each.text)]
            if ends != sorted(ends):
                raise Failure("expected answers one after the other, found answers that overlap")
        return found

    def _reply(self, process: subprocess.Popen[bytes], request: bytes) -> bytes:
        """Send a request, and return the line of the reply. Raise Ended if the process has ended, or does not reply."""
        assert process.stdin is not None
        assert process.stdout is not None
        until = (
            time.monotonic() + 60 + 10 * self._limits.seconds
        )  # the system limits the computing time; this limit is for a hanging process
        most = 12 * self._limits.characters + 2**20  # a character takes at most 12 bytes of JSON
        try:
            process.stdin.write(request)
        except OSError:
            raise self._ended() from None
        parts: list[bytes] = []
        size = 0
        while True:
            ready, _, _ = select.select([process.stdout], [], [], max(until - time.monotonic(), 0))
            part = os.read(process.stdout.fileno(), _BLOCK) if ready else b""
            parts.append(part)
            size += len(part)
            if part.endswith(b"\n"):
                return b"".join(parts)
            if not part or size > most:
                raise self._ended()

    def _ended(self) -> Ended:
        return Ended(
            f"the template needs more than {self._limits.seconds} s or {self._limits.memory / 2**20:,.0f} MiB for a conversation, or has "
            "ended its process"
        )
