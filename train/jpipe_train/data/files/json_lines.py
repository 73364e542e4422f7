"""Read files of JSON lines, each an object, and report all wrong lines together."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jpipe import InputError
from jpipe.errors import short
from jpipe.files import open_to_read
from jpipe_train.data import sources

_LONGEST = 2**26  # bytes of a line
_MOST_LISTED = 5  # of wrong lines, one by one
_Value = TypeVar("_Value")


class Line(NamedTuple):
    """A line of a file.

    Attributes:
        number: of the line, from 1.
        size: in bytes.
    """

    number: int
    size: int


class WrongLine(Exception):
    """An error in a line."""


class WrongLines:
    """Lines that cannot be used, reported together, so that one run finds all of them.

    Attributes:
        where: the key or the option that names the files, for messages.
        hint: the end of the message.
        number: how many there are.
    """

    def __init__(self, where: str, hint: str = "or name other keys") -> None:
        self.where, self.hint = where, hint
        self.number = 0
        self._first: list[tuple[str, str]] = []

    def add(self, file: Path, line: int, message: str) -> None:
        """Add an error in a line."""
        self.number += 1
        if len(self._first) < _MOST_LISTED:
            self._first.append((f"'{file}', line {line}", message))

    def check(self) -> None:
        """Raise if a wrong line was added.

        Raises:
            InputError: with the first of them, and how many there are.
        """
        if self.number == 1:
            raise InputError(f"{self.where}: {self._first[0][0]}: {self._first[0][1]}; correct it, {self.hint}")
        if self.number:
            first = "; ".join(": ".join(each) for each in self._first)
            more = f"; and {self.number - len(self._first):,} more" if self.number > len(self._first) else ""
            raise InputError(f"{self.where}: {self.number:,} lines are wrong: {first}{more}; correct them, {self.hint}")


def objects(file: Path, wrong: WrongLines, example: str, convert: Callable[[Mapping[str, Any]], _Value]) -> Iterator[tuple[Line, _Value]]:
    """Yield what each line of a file holds; lines that are empty or wrong are left out.

    Args:
        file: to read.
        wrong: where errors go.
        example: a key that an object has, for messages.
        convert: returns what is yielded for an object, or raises WrongLine.
    """
    number = 0
    with open_to_read(file) as opened:
        while line := opened.readline(_LONGEST + 1):
            number += 1
            if len(line) > _LONGEST:
                wrong.add(file, number, f"expected at most {_LONGEST:,} bytes, found more; is this a file of JSON lines?")
                break
            if not line.strip():
                continue
            try:
                value = convert(_object(line, example))
            except WrongLine as error:
                wrong.add(file, number, f"{error}{sources.guess(file) if number == 1 else ''}")
                continue
            yield Line(number, len(line)), value


def _object(line: bytes, example: str) -> dict[str, Any]:
    """Return the object in a line.

    Raises:
        WrongLine: there is none.
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


def value_of(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key.

    Raises:
        WrongLine: there is no such key.
    """
    if key not in record:
        raise WrongLine(f"expected the key {key!r}, found {short(list(record)[:10])}")
    return record[key]


def text_of(value: Any, key: str) -> str:
    """Return the value of a key, which is to be text.

    Raises:
        WrongLine: it is none.
    """
    if not isinstance(value, str):
        raise WrongLine(f"expected text in {key!r}, found {type(value).__name__}")
    check_characters(value, f" in {key!r}")
    return value


def check_characters(text: str, where: str = "") -> None:
    """Check that a text has whole characters, as all is that a tokenizer can read.

    Raises:
        WrongLine: it has half of one.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise WrongLine(f"expected characters{where}, found half of one (a lone surrogate)") from None
