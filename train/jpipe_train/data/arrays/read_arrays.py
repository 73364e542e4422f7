"""Read the arrays that a config names, and split their rows between training and validation."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jpipe import InputError
from jpipe_train.config.config import Config
from jpipe_train.data import sources
from jpipe_train.data.arrays import numpy_files
from jpipe_train.data.arrays.array_rows import Chosen, Memory, RowsOfArrays, Stored
from jpipe_train.data.arrays.arrays_section import ArraysConfig
from jpipe_train.data.arrays.blocks import arrays_of
from jpipe_train.data.arrays.numbers import Key, array_of, first_not_integer, fitted, result_type
from jpipe_train.data.data import Examples
from jpipe_train.data.files import kinds
from jpipe_train.data.files.arrow import Column
from jpipe_train.data.files.records import records
from jpipe_train.data.files.wrong_lines import WrongLine, WrongLines

_Rows = tuple[Stored, np.ndarray | None]
"""Stored rows, and the indices of the rows that are chosen; None means all rows."""


def read(config: Config, path: str | None = None) -> Examples:
    """Read the arrays that `config.data` names, or those at another path, all for validation.

    Raise InputError if they cannot be read, have rows of different shapes, or are not classes although the loss needs classes.
    """
    data, classes = config.data, config.loss_name == "cross_entropy"
    assert isinstance(data, ArraysConfig)
    both = _Array(data.inputs_key, "inputs_key"), _Array(data.targets_key, "targets_key", is_target=True, has_classes=classes)
    parts = sources.parts_of(data, path)
    stored: list[list[list[_Rows]]] = []
    largest: list[tuple[int, str] | None] = []
    for part in parts:
        with sources.readable(part.where):
            names, files = sources.find_files(part.path, part.where, content="numbers")
            opened = numpy_files.find(names, files, [array.key for array in both], part.where)
            stored.append(_of_rows(files, both, part) if opened is None else _of_numpy(opened, both, part))
            largest += [side[1][0].largest() for side in stored[-1]] if classes else []
            if not sum(len(side[0][0]) for side in stored[-1]):
                raise InputError(
                    where=part.where,
                    expected=f"rows of numbers in {sources.named(part.path)}",
                    found="no rows",
                    change="name files with rows",
                )
    for part, of in zip(parts, stored, strict=True):
        for side in of:
            both[0].check_fit(side[0][0], part.where)
    train, validation = (RowsOfArrays((both[0].chosen(of[0]), both[1].chosen(of[1]))) for of in (stored[0][0], stored[-1][1]))

    def digest() -> str:
        every = [array.digest() for rows in (train, validation) for array in rows.arrays]
        return hashlib.sha256(" ".join(every).encode()).hexdigest()

    remarks = sources.left_out_of(data, path)
    most = max((each for each in largest if each is not None), key=lambda each: each[0], default=None)
    return Examples(train, validation, sources.named(path or data.path), digest, remarks, most)


class _Array:
    """The inputs or the targets of all parts: the shape of all rows, and the dtype that can hold all numbers.

    Attributes:
        key: the name of the array, or the names of its columns.
        setting: the config key in `data` that has this name.
        is_target: whether this array has the targets.
        shape: the shape of a row; None before the first row.
    """

    def __init__(self, key: Key, setting: str, *, is_target: bool = False, has_classes: bool = False) -> None:
        self.key, self.setting, self.is_target, self._has_classes = key, setting, is_target, has_classes
        self.shape: tuple[int, ...] | None = None
        self._dtype = np.dtype(np.int32 if has_classes else np.float32)

    def of_row(self, record: Mapping[str, Any]) -> np.ndarray:
        """Return the numbers of a row. Raise WrongLine if the row has no such numbers, or they differ in form from the earlier rows."""
        numbers = array_of(record, self.key, is_target=self.is_target)
        self.add(numbers.shape, numbers.dtype, lambda: first_not_integer(record, self.key, numbers))
        return numbers

    def of_rows(self, records: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
        """Return the numbers of all rows as one array, or None if the rows must be converted one by one; see `blocks.arrays_of`."""
        numbers = arrays_of(records, self.key, is_target=self.is_target)
        if numbers is not None:
            try:
                self.add(numbers.shape[1:], numbers.dtype, lambda: "")
            except WrongLine:
                return None
        return numbers

    def add(self, shape: tuple[int, ...], dtype: np.dtype[Any], example: Callable[[], str]) -> None:
        """Record the shape of a row and the dtype of its numbers; `example` returns one of them, for a message.

        Raise WrongLine if the shape differs from earlier rows, or the loss needs another dtype.
        """
        if self._has_classes and dtype.kind == "f":
            raise WrongLine(
                f"expected integers in {self._named}, because the cross-entropy needs classes, found {example()}; save classes as "
                "integers, or choose loss.name: squared_error for other numbers"
            )
        if self.shape is None:
            self.shape, self._dtype = shape, dtype
        if shape != self.shape:
            raise WrongLine(f"expected the shape {list(self.shape)} of the first row in {self._named}, found {list(shape)}")
        if dtype != self._dtype:
            self._dtype = result_type(np.result_type(dtype, self._dtype), is_target=self.is_target)

    def check_fit(self, stored: Stored, where: str) -> None:
        """Check that the common dtype of all files can hold the integers of rows in memory. Rows of NumPy files are checked when read."""
        for number, place in stored.extremes if isinstance(stored, Memory) else ():
            try:
                fitted(np.asarray(number), self._dtype)
            except WrongLine as error:
                raise InputError(
                    f"{error}; {self._dtype} is the dtype of the other rows",
                    where=where,
                    key=place,
                    change="correct the number, or save all files with one dtype",
                ) from None

    def chosen(self, rows: _Rows) -> Chosen:
        """Return the rows as an array with the common dtype."""
        return Chosen(*rows, self.shape or (), self._dtype)

    @property
    def columns(self) -> list[Column]:
        """The columns of files that this array is read from."""
        kind: Literal["numbers", "classes"] = "classes" if self._has_classes else "numbers"
        return [Column(name, self.setting, kind) for name in ([self.key] if isinstance(self.key, str) else self.key)]

    @property
    def _named(self) -> str:
        return repr(self.key) if isinstance(self.key, str) else ", ".join(map(repr, self.key[:3])) + (", …" if len(self.key) > 3 else "")


def _of_numpy(opened: Sequence[numpy_files.FileRows], both: Sequence[_Array], part: sources.DataPath) -> list[list[_Rows]]:
    """Return the training rows and the held-out rows of NumPy files, chosen by the hash of a row's index."""
    for array, file in zip(both, opened, strict=True):
        try:
            dtype = result_type(file.dtype, is_target=array.is_target)
            array.add(file.shape[1:], dtype, partial(_example, file))
        except WrongLine as error:
            raise InputError(str(error), where=part.where, key=file.name, change="correct the array, or name other arrays") from None
    held_out = place_of_numbers(len(opened[0])) < part.share
    return [[(file, np.flatnonzero(held_out == side)) for file in opened] for side in (False, True)]


def _example(file: numpy_files.FileRows) -> str:
    """Describe the first number of an array for messages."""
    return f"{file[0].flat[0]} ({file.dtype})" if len(file) else str(file.dtype)


def _of_rows(files: Sequence[Path], both: Sequence[_Array], part: sources.DataPath) -> list[list[_Rows]]:
    """Read rows into memory. Return the training rows and the held-out rows, chosen by the hash of a row's inputs."""
    wrong, memory = WrongLines(part.where), [[Memory() for _ in both] for _ in (False, True)]
    columns = {column.name: column for array in both for column in array.columns}
    for file in files:
        if (kind := kinds.kind_of(file)) is not None and kind.reader is None and not kind.is_unpacked:
            raise InputError(
                where=part.where,
                expected=f"rows of numbers in '{file}'",
                found=f"another kind of file: it seems to be {kind.name}",
                change="give Parquet, JSON lines, CSV or NumPy files",
            )

    def convert(record: Mapping[str, Any]) -> list[np.ndarray]:
        return [array.of_row(record) for array in both]

    def convert_all(records: Sequence[Mapping[str, Any]]) -> list[list[np.ndarray]] | None:
        arrays = []
        for array in both:
            if (numbers := array.of_rows(records)) is None:
                return None
            arrays.append(numbers)
        return [[numbers[i, ...].copy() for numbers in arrays] for i in range(len(records))]  # a view would keep the whole block

    for row in records(files, wrong, [*columns.values()], convert, lambda arrays: arrays[0].tobytes(), part.share, convert_all):
        for kept, numbers in zip(memory[row.held_out], row.value, strict=True):
            kept.add(numbers, row.place)
    wrong.check()
    return [[(kept, None) for kept in side] for side in memory]


def place_of_numbers(count: int) -> np.ndarray:
    """Hash each number below `count` to a number that is uniform in [0, 1), with SplitMix64 (Steele et al., OOPSLA 2014)."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(11)) / 2.0**53
