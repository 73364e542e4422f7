"""Read texts with labels from rows of files: JSON lines, tables, Parquet and Arrow."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jpipe.errors import short
from jpipe_lm.config.sections import data_of, model_of
from jpipe_train.config.config import Config
from jpipe_train.data.files.arrow import Column
from jpipe_train.data.files.kinds import is_number
from jpipe_train.data.files.records import Row, records
from jpipe_train.data.files.wrong_lines import WrongLine, WrongLines, text_of, value_of


class Example(NamedTuple):
    """A text, or a pair of texts, with a label. For multiple choice: a pair for each choice, and the number of the right one."""

    rows: tuple[str | tuple[str, str], ...]  # the texts or pairs of texts
    label: int | float  # the number of the class or of the right choice; for regression, the number to predict

    @property
    def content(self) -> bytes:
        """All texts as bytes."""
        return "\0".join(text for row in self.rows for text in ((row,) if isinstance(row, str) else row)).encode()


def read(files: Sequence[Path], config: Config, share: float, where: str) -> Iterator[Row[Example]]:
    """Yield the examples of all files in order, as `data` and `model` in the config describe them; `share` of them are held out.

    Raise InputError if rows are wrong.
    """
    wrong, numbers = WrongLines(where), _numbers_of_labels(config)

    def example(record: Mapping[str, Any]) -> Example:
        return Example(_rows(record, config), _label(record, config, numbers))

    yield from records(files, wrong, _columns(config), example, lambda example: example.content, share)
    wrong.check()


def _columns(config: Config) -> list[Column]:
    """Return the columns to read."""
    data, labels = data_of(config), model_of(config).labels
    names = tuple(labels) if isinstance(labels, list) else ()
    columns = [Column(str(data.text_key), "text_key", "text"), Column(data.label_key, "label_key", "label", labels=names)]
    if data.second_key is not None:
        columns.append(Column(data.second_key, "second_key", "text"))
    if model_of(config).head == "multiple_choice":
        columns.append(Column(data.choices_key, "choices_key"))
    return columns


def _rows(record: Mapping[str, Any], config: Config) -> tuple[str | tuple[str, str], ...]:
    """Return the texts of an example."""
    data = data_of(config)
    text = text_of(value_of(record, str(data.text_key)), str(data.text_key))
    second = None if data.second_key is None else text_of(value_of(record, data.second_key), data.second_key)
    if model_of(config).head != "multiple_choice":
        return (text,) if second is None else ((text, second),)
    choices, expected = value_of(record, data.choices_key), model_of(config).label_count
    if not isinstance(choices, list) or len(choices) != expected:
        found = f"{len(choices)} choices" if isinstance(choices, list) else type(choices).__name__
        raise WrongLine(f"expected a list of {expected} choices (model.labels) in {data.choices_key!r}, found {found}")
    before = "" if second is None else f"{second} "
    return tuple((text, before + text_of(choice, data.choices_key)) for choice in choices)


def _numbers_of_labels(config: Config) -> dict[str, int]:
    """Return the numbers of labels by name, and by number as text unless names are numbers."""
    model = model_of(config)
    names = model.labels if isinstance(model.labels, list) else []
    by_number = {} if any(name.isdecimal() for name in names) else {str(i): i for i in range(model.label_count or 0)}
    return by_number | {name: i for i, name in enumerate(names)}


def _label(record: Mapping[str, Any], config: Config, numbers: Mapping[str, int]) -> int | float:
    key = data_of(config).label_key
    label = value_of(record, key)
    if model_of(config).head == "regression":
        return _number(label, key)
    if isinstance(label, int | str):
        name = str(label).lower() if isinstance(label, bool) else str(label).strip()
        if name in numbers:
            return numbers[name]
    raise WrongLine(f"expected a label of model.labels ({_described(config)}) in {key!r}, found {short(label)}")


def _described(config: Config) -> str:
    labels = model_of(config).labels
    return short(labels[:10]) if isinstance(labels, list) else f"0 to {(labels or 1) - 1}"


def _number(label: Any, key: str) -> float:
    try:
        is_one = is_number(label) if isinstance(label, str) else isinstance(label, int | float) and not isinstance(label, bool)
        number = float(label) if is_one else math.nan
    except OverflowError:
        number = math.nan
    if not abs(number) <= 3e38:  # the largest number of float32
        raise WrongLine(f"expected a number in {key!r}, found {short(label)}")
    return number
