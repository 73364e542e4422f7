"""Text for a terminal, escaped so that names from strangers (of files, layers, keys) cannot control it."""

import logging
import sys


def printable(line: str) -> str:
    """The line with all characters that are not printable, including line breaks, escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def count(number: int, one: str, plural: str = "s") -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {one}{'' if number == 1 else plural}"


def duration(seconds: float) -> str:
    """`0:07`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def fail(message: str, code: int) -> int:
    """Print on standard error why a command ends; return its exit code."""
    print(f"jpipe: {message}", file=sys.stderr, flush=True)
    return code


class _Lines(logging.Handler):
    """Prints on standard error what the library logs, in lines like those of the commands."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"jpipe: {printable(record.getMessage())}", file=sys.stderr, flush=True)


LINES = _Lines()
