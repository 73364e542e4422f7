"""Read texts with labels from JSON lines, and from CSV and TSV files."""

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from jpipe.errors import short
from jpipe.files import open_to_read
from jpipe_train.config.config import Config
from jpipe_train.data.files.json_lines import WrongLine, WrongLines, objects, text_of, value_of

_LONGEST = 2**26  # bytes of a line of a table
_Value = TypeVar("_Value")
_TABLES: dict[str, dict[str, Any]] = {".csv": {"strict": True}, ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}}
"""Arguments of `csv.reader` for the files that are no JSON lines, by the end of their names. A field has at most 131,072 characters."""


class Example(NamedTuple):
    """A text or a pair of texts with a label; or one for each choice, with the number of the right one.

    Attributes:
        rows: the texts and pairs.
        label: the number of the class or of the choice, or for regression the number to predict.
        place: the file and the line.
    """

    rows: tuple[str | tuple[str, str], ...]
    label: int | float
    place: tuple[Path, int]

    @property
    def content(self) -> bytes:
        """All of the text."""
        return "\0".join(text for row in self.rows for text in ((row,) if isinstance(row, str) else row)).encode()


def read(files: Sequence[Path], config: Config, where: str) -> Iterator[Example]:
    """Yield the examples of all files in order; after a wrong line the remaining ones are only checked.

    Args:
        files: to read.
        config: of the run; its `data` names the keys, and its `model` the head and the labels.
        where: the key that names the files, for messages.

    Raises:
        InputError: lines are wrong.
    """
    wrong, numbers = WrongLines(where), _numbers_of_labels(config)

    def example(record: Mapping[str, Any]) -> tuple[tuple[str | tuple[str, str], ...], int | float]:
        return _rows(record, config), _label(record, config, numbers)

    for file in files:
        if file.suffix.lower() in _TABLES:
            records = _of_table(file, wrong, example)
        else:
            records = ((line.number, value) for line, value in objects(file, wrong, config.data.text_key, example))
        for number, (rows, label) in records:
            if not wrong.number:
                yield Example(rows, label, (file, number))
    wrong.check()


def _of_table(file: Path, wrong: WrongLines, convert: Callable[[Mapping[str, str]], _Value]) -> Iterator[tuple[int, _Value]]:
    """Yield what the rows of a table hold, as `objects` does; the first row has the names of the columns."""
    names: list[str] = []
    with open_to_read(file) as opened:
        table = csv.reader(_decoded(opened), **_TABLES[file.suffix.lower()])
        while True:
            try:
                record = next(table, None)
            except (csv.Error, WrongLine) as error:  # nothing behind it can be read
                wrong.add(file, table.line_num + isinstance(error, WrongLine), str(error))
                return
            if record is None:
                return
            if not names:
                names = record
                if twice := [name for i, name in enumerate(names) if name in names[:i]]:
                    wrong.add(file, table.line_num, f"expected each column once, found the name {short(twice[0])} twice")
                    return
                continue
            if not record:
                continue
            try:
                if len(record) != len(names):
                    raise WrongLine(f"expected {len(names)} fields, as in the first line, found {len(record)}")
                value = convert(dict(zip(names, record, strict=True)))
            except WrongLine as error:
                wrong.add(file, table.line_num, str(error))
                continue
            yield table.line_num, value


def _decoded(opened: BinaryIO) -> Iterator[str]:
    while line := opened.readline(_LONGEST + 1):
        if len(line) > _LONGEST:
            raise WrongLine(f"expected at most {_LONGEST:,} bytes, found more; is this a table?")
        try:
            yield line.decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise WrongLine(f"expected text in UTF-8, found the byte {line[error.start]:#04x} at {error.start}") from None


def _rows(record: Mapping[str, Any], config: Config) -> tuple[str | tuple[str, str], ...]:
    """Return the texts of an example."""
    data = config.data
    text = text_of(value_of(record, data.text_key), data.text_key)
    second = None if data.second_key is None else text_of(value_of(record, data.second_key), data.second_key)
    if config.model.head != "multiple_choice":
        return (text,) if second is None else ((text, second),)
    choices, expected = value_of(record, data.choices_key), config.model.label_count
    if not isinstance(choices, list) or len(choices) != expected:
        found = f"{len(choices)} of them" if isinstance(choices, list) else type(choices).__name__
        raise WrongLine(f"expected a list of {expected} choices (model.labels) in {data.choices_key!r}, found {found}")
    before = "" if second is None else f"{second} "
    return tuple((text, before + text_of(choice, data.choices_key)) for choice in choices)


def _numbers_of_labels(config: Config) -> dict[str, int]:
    """Return the number of each label by its name and by that number; where names are numbers, by name only."""
    names = config.model.labels if isinstance(config.model.labels, list) else []
    by_number = {} if any(name.isdecimal() for name in names) else {str(i): i for i in range(config.model.label_count or 0)}
    return by_number | {name: i for i, name in enumerate(names)}


def _label(record: Mapping[str, Any], config: Config, numbers: Mapping[str, int]) -> int | float:
    label, key = value_of(record, config.data.label_key), config.data.label_key
    if config.model.head == "regression":
        return _number(label, key)
    if isinstance(label, int | str):
        name = str(label).lower() if isinstance(label, bool) else str(label).strip()
        if name in numbers:
            return numbers[name]
    raise WrongLine(f"expected a label of model.labels ({_described(config)}) in {key!r}, found {short(label)}")


def _described(config: Config) -> str:
    labels = config.model.labels
    return short(labels[:10]) if isinstance(labels, list) else f"0 to {(labels or 1) - 1}"


def _number(label: Any, key: str) -> float:
    try:
        number = math.nan if isinstance(label, bool) or not isinstance(label, int | float | str) else float(label)
    except (ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= 3e38:  # the largest number of float32
        raise WrongLine(f"expected a number in {key!r}, found {short(label)}")
    return number
