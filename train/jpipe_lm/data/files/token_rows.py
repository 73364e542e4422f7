"""Read rows of token ids, such as a column `input_ids`; each row is a document that another program tokenized."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jpipe.errors import short
from jpipe_lm.data.tokenizer import LARGEST_VOCABULARY
from jpipe_train.data import sources
from jpipe_train.data.files.arrow import Column
from jpipe_train.data.files.records import records, setting_of
from jpipe_train.data.files.wrong_lines import Place, WrongLine, WrongLines, value_of


class TokenRow(NamedTuple):
    """A document.

    Attributes:
        tokens: its ids, in uint32; perhaps none.
        held_out: whether it is for validation.
        place: its file and row.
        size: how many bytes of the file it takes.
    """

    tokens: np.ndarray
    held_out: bool
    place: Place
    size: int


def read(files: Sequence[Path], key: str, fraction: float, where: str, largest: int = LARGEST_VOCABULARY) -> Iterator[TokenRow]:
    """Yield the documents of all files in order; after a wrong row the remaining ones are only checked.

    Args:
        files: the files to read.
        key: the column with the ids.
        fraction: share to hold out, chosen by hash.
        where: the key or the option that names the files, for messages.
        largest: ids are below this.

    Raises:
        InputError: a row is wrong, or there is no such column.
    """
    wrong = WrongLines(where, f"or set {setting_of(where, 'tokens_key')}")
    columns = [Column(key, "tokens_key", "ids")]
    for file in files:
        for line, tokens in records(file, wrong, columns, lambda record: _ids(record, key, largest)):
            if not wrong.number:
                held_out = sources.place_of(tokens.astype("<u4").tobytes()) < fraction
                yield TokenRow(tokens, held_out, line.place, line.size)
    wrong.check()


def _ids(record: Mapping[str, Any], key: str, largest: int) -> np.ndarray:
    """Return the ids of a row.

    Raises:
        WrongLine: there are none, or they are out of range.
    """
    value = value_of(record, key)
    if not isinstance(value, np.ndarray):
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise WrongLine(f"expected a list of integers in {key!r}, found {short(value)[:100]}")
        try:
            value = np.asarray(value, np.int64)
        except OverflowError:
            raise WrongLine(f"expected ids below {largest:,} in {key!r}, found {short(max(value, key=abs))[:100]}") from None
    if value.dtype.kind not in "iu":  # there are nulls among them
        raise WrongLine(f"expected a list of integers in {key!r}, found null among them")
    if value.size and (value.min() < 0 or value.max() >= largest):
        wrong = value.max() if value.max() >= largest else value.min()
        raise WrongLine(f"expected ids from 0 to {largest - 1:,} in {key!r}, found {wrong}")
    return value.astype(np.uint32)
