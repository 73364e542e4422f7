"""Read JSON lines. Each line is an object."""

import json
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from jpipe.errors import short
from jpipe_train.data import sources
from jpipe_train.data.files import wrong_lines
from jpipe_train.data.files.wrong_lines import Place, WrongLine


def rows(opened: BufferedReader, file: Path, example: str) -> Iterator[tuple[Place, dict[str, Any] | WrongLine]]:
    """Yield the object in each line, or the error in the line; empty lines are left out."""
    number = 0
    while line := opened.readline(wrong_lines.LONGEST + 1):
        number += 1
        place = Place(file, number)
        if len(line) > wrong_lines.LONGEST:
            yield place, WrongLine(f"expected at most {wrong_lines.LONGEST:,} bytes, found more; is this a file of JSON lines?")
            return
        if not line.strip():
            continue
        try:
            yield place, _object(line, example)
        except WrongLine as error:
            yield place, WrongLine(f"{error}{sources.guess(file)}") if number == 1 else error


def _object(line: bytes, example: str) -> dict[str, Any]:
    """Return the object in a line. Raise WrongLine if the line is not an object."""
    try:
        values = json.loads(line)
    except UnicodeDecodeError as error:
        raise WrongLine(f"expected text in UTF-8, found the byte {line[error.start]:#04x} at {error.start}") from None
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", None) or str(error).split(";")[0]
        raise WrongLine(f"expected a JSON object, found {short(line[:60].decode(errors='replace'))}: {reason}") from None
    if not isinstance(values, dict):
        raise WrongLine(f'expected a JSON object such as {{"{example}": …}}, found {type(values).__name__}')
    return values
