"""Read rows of token ids, such as a column `input_ids`. Each row is a document that another program has tokenized."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jpipe.errors import short
from jpipe_lm.data.tokenizer import LARGEST_VOCABULARY
from jpipe_train.data.files.arrow import Column
from jpipe_train.data.files.records import Row, records, setting_of
from jpipe_train.data.files.wrong_lines import WrongLine, WrongLines, value_of


def read(files: Sequence[Path], key: str, share: float, where: str, largest: int = LARGEST_VOCABULARY) -> Iterator[Row[np.ndarray]]:
    """Yield the documents of all files in order as arrays of ids in uint32, which may be empty.

    `share` of the documents are held out. Raise InputError if an id is not below `largest`, a row is wrong, or the column is missing.
    """
    wrong = WrongLines(where, f"or set {setting_of(where, 'tokens_key')}")
    columns = [Column(key, "tokens_key", "ids")]
    yield from records(files, wrong, columns, lambda record: _ids(record, key, largest), lambda ids: ids.astype("<u4").tobytes(), share)
    wrong.check()


def _ids(record: Mapping[str, Any], key: str, largest: int) -> np.ndarray:
    """Return the ids of a row. Raise WrongLine if the value is not a list of ids, or an id is out of range."""
    value = value_of(record, key)
    if not isinstance(value, np.ndarray):
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise WrongLine(f"expected a list of integers in {key!r}, found {short(value)[:100]}")
        try:
            value = np.asarray(value, np.int64)
        except OverflowError:
            raise WrongLine(f"expected ids below {largest:,} in {key!r}, found {short(max(value, key=abs))[:100]}") from None
    if value.dtype.kind not in "iu":  # some are null
        raise WrongLine(f"expected a list of integers in {key!r}, found null among them")
    if value.size and (value.min() < 0 or value.max() >= largest):
        wrong = value.max() if value.max() >= largest else value.min()
        raise WrongLine(f"expected ids from 0 to {largest - 1:,} in {key!r}, found {wrong}")
    return value.astype(np.uint32)
