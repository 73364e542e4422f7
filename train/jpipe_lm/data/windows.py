"""Rows of a batch: windows of a running text, or whole examples packed together. A row depends only on its index."""

from collections.abc import Callable
from functools import cached_property

import jax
import numpy as np
from jaxtyping import Int32, Int64

from jpipe import InputError
from jpipe_lm.data.documents import Documents
from jpipe_train.data.rows import Tree

UNCOUNTED = -1
"""The label of a position that the loss ignores."""
Inputs = Int32[np.ndarray, " s"] | dict[str, Int32[np.ndarray, " s"]]


def row_spec(seq_len: int, *, segments: bool) -> tuple[Tree, Tree]:
    """Return the shapes and dtypes of a row: its inputs, with or without segments, and its labels."""
    tokens = jax.ShapeDtypeStruct((seq_len,), np.dtype(np.int32))
    return {"tokens": tokens, "segments": tokens} if segments else tokens, tokens


class Windows:
    """A text in consecutive windows of `seq_len` tokens. The labels are the text shifted by one token.

    With `apart` the documents in a window are segments, numbered from 1, and the last token of a document has no label. A text that is
    shorter than a window is padded; padding has segment 0 and labels that are ignored.
    """

    def __init__(self, documents: Documents, seq_len: int, *, apart: bool = False):
        self._documents = documents
        self._seq_len = seq_len
        self._apart = apart

    def __len__(self) -> int:
        size = self._documents.size
        return 1 if 1 < size <= self._seq_len else max(size - 1, 0) // self._seq_len

    def __getitem__(self, index: int) -> tuple[Inputs, Int32[np.ndarray, " s"]]:
        start = index * self._seq_len
        stop = min(start + self._seq_len + 1, self._documents.size)
        window = self._documents.read(start, stop)
        tokens, labels = self._padded(window[:-1], 0), self._padded(window[1:], UNCOUNTED)
        if not self._apart:
            return tokens, labels
        begins = self._documents.begins(start + 1, stop)
        segments = np.cumsum(np.concatenate([np.ones(1, bool), begins[:-1]]), dtype=np.int32)
        labels = np.where(self._padded(begins, 0), np.int32(UNCOUNTED), labels)
        return {"tokens": tokens, "segments": self._padded(segments, 0)}, labels

    def _padded(self, row: np.ndarray, value: int) -> np.ndarray:
        return np.pad(row, (0, self._seq_len - row.size), constant_values=value) if row.size < self._seq_len else row


class Filled:
    """Rows, followed by enough rows of padding with ignored labels to make `least` rows."""

    def __init__(self, rows: "Windows | Examples", least: int):
        self._rows, self._least = rows, least

    def __len__(self) -> int:
        return max(len(self._rows), self._least)

    def __getitem__(self, index: int) -> tuple[Inputs, Int32[np.ndarray, " s"]]:
        if index < len(self._rows):
            return self._rows[index]
        inputs, labels = self._rows[0]
        padding: Inputs = jax.tree.map(np.zeros_like, inputs)
        return padding, np.full_like(labels, UNCOUNTED)


class Examples:
    """Whole documents with answers, packed in order into rows of `seq_len` positions (next fit).

    The packing depends only on the lengths of documents. Only tokens of answers are labels. The rest of a row has segment 0.

    Args:
        documents: the examples.
        seq_len: the number of positions in a row.
        cut: whether to cut examples that are too long, and leave them out if nothing of their answers remains; otherwise they are errors.
        place: a function from the number of an example to its name in messages.

    Raises:
        InputError: an example is too long.
    """

    def __init__(self, documents: Documents, seq_len: int, *, cut: bool = False, place: Callable[[int], str] | None = None):
        self._documents = documents
        self._seq_len = seq_len
        starts, ends, answers, answer_ends = documents.examples()
        slots = ends - starts - 1  # an example of n tokens has n - 1 inputs and n - 1 labels
        if not cut and np.any(slots > seq_len):
            first = int(np.argmax(slots > seq_len))
            number = int(np.count_nonzero(slots > seq_len)) - 1
            more = f", and more in {number:,} {'others' if number > 1 else 'other'}" if number else ""
            raise InputError(
                where="data.path",
                key=f"example {first}" if place is None else place(first),
                expected=f"at most {seq_len + 1} tokens (model.seq_len {seq_len}, plus one)",
                found=f"{slots[first] + 1}{more}",
                change="shorten the example, raise model.seq_len, or cut such examples with data.too_long: cut",
            )
        slots = np.minimum(slots, seq_len)
        # The first token of a document is not a label.
        of = np.searchsorted(starts, answers, "right") - 1
        answers, answer_ends = np.maximum(answers, starts[of] + 1), np.minimum(answer_ends, (starts + slots + 1)[of])
        kept = answers < answer_ends
        some = np.zeros(starts.size, bool)  # whether a document has a label
        some[of[kept]] = True
        self.left_out = int(slots.size - np.count_nonzero(some))
        self._starts, self._slots = starts[some], slots[some]
        self._answers, self._answer_ends = answers[kept], answer_ends[kept]
        self._first = np.append(
            np.searchsorted(self._answers, self._starts), self._answers.size
        )  # the first answer of each document, and the number of answers

    def __len__(self) -> int:
        return self._rows.size - 1

    def __getitem__(self, index: int) -> tuple[Inputs, Int32[np.ndarray, " s"]]:
        tokens, segments = np.zeros(self._seq_len, np.int32), np.zeros(self._seq_len, np.int32)
        labels = np.full(self._seq_len, UNCOUNTED, np.int32)
        at = 0
        for number, i in enumerate(range(self._rows[index], self._rows[index + 1]), 1):
            slots, start = int(self._slots[i]), int(self._starts[i])
            whole = self._documents.read(start, start + slots + 1)
            tokens[at : at + slots], segments[at : at + slots] = whole[:-1], number
            for k in range(self._first[i], self._first[i + 1]):
                first, stop = int(self._answers[k]) - start, int(self._answer_ends[k]) - start
                labels[at + first - 1 : at + stop - 1] = whole[first:stop]
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
