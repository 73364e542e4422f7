"""Prepare text for a terminal. Names of files, layers and keys are escaped, because they could contain control characters."""

import logging
import sys
from collections.abc import Sequence


def printable(line: str) -> str:
    """Return the line with all characters that are not printable, including line breaks, escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def count(number: int, one: str, plural: str = "s") -> str:
    """Return a text such as `1 step` or `2 steps`."""
    return f"{number} {one}{'' if number == 1 else plural}"


def shortened(text: str, most: int) -> str:
    """Return a text of at most `most` characters; `…` replaces the end of a longer one."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def duration(seconds: float) -> str:
    """Return a text such as `0:07` or `1:02:03`."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


def first_line(error: BaseException) -> str:
    """Return the first line of the message of an error, or the name of its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def fail(message: str, code: int) -> int:
    """Print a message on standard error, and return the exit code `code`."""
    print(f"jpipe: {message}", file=sys.stderr, flush=True)
    return code


class _Lines(logging.Handler):
    """Prints the library's log records on standard error, in the same form as the commands' messages."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"jpipe: {printable(record.getMessage())}", file=sys.stderr, flush=True)


LINES = _Lines()
