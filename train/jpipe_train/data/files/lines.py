"""Lines of files that may be a stranger's, and objects of JSON in them; wrong ones are reported together."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jpipe import InputError
from jpipe.errors import short
from jpipe.files import open_to_read
from jpipe_train.data import sources

LONGEST = 2**26
"""Bytes of a line."""
_MOST_LISTED = 5  # of wrong lines, one by one


class WrongLine(Exception):
    """An error in a line."""


class WrongLines:
    """Lines that cannot be used.

    Attributes:
        where: the key or the option that names the files, for messages.
        number: how many lines there are.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.number = 0
        self._first: list[tuple[str, str]] = []

    def add(self, file: Path, line: int, message: str) -> None:
        """Add a line."""
        self.number += 1
        if len(self._first) < _MOST_LISTED:
            self._first.append((f"'{file}', line {line}", message))

    @contextlib.contextmanager
    def at(self, file: Path, line: int) -> Iterator[None]:
        """Add this line if a `WrongLine` is raised inside."""
        try:
            yield
        except WrongLine as error:
            self.add(file, line, f"{error}{sources.guess(file) if line == 1 else ''}")

    def check(self) -> None:
        """Raise if a wrong line was added.

        Raises:
            InputError: with the first of them, and how many there are.
        """
        if self.number == 1:
            raise InputError(f"{self.where}: {self._first[0][0]}: {self._first[0][1]}; correct it, or name other keys")
        if self.number:
            first = "; ".join(": ".join(each) for each in self._first)
            more = f"; and {self.number - len(self._first):,} more" if self.number > len(self._first) else ""
            raise InputError(f"{self.where}: {self.number:,} lines are wrong: {first}{more}; correct them, or name other keys")


def read(file: Path, wrong: WrongLines) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, with their numbers; a line that is too long is wrong, and the last one."""
    number = 0
    with open_to_read(file) as opened:
        while line := opened.readline(LONGEST + 1):
            number += 1
            if len(line) > LONGEST:
                wrong.add(file, number, f"expected at most {LONGEST:,} bytes, found more; is this a file of lines?")
                return
            yield number, line


def json_object(line: bytes, example: str) -> dict[str, Any]:
    """Return the object of JSON in a line.

    Args:
        line: the line.
        example: a key that it is to have, for messages.

    Raises:
        WrongLine: it has none.
    """
    try:
        values = json.loads(line)
    except UnicodeDecodeError as error:
        raise WrongLine(f"expected text in UTF-8, found the byte {line[error.start]:#04x} at {error.start}") from None
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error).split(";")[0]
        raise WrongLine(f"expected an object of JSON, found {short(line[:60].decode(errors='replace'))}: {reason}") from None
    if not isinstance(values, dict):
        raise WrongLine(f'expected an object of JSON such as {{"{example}": …}}, found {type(values).__name__}')
    return values


def value(values: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key.

    Raises:
        WrongLine: there is none.
    """
    if key not in values:
        raise WrongLine(f"expected the key {key!r}, found {short(list(values)[:10])}")
    return values[key]


def text(values: Mapping[str, Any], key: str) -> str:
    """Return the text of a key.

    Raises:
        WrongLine: there is none.
    """
    return checked_text(value(values, key), key)


def checked_text(found: Any, key: str) -> str:
    """Return a value that is text.

    Raises:
        WrongLine: it is something else.
    """
    if not isinstance(found, str):
        raise WrongLine(f"expected text in {key!r}, found {type(found).__name__}")
    try:
        found.encode()
    except UnicodeEncodeError:
        raise WrongLine(f"expected characters in {key!r}, found half of one (a lone surrogate)") from None
    return found
