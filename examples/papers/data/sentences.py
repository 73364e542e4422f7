"""Helpers for parallel text, running words and captions: lines of files, word numbers, unusable sentences, batches of rows."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import grain
import numpy as np
from jaxtyping import Int32

from jpipe import InputError
from jpipe.files import expanded, read_text
from jpipe_lm.data.windows import UNCOUNTED
from jpipe_train.console.terminal import count
from jpipe_train.data.data import Data
from jpipe_train.data.rows import Batch, BatchesOfRows, Elements

FOLDER = "data.arguments.folder"
_MOST_BYTES = 2**34  # of a file of text, which is read whole
END, UNKNOWN = "<eos>", "<unk>"
Unusable = Literal["refuse", "drop"]
"""What happens to a sentence that is empty or longer than the model allows."""


def lines_of(folder: str, name: str) -> list[str]:
    """Read the lines of a text file, without surrounding spaces; the last line may lack its line break.

    Raises:
        InputError: it cannot be read, or is no text.
    """
    path = expanded(folder, FOLDER) / name
    where = f"{FOLDER}: cannot read '{path}'"
    other = f"{FOLDER}: expected text in UTF-8 in '{path}', found other bytes; convert it"
    text = read_text(path, _MOST_BYTES, where, "the folder needs it; python -m examples.papers.samples writes one to try", other)
    lines = text.split("\n")
    return [line.strip() for line in (lines if lines[-1] else lines[:-1])]


@dataclass(frozen=True)
class Words:
    """The numbers of words: the end of a sentence, any unknown word, then the known words from the most frequent one on.

    Attributes:
        words: all of them.
    """

    words: tuple[str, ...]

    @classmethod
    def of(cls, sentences: Iterable[Sequence[str]], most: int | None = None) -> "Words":
        """Assign numbers to the words of sentences.

        Args:
            sentences: words in their order.
            most: the greatest number of words; None: all.
        """
        counts = Counter(word for sentence in sentences for word in sentence)
        known = sorted(counts.keys() - {END, UNKNOWN}, key=lambda word: (-counts[word], word))
        return cls((END, UNKNOWN, *known[: None if most is None else max(most - 2, 0)]))

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    @property
    def end(self) -> int:
        """The number of the end of a sentence, which also starts one."""
        return self._numbers[END]

    def numbers(self, words: Sequence[str]) -> Int32[np.ndarray, " n"]:
        """Return the numbers of these words."""
        unknown = self._numbers[UNKNOWN]
        return np.asarray([self._numbers.get(word, unknown) for word in words], np.int32)

    def unknown(self, sentences: Iterable[Sequence[str]]) -> int:
        """Count the words of sentences that have no number."""
        return sum(word not in self._numbers for sentence in sentences for word in sentence)


def usable(lengths: Sequence[np.ndarray], most: Sequence[int], names: Sequence[str], unusable: Unusable) -> tuple[np.ndarray, str | None]:
    """Find the sentences, or pairs of them, that can be used.

    Args:
        lengths: tokens of the sentences of each file, the end of a sentence not included.
        most: that they may have, the end included, in each file.
        names: of the files.
        unusable: whether the remaining ones raise an error or are dropped.

    Returns:
        The indices of the usable ones; a remark, None if all are.

    Raises:
        InputError: some cannot be used, and `unusable` is "refuse".
    """
    empty = [each == 0 for each in lengths]
    long = [each >= limit for each, limit in zip(lengths, most, strict=True)]
    wrong = np.any([*empty, *long], axis=0)
    if not wrong.any():
        return np.arange(wrong.size), None
    first = int(np.argmax(wrong))
    file = next(i for i in range(len(names)) if empty[i][first] or long[i][first])
    actual = "none (it is empty)" if empty[file][first] else f"{lengths[file][first] + 1} with its end"
    is_empty = np.any(empty, axis=0)
    how_many = f"{count(int(is_empty.sum()), 'line')} empty, {int((wrong & ~is_empty).sum())} too long"
    place = f"'{names[file]}', line {first + 1}"
    if unusable == "refuse":
        raise InputError(
            f"{FOLDER}: {place}: expected 1 to {most[file] - 1} tokens and the end of a sentence, found {actual} (in all {how_many}); "
            "change the text, allow longer ones in data.arguments, or drop such lines with data.arguments.unusable: drop"
        )
    return np.flatnonzero(~wrong), f"{how_many}: dropped, the first is {place}"


def shifted(tokens: np.ndarray, end: int, length: int) -> tuple[Int32[np.ndarray, " s"], Int32[np.ndarray, " s"]]:
    """Make the inputs and labels of a sentence, both padded to one length.

    Inputs begin with the token that starts a sentence, labels end with the token that ends it.

    Args:
        tokens: of the sentence.
        end: the token that ends it, and also starts it.
        length: more than the number of tokens.
    """
    inputs, labels = np.full(length, end, np.int32), np.full(length, UNCOUNTED, np.int32)
    inputs[1 : 1 + tokens.size], labels[: tokens.size], labels[tokens.size] = tokens, tokens, end
    return inputs, labels


def data_of(
    parts: tuple[Elements, Elements],
    spec: Batch,
    batch_size: int,
    source: str,
    amount: str,
    arrays: Iterable[np.ndarray],
    vocab_size: int,
    remarks: Sequence[str | None],
) -> Data:
    """Batch rows for training, which never end, and for validation.

    Args:
        parts: rows for training, without end, and for validation.
        spec: shapes and dtypes of a row.
        batch_size: rows of a batch.
        source: a phrase that says where they come from.
        amount: a phrase that says how much there is.
        arrays: what the digest is computed from.
        vocab_size: numbers that tokens may have.
        remarks: what was left out; None: nothing.

    Raises:
        InputError: there is less than a batch for validation.
    """
    check_held_out(len(parts[1]), batch_size, source)
    train, validation = (BatchesOfRows(part, batch_size, spec) for part in parts)
    return Data(train, validation, source, amount, digest_of(arrays), present(remarks), vocab_size)


def check_held_out(rows: int, batch_size: int, source: str) -> None:
    """Check that there is at least one batch for validation.

    Raises:
        InputError: there are fewer rows.
    """
    if rows < batch_size:
        raise InputError(
            f"{FOLDER}: expected at least train.batch_size {batch_size} rows for validation, found {rows} in {source}; give more, "
            "or lower train.batch_size"
        )


def nothing_to_learn() -> InputError:
    """Return the error for data without a training row."""
    return InputError(f"{FOLDER}: expected something to learn from, found nothing that can be used; give more text")


def in_order(rows: Elements, seed: int, *, epochs: bool) -> Elements:
    """Shuffle rows, with `epochs` in a new order for each epoch without end.

    Raises:
        InputError: there is none.
    """
    if not len(rows):
        raise nothing_to_learn()
    shuffled = grain.MapDataset.source(rows).shuffle(seed=seed)
    return shuffled.repeat() if epochs else shuffled


def shown(folder: str) -> str:
    """Format a folder for messages."""
    return f"'{os.path.join(folder, '')}'"


def exists(path: Path) -> bool:
    """Check that a file exists and can be read."""
    return path.is_file() and os.access(path, os.R_OK)


def present(remarks: Sequence[str | None]) -> tuple[str, ...]:
    """Drop the remarks that are None."""
    return tuple(remark for remark in remarks if remark is not None)


def digest_of(arrays: Iterable[np.ndarray]) -> Callable[[], str]:
    """Return a function that hashes these arrays."""
    return partial(_digest, list(arrays))


def _digest(arrays: Sequence[np.ndarray]) -> str:
    hasher = hashlib.sha256()
    for array in arrays:
        hasher.update(str((array.shape, array.dtype)).encode())
        hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()
