"""Read rows of JSON lines, tables, Parquet and Arrow files, in constant memory."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Generic, TypeVar

from jpipe import InputError
from jpipe.errors import shortened
from jpipe.files import open_to_read
from jpipe_train.data import sources
from jpipe_train.data.files import arrow, json_lines, kinds, streams, tables
from jpipe_train.data.files.arrow import Column
from jpipe_train.data.files.wrong_lines import Place, WrongLine, WrongLines

_Value = TypeVar("_Value")
_Read = tuple[Place, Mapping[str, Any] | WrongLine, int, int]
"""The place of a row, its values by column or the error in them, and the number of bytes read and decompressed so far."""
_Rows = Iterator[_Read]
_MOST_ROWS, _MOST_BYTES = 1024, 2**18  # the most rows of a block, and the most decompressed bytes read for it


@dataclass(slots=True)  # frozen dataclasses take twice as long to create
class Row(Generic[_Value]):
    """A row of a file."""

    value: _Value  # the content of the row, converted by a format
    held_out: bool  # whether the row is for validation
    place: Place  # the file and the number of the row
    size: int  # the number of bytes of the file, which may be compressed, that were read for the row


def records(
    files: Sequence[Path],
    wrong: WrongLines,
    columns: Sequence[Column],
    convert: Callable[[Mapping[str, Any]], _Value],
    key: Callable[[_Value], bytes],
    share: float,
    convert_all: Callable[[Sequence[Mapping[str, Any]]], Sequence[_Value] | None] | None = None,
) -> Iterator[Row[_Value]]:
    """Yield the rows of all files in order. Empty rows are left out. After a wrong row, the remaining rows are only checked.

    Args:
        files: the files to read. Each is read as Parquet, Arrow or a table if it has such content, otherwise as JSON lines.
        wrong: collects the errors; the caller reports them.
        convert: converts the values of a row, a mapping from columns to values, or raises WrongLine.
        key: returns bytes for a converted row; their hash decides whether the row is held out.
        share: the share of the rows to hold out.
        convert_all: converts a block of rows, or returns None if they must be converted one by one. None: rows are not read in blocks.

    Raises:
        InputError: a column is missing or has another type; pyarrow is needed but not installed; or no row after a wrong row can be read.
        OSError: a file is damaged.
    """
    for file in files:
        before = 0
        with open_to_read(file) as opened:
            rows = _rows(file, opened, wrong.where, columns)
            blocks = ([row] for row in rows) if convert_all is None else _blocks(rows, file, os.fstat(opened.fileno()).st_size)
            for block in blocks:
                values = None
                if convert_all is not None:
                    read = [record for _, record, *_ in block if not isinstance(record, WrongLine)]
                    values = convert_all(read) if len(read) == len(block) else None
                for i, (place, record, position, _) in enumerate(block):
                    try:
                        if isinstance(record, WrongLine):
                            raise record
                        value = convert(record) if values is None else values[i]
                    except WrongLine as error:
                        wrong.add(place, error)
                        continue
                    if not wrong.number:
                        yield Row(value, sources.place_of(key(value)) < share, place, max(position - before, 0))
                    before = max(position, before)


def _blocks(rows: _Rows, file: Path, packed: int) -> Iterator[list[_Read]]:
    """Yield blocks of rows, and check that a file of `packed` bytes does not unpack to too many bytes."""
    block: list[_Read] = []
    start = 0
    for row in rows:
        block.append(row)
        if len(block) == _MOST_ROWS or row[3] - start >= _MOST_BYTES:
            streams.check_unpacked(row[3], packed, file)
            yield block
            block, start = [], row[3]
    if block:
        yield block


def _rows(file: Path, opened: BufferedReader, where: str, columns: Sequence[Column]) -> _Rows:
    def check(names: Sequence[str], other_types: Mapping[str, str]) -> None:
        _check_columns(file, where, columns, names, other_types)

    kind = kinds.rows_in(file)
    match None if kind is None else kind.reader:
        case "parquet" | "arrow file" | "arrow stream" as form:
            yield from arrow.rows(opened, file, form, columns, check)
            return
        case "table":
            assert kind is not None
            found: Iterator[tuple[Place, Any]]
            stream = streams.unpacked(opened, file)
            found = tables.rows(stream, file, kind.delimiter, lambda names: check(names, {}))
        case _:
            stream = streams.unpacked(opened, file)
            found = json_lines.rows(stream, file, columns[0].name)
    for place, record in found:
        yield place, record, opened.tell(), stream.tell()


def _check_columns(file: Path, where: str, columns: Sequence[Column], names: Sequence[str], other_types: Mapping[str, str]) -> None:
    """Check that each column exists exactly once and has the right type."""
    counts = Counter(names)
    for column in columns:
        setting = "rename it" if column.key is None else f"set {setting_of(where, column.key)}"
        if not counts[column.name] and column.is_needed:
            first = "; the first line of a table must have the names of the columns" if names and all(map(kinds.is_number, names)) else ""
            raise InputError(
                where=where,
                expected=f"the column {column.name!r} in '{file}'",
                found=shortened(list(map(repr, names)), 20)[:400],
                change=f"{setting}{first}",
            )
        if counts[column.name] > 1:
            raise InputError(
                where=where, expected=f"each column of '{file}' once", found=f"the name {column.name!r} twice", change="rename one of them"
            )
        if column.name in other_types:
            more = "; save classes as integers, or choose loss.name: squared_error for other numbers" if column.kind == "classes" else ""
            raise InputError(
                where=where,
                expected=f"{_EXPECTED.get(column.kind, 'values')} in the column {column.name!r} of '{file}'",
                found=f"{other_types[column.name][:100]}, and the columns {shortened(list(map(repr, names)), 20)[:400]}",
                change=f"{setting}{more}",
            )


_EXPECTED = {"text": "text", "ids": "lists of integers", "numbers": "numbers or lists of them", "classes": "integers or lists of them"}


def setting_of(where: str, key: str) -> str:
    """Return the config key or command option that names a column of the files in `where`."""
    return f"data.{key}" if where.startswith("data.") else f"--{key.replace('_', '-')}"
