"""Rows for training BERT. A row has two parts of text with masked tokens, and a label whether the second part follows the first."""

from typing import Any

import grain
import jax
import numpy as np
from jaxtyping import Bool, Int32

from jpipe import InputError
from jpipe_lm.data.documents import Documents
from jpipe_lm.data.tokenizer import Tokenizer
from jpipe_lm.data.windows import UNCOUNTED
from jpipe_train.data.rows import Tree

FOLLOWS, RANDOM = 0, 1
"""The labels of the next-sentence task, the same as in Hugging Face's transformers."""
SPECIAL = 3  # positions of a row: [CLS] first part [SEP] second part [SEP]
_TRIES = 8  # the number of tries to find a second part in another document


def row_spec(seq_len: int) -> tuple[Tree, Tree]:
    """Return the shapes and dtypes of the inputs and labels of a row."""
    tokens = jax.ShapeDtypeStruct((seq_len,), np.dtype(np.int32))
    return {"tokens": tokens, "types": tokens}, {"tokens": tokens, "next": jax.ShapeDtypeStruct((), np.dtype(np.int32))}


class Masked:
    """The windows of a running text as rows. In each epoch other tokens are masked.

    Rows are full, as in RoBERTa: a row continues after the end of a document, which its [SEP] token marks. Each row has the same number of
    masked tokens, so that the mean over a batch is the mean over its rows. 80% of the masked tokens become [MASK], 10% a random token, and
    10% stay unchanged. Special tokens are not masked. In half of the rows the second part comes from elsewhere, if possible from another
    document.

    Args:
        documents: the text.
        tokenizer: the tokenizer, which has the special tokens.
        seq_len: the number of positions in a row.
        fraction: the fraction of the tokens that is masked.
        seed: the seed of all random choices.

    Raises:
        InputError: the tokenizer lacks a special token, or rows are too short.
    """

    def __init__(self, documents: Documents, tokenizer: Tokenizer, seq_len: int, fraction: float, seed: int):
        self._documents, self.seed = documents, seed
        names = ("[CLS]", "<s>"), ("[SEP]", "</s>"), ("[MASK]", "<mask>")
        self._cls, self._sep, self._mask = (tokenizer.id_of(*either) for either in names)
        self._content = seq_len - SPECIAL
        if self._content < 4:
            raise InputError(f"model.seq_len: expected at least {4 + SPECIAL} for data.objective: masked, found {seq_len}; raise it")
        self._count = max(1, round(fraction * self._content))
        self._special = np.asarray(tokenizer.special_ids(), np.int32)
        ordinary = np.setdiff1d(tokenizer.ids, self._special)
        self._symbols = (ordinary if ordinary.size else tokenizer.ids).astype(np.int32)

    def __len__(self) -> int:
        return self._documents.size // self._content

    def row(self, window: int, draw: int) -> tuple[dict[str, Int32[np.ndarray, " s"]], dict[str, Any]]:
        """Return the row of a window; `draw` seeds its random choices."""
        random = np.random.default_rng((self.seed, draw))
        start = window * self._content
        text = self._documents.read(start, start + self._content)
        cut = self._cut(start, random)
        is_random = random.random() < 0.5
        if is_random:
            other = self._elsewhere(start + cut, self._content - cut, random)
            text = np.concatenate([text[:cut], self._documents.read(other, other + self._content - cut)])
        ends = np.asarray([self._sep], np.int32)
        whole = np.concatenate([np.asarray([self._cls], np.int32), text[:cut], ends, text[cut:], ends])
        masked = self._chosen(whole, cut, random)
        labels = np.where(masked, whole, np.int32(UNCOUNTED))
        types = (np.arange(whole.size) > cut + 1).astype(np.int32)
        return {"tokens": self._hidden(whole, masked, random), "types": types}, {
            "tokens": labels,
            "next": np.asarray(RANDOM if is_random else FOLLOWS, np.int32),
        }

    def _cut(self, start: int, random: np.random.Generator) -> int:
        """Choose the end of the first part, in the middle half of the row and, if possible, not at the end of a document."""
        cut = int(random.integers(self._content // 4, self._content - self._content // 4)) or 1
        if self._documents.have_ends and self._documents.begins(start + cut, start + cut + 1)[0] and cut + 1 < self._content:
            return cut + 1
        return cut

    def _elsewhere(self, end: int, size: int, random: np.random.Generator) -> int:
        """Choose where a second part of `size` tokens begins that does not follow the first part, which ends at `end`."""
        starts = [int(place) for place in random.integers(0, self._documents.size - size + 1, _TRIES)]
        other = [place for place in starts if not self._same_document(place, end - 1)]
        far = [place for place in starts if abs(place - end) > size]
        return (other or far or starts)[0]

    def _same_document(self, one: int, other: int) -> bool:
        return not self._documents.have_ends or self._documents.number(one) == self._documents.number(other)

    def _chosen(self, whole: Int32[np.ndarray, " s"], cut: int, random: np.random.Generator) -> Bool[np.ndarray, " s"]:
        """Choose the tokens to mask, equally many in each row, and special tokens only if there are too few others."""
        added = np.zeros(whole.size, bool)
        added[[0, cut + 1, -1]] = True
        order = random.permutation(np.flatnonzero(~added))
        order = order[np.argsort(np.isin(whole[order], self._special), kind="stable")]
        chosen = np.zeros(whole.size, bool)
        chosen[order[: self._count]] = True
        return chosen

    def _hidden(
        self, whole: Int32[np.ndarray, " s"], masked: Bool[np.ndarray, " s"], random: np.random.Generator
    ) -> Int32[np.ndarray, " s"]:
        """Mask the chosen tokens of a row."""
        at = np.flatnonzero(masked)
        draw, replacements = random.random(at.size), random.choice(self._symbols, at.size)
        tokens = whole.copy()
        tokens[at] = np.where(draw < 0.8, np.int32(self._mask), np.where(draw < 0.9, replacements, whole[at]))
        return tokens


class Drawn:
    """Rows in shuffled order. With `epochs` they repeat endlessly. The random choices of row i depend on i."""

    def __init__(self, rows: Masked, *, epochs: bool):
        windows = grain.MapDataset.range(len(rows)).shuffle(seed=rows.seed)
        self._rows, self._windows = rows, windows.repeat() if epochs else windows

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> tuple[dict[str, Int32[np.ndarray, " s"]], dict[str, Any]]:
        return self._rows.row(int(self._windows[index]), index)
