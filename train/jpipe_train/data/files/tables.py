"""Read tables as text: CSV and TSV with the names of the columns in the first row."""

import csv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path

from jpipe.errors import short
from jpipe_train.data.files import wrong_lines
from jpipe_train.data.files.wrong_lines import Place, WrongLine

_TAB = "'\t'"  # csv writes a tab like this in messages
_QUOTES = "a cell that begins with a quote must end with a quote, and each quote inside must be doubled"


def rows(
    opened: BufferedReader, file: Path, delimiter: str, check: Callable[[Sequence[str]], None]
) -> Iterator[tuple[Place, dict[str, str] | WrongLine]]:
    """Yield the place of each row with a dict from columns to cells, or with the error in the row. Empty rows are left out.

    `check` gets the names of the columns, and raises if one is missing.
    """
    csv.field_size_limit(wrong_lines.LONGEST)  # for the whole process; texts are often longer than the default, 131,072 characters
    table = csv.reader(_decoded(opened), delimiter=delimiter, strict=True)
    names: list[str] = []
    while True:
        try:
            record = next(table, None)
        except csv.Error as error:  # no row after an error can be read
            yield Place(file, table.line_num), WrongLine(f"{str(error).replace(_TAB, 'a tab')}; {_QUOTES}")
            return
        except WrongLine as error:
            yield Place(file, table.line_num + 1), error
            return
        if record is None:
            return
        place = Place(file, table.line_num)
        if not record:
            continue
        if names:
            is_whole = len(record) == len(names)
            wrong = WrongLine(f"expected {len(names)} fields, as in the first line, found {len(record)}")
            yield place, dict(zip(names, record, strict=True)) if is_whole else wrong
            continue
        names = record
        if twice := [name for name, number in Counter(names).items() if number > 1]:
            yield (
                place,
                WrongLine(f"expected each column once, found {short(twice[0])} twice in the first line, which names the columns"),
            )
            return
        check(names)


def _decoded(opened: BufferedReader) -> Iterator[str]:
    while line := opened.readline(wrong_lines.LONGEST + 1):
        if len(line) > wrong_lines.LONGEST:
            raise WrongLine(f"expected at most {wrong_lines.LONGEST:,} bytes, found more; is this a table?")
        try:
            yield line.decode().removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            raise WrongLine(f"expected text in UTF-8, found the byte {line[error.start]:#04x} at {error.start}") from None
