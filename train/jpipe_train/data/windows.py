"""Rows of a batch, each made from its index alone: windows of a running text, or whole examples packed together."""

from collections.abc import Callable
from functools import cached_property

import jax
import numpy as np
from jaxtyping import Int32, Int64

from jpipe import InputError
from jpipe_train.data.documents import Documents
from jpipe_train.data.rows import Tree

UNCOUNTED = -1
"""The label of a position whose prediction does not count."""
Inputs = Int32[np.ndarray, " s"] | dict[str, Int32[np.ndarray, " s"]]


def row_spec(seq_len: int, *, segments: bool) -> tuple[Tree, Tree]:
    """Return the shapes and dtypes of a row: inputs, with or without segments, and labels."""
    tokens = jax.ShapeDtypeStruct((seq_len,), np.dtype(np.int32))
    return {"tokens": tokens, "segments": tokens} if segments else tokens, tokens


class Windows:
    """A text in consecutive windows of `seq_len` tokens, each with the text shifted by one token as labels.

    With `apart` the documents in a window are numbered from 1, as segments, and no document predicts the beginning of the next.
    """

    def __init__(self, documents: Documents, seq_len: int, *, apart: bool = False):
        self._documents = documents
        self._seq_len = seq_len
        self._apart = apart

    def __len__(self) -> int:
        return max(self._documents.size - 1, 0) // self._seq_len

    def __getitem__(self, index: int) -> tuple[Inputs, Int32[np.ndarray, " s"]]:
        start = index * self._seq_len
        window = self._documents.read(start, start + self._seq_len + 1)
        tokens, labels = window[:-1], window[1:]
        if not self._apart:
            return tokens, labels
        begins = self._documents.begins(start + 1, start + self._seq_len + 1)
        segments = np.cumsum(np.concatenate([np.ones(1, bool), begins[:-1]]), dtype=np.int32)
        return {"tokens": tokens, "segments": segments}, np.where(begins, np.int32(UNCOUNTED), labels)


class Examples:
    """Prompts with their answers, unsplit, packed in order into rows of `seq_len` positions (next fit).

    Which are in which row depends on their lengths only. Only tokens of answers are labels. The rest of a row is segment 0.

    Args:
        documents: the examples.
        seq_len: positions of a row.
        cut: whether what is longer is cut, and left out if nothing of its answer remains; otherwise it is an error.
        place: names an example for messages.

    Raises:
        InputError: an example is too long.
    """

    def __init__(self, documents: Documents, seq_len: int, *, cut: bool = False, place: Callable[[int], str] | None = None):
        self._documents = documents
        self._seq_len = seq_len
        starts, ends, answers = documents.examples() if documents.shards else (np.zeros(0, np.int64),) * 3
        slots = ends - starts - 1  # of an example of n tokens n - 1 are inputs, and n - 1 are labels
        if not cut and np.any(slots > seq_len):
            first = int(np.argmax(slots > seq_len))
            number = int(np.count_nonzero(slots > seq_len)) - 1
            more = f", and more in {number:,} {'others' if number > 1 else 'other'}" if number else ""
            name = place(first) if place is not None else f"data.path: example {first}"
            raise InputError(
                f"{name}: expected at most {seq_len + 1} tokens (model.seq_len {seq_len}, plus one), found {slots[first] + 1}"
                f"{more}; shorten it, raise model.seq_len, or cut such examples with data.too_long: cut"
            )
        slots = np.minimum(slots, seq_len)
        some = np.maximum(answers - starts, 1) <= slots  # is there a label?
        self.left_out = int(slots.size - np.count_nonzero(some))
        self._starts, self._slots, self._answers = starts[some], slots[some], answers[some]

    def __len__(self) -> int:
        return self._rows.size - 1

    def __getitem__(self, index: int) -> tuple[Inputs, Int32[np.ndarray, " s"]]:
        tokens, segments = np.zeros(self._seq_len, np.int32), np.zeros(self._seq_len, np.int32)
        labels = np.full(self._seq_len, UNCOUNTED, np.int32)
        at = 0
        for number, i in enumerate(range(self._rows[index], self._rows[index + 1]), 1):
            slots, start = int(self._slots[i]), int(self._starts[i])
            whole = self._documents.read(start, start + slots + 1)
            answer = max(int(self._answers[i]) - start, 1)  # the first label that counts
            tokens[at : at + slots], segments[at : at + slots] = whole[:-1], number
            labels[at + answer - 1 : at + slots] = whole[answer:]
            at += slots
        return {"tokens": tokens, "segments": segments}, labels

    @property
    def fill(self) -> float:
        """The share of positions that are not padding."""
        return float(self._slots.sum()) / max(len(self) * self._seq_len, 1)

    @cached_property
    def _rows(self) -> Int64[np.ndarray, " rows"]:
        """The first example of each row, followed by the number of examples."""
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._slots)])
        rows = [0]
        while rows[-1] < self._slots.size:
            rows.append(int(np.searchsorted(before, before[rows[-1]] + self._seq_len, "right")) - 1)
        return np.asarray(rows, np.int64)
