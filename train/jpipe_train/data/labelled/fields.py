"""Read texts with labels from JSON lines, and from CSV and TSV files."""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jpipe.errors import short
from jpipe_train.config.config import Config
from jpipe_train.data.files import lines
from jpipe_train.data.files.lines import WrongLine, WrongLines

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
    for file in files:
        records = _of_table if file.suffix.lower() in _TABLES else _of_json
        for line, record in records(file, config, wrong):
            with wrong.at(file, line):
                example = Example(_rows(record, config), _label(record, config, numbers), (file, line))
                if not wrong.number:
                    yield example
    wrong.check()


def _of_json(file: Path, config: Config, wrong: WrongLines) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in lines.read(file, wrong):
        if line.strip():
            with wrong.at(file, number):
                yield number, lines.json_object(line, config.data.text_key)


def _of_table(file: Path, _: Config, wrong: WrongLines) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the rows of a table by the names in its first row."""

    def decoded() -> Iterator[str]:
        for _, line in lines.read(file, wrong):
            try:
                yield line.decode().removeprefix("\ufeff")
            except UnicodeDecodeError as error:
                raise WrongLine(f"expected text in UTF-8, found the byte {line[error.start]:#04x} at {error.start}") from None

    table = csv.reader(decoded(), **_TABLES[file.suffix.lower()])
    names: list[str] = []
    while True:
        try:
            record = next(table, None)
        except (csv.Error, WrongLine) as error:  # nothing behind it can be read
            wrong.add(file, table.line_num + isinstance(error, WrongLine), str(error))
            return
        if record is None:
            return
        with wrong.at(file, table.line_num):
            if not names:
                names = record
            elif record and len(record) != len(names):
                raise WrongLine(f"expected {len(names)} fields, as in the first line, found {len(record)}")
            elif record:
                yield table.line_num, dict(zip(names, record, strict=True))


def _rows(record: Mapping[str, Any], config: Config) -> tuple[str | tuple[str, str], ...]:
    """Return the texts of an example."""
    data = config.data
    text = lines.text(record, data.text_key)
    second = None if data.second_key is None else lines.text(record, data.second_key)
    if config.model.head != "multiple_choice":
        return (text,) if second is None else ((text, second),)
    choices, expected = lines.value(record, data.choices_key), config.model.label_count
    if not isinstance(choices, list) or len(choices) != expected:
        found = f"{len(choices)} of them" if isinstance(choices, list) else type(choices).__name__
        raise WrongLine(f"expected a list of {expected} choices (model.labels) in {data.choices_key!r}, found {found}")
    before = "" if second is None else f"{second} "
    return tuple((text, before + lines.checked_text(choice, data.choices_key)) for choice in choices)


def _numbers_of_labels(config: Config) -> dict[str, int]:
    """Return the number of each label by its name and by that number; where names are numbers, by name only."""
    names = config.model.labels if isinstance(config.model.labels, list) else []
    by_number = {} if any(name.isdecimal() for name in names) else {str(i): i for i in range(config.model.label_count or 0)}
    return by_number | {name: i for i, name in enumerate(names)}


def _label(record: Mapping[str, Any], config: Config, numbers: Mapping[str, int]) -> int | float:
    label, key = lines.value(record, config.data.label_key), config.data.label_key
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
