"""Check the values in lines and rows of files, and report all wrong lines in one message."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jpipe import InputError
from jpipe.errors import short

LONGEST = 2**26  # bytes of a line, or of the text in a row
_MOST_LISTED = 5  # at most this many wrong lines are listed one by one


class Place(NamedTuple):
    """A place in a file, for messages."""

    file: Path  # the file
    number: int = 0  # the number of the line or row, from 1; 0 means the whole file
    unit: str = "line"  # the word for what is counted, such as "line" or "row"

    def __str__(self) -> str:
        return f"'{self.file}', {self.unit} {self.number}" if self.number else f"'{self.file}'"


class WrongLine(Exception):
    """An error in a line.

    Args:
        message: what was expected and what was found.
        change: what to change, if later lines cannot be read; None if they can.
    """

    def __init__(self, message: str, change: str | None = None) -> None:
        super().__init__(message)
        self.change = change


class WrongLines:
    """Collects wrong lines and reports them together, so that one run finds all of them.

    Attributes:
        where: the config key or option that names the files, for messages.
        hint: the end of the message, with what else the user can do.
        number: the number of wrong lines.
    """

    def __init__(self, where: str, hint: str = "or name other keys") -> None:
        self.where, self.hint = where, hint
        self.number = 0
        self._unit = "line"
        self._first: list[tuple[str, str]] = []

    def add(self, place: Place, error: WrongLine) -> None:
        """Add an error in a line. Raise InputError if no later line can be read."""
        if error.change is not None:
            raise InputError(str(error), where=self.where, key=place, change=error.change) from None
        self.number += 1
        self._unit = place.unit
        if len(self._first) < _MOST_LISTED:
            self._first.append((str(place), str(error)))

    def check(self) -> None:
        """Raise InputError if there are wrong lines; the message has their number and the first of them."""
        if self.number == 1:
            raise InputError(self._first[0][1], where=self.where, key=self._first[0][0], change=f"correct it, {self.hint}")
        if self.number:
            first = "; ".join(": ".join(each) for each in self._first)
            more = f"; and {self.number - len(self._first):,} more" if self.number > len(self._first) else ""
            raise InputError(
                f"{self.number:,} {self._unit}s are wrong: {first}{more}", where=self.where, change=f"correct them, {self.hint}"
            )


def value_of(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key. Raise WrongLine if the row does not have the key."""
    if key not in record:
        raise WrongLine(f"expected the key {key!r}, found {short(list(record)[:10])}")
    return record[key]


def text_of(value: Any, key: str) -> str:
    """Return `value`, the value of a key, after checking that it is text. Raise WrongLine if the value is not text, or is too long."""
    if not isinstance(value, str):
        raise WrongLine(f"expected text in {key!r}, found {'null' if value is None else type(value).__name__}")
    if len(value) > LONGEST:
        raise WrongLine(f"expected at most {LONGEST:,} characters in {key!r}, found {len(value):,}")
    check_characters(value, f" in {key!r}")
    return value


def check_characters(text: str, where: str = "") -> None:
    """Check that a text has no lone surrogates, which a tokenizer cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise WrongLine(f"expected characters{where}, found half a character (a lone surrogate)") from None
