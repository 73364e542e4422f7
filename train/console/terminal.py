"""Words for a terminal: text of a stranger's (names of files, layers, keys) cannot drive it."""

import sys


def printable(line: str) -> str:
    """The line with everything that is not printable, line breaks too, written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def count(number: int, one: str, plural: str = "s") -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {one}{'' if number == 1 else plural}"


def duration(seconds: float) -> str:
    """`0:07`, `1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def first_line(error: Exception) -> str:
    """Of what the error says; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def fail(message: str, code: int) -> int:
    """Print on standard error why a command ends; returns its exit code."""
    print(f"jpipe: {message}", file=sys.stderr, flush=True)
    return code
