"""Read the examples that a config names, tokenize them, and split them between training and validation."""

import hashlib
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from jpipe import InputError
from jpipe_lm.config.sections import data_of, model_of
from jpipe_lm.data import document_rows, splits
from jpipe_lm.data import tokenizer as tokenizers
from jpipe_lm.data.labelled import fields
from jpipe_lm.data.labelled.fields import Example
from jpipe_lm.data.labelled.rows import LabelledRows
from jpipe_train.config.config import Config
from jpipe_train.console.terminal import count
from jpipe_train.data import sources
from jpipe_train.data.data import Examples
from jpipe_train.data.files.records import Row
from jpipe_train.data.files.wrong_lines import Place, WrongLine, WrongLines

_AT_ONCE = 2000  # rows that are tokenized together
_MOST_TYPES = 2  # the number of texts that BERT distinguishes


def read(config: Config, path: str | None = None) -> Examples:
    """Read the examples that `config.data` names, or those at another path, all for validation.

    Raise InputError if they cannot be read, or are too long; or if the tokenizer has more tokens than the model's vocabulary.
    """
    data = data_of(config)
    splits.check_beside_weights(config)
    tokenizer = tokenizers.load(str(data.tokenizer), "data.tokenizer")
    document_rows.check_vocabulary(config, tokenizer.vocab_size)
    rows = _Rows(config, tokenizer)
    parts = sources.parts_of(data, path)
    for file, share, where in parts:
        with sources.readable(where):
            _, files = sources.find_files(file, where)
            rows.add_all(fields.read(files, config, share, where), where)
    train, validation = rows.examples()

    def digest() -> str:
        return hashlib.sha256(" ".join([tokenizer.sha256, train.digest(), validation.digest()]).encode()).hexdigest()

    remarks = *rows.remarks(), *sources.left_out_of(data, path)
    return Examples(train, validation, sources.named(path or data.path), digest, remarks)


class _Rows:
    """Tokenizes examples for training and for validation."""

    def __init__(self, config: Config, tokenizer: tokenizers.Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._most, self._cut = config.model.seq_len, 0
        self._cuts = data_of(config).too_long == "cut"
        self._dtype: np.dtype[Any] = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
        # For training and for validation:
        self._tokens: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        self._types: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        self._labels: tuple[list[int | float], list[int | float]] = ([], [])

    def add_all(self, examples: Iterable[Row[Example]], where: str) -> None:
        """Tokenize and add examples."""
        too_long = WrongLines(where, "raise model.seq_len, or cut such texts with data.too_long: cut")
        for batch in tokenizers.batched(examples, lambda example: len(example.value.rows), _AT_ONCE):
            texts = [row for example in batch for row in example.value.rows]
            tokenized = iter(self._tokenizer.whole(texts, self._most if self._cuts else None))
            for example in batch:
                for row in itertools.islice(tokenized, len(example.value.rows)):
                    self._check(row, example.place, where)
                    self._cut += row.is_cut
                    if row.tokens.size > self._most:
                        error = WrongLine(f"expected at most {self._most} tokens (model.seq_len), found {row.tokens.size}")
                        too_long.add(example.place, error)
                    self._tokens[example.held_out].append(row.tokens.astype(self._dtype))
                    self._types[example.held_out].append(row.types.astype(np.uint8))
                self._labels[example.held_out].append(example.value.label)
        too_long.check()

    def examples(self) -> list[LabelledRows]:
        """Return the examples for training and the examples for validation."""
        model = model_of(self._config)
        rest: dict[str, Any] = {
            "seq_len": model.seq_len,
            "choices": model.label_count if model.head == "multiple_choice" else None,
            "padding": self._tokenizer.padding or 0,
            "has_types": model.kind == "bert",
        }
        return [
            LabelledRows(
                np.concatenate([np.zeros(0, self._dtype), *tokens]),
                np.concatenate([np.zeros(0, np.uint8), *types]),
                np.cumsum(np.asarray([each.size for each in tokens], np.int64), dtype=np.int64),
                np.asarray(labels, np.float32 if model.head == "regression" else np.int32),
                **rest,
            )
            for tokens, types, labels in zip(self._tokens, self._types, self._labels, strict=True)
        ]

    def remarks(self) -> tuple[str, ...]:
        """Return a line about texts that were cut, if there are any."""
        return (f"{count(self._cut, 'text')} cut to the {self._most} tokens of a row",) if self._cut else ()

    def _check(self, row: tokenizers.Row, place: Place, where: str) -> None:
        if not row.tokens.size:
            raise InputError(where=where, key=place, expected="text", found="a text without any token", change="remove the example")
        if model_of(self._config).kind == "bert" and (types := 1 + int(row.types.max())) > _MOST_TYPES:
            raise InputError(
                where=self._tokenizer.where,
                expected=f"a tokenizer with {_MOST_TYPES} types of tokens, like BERT",
                found=f"a tokenizer with {types}",
                change="use a tokenizer made for BERT",
            )
