"""A running text of words for AWD-LM: row b of a batch continues row b of the batch before."""

import sys
from dataclasses import dataclass, replace

import jax
import numpy as np
from jaxtyping import Int32

from examples.papers.arguments import DATA, MOST_POSITIONS, MOST_SYMBOLS, check_integers
from examples.papers.data.sentences import END, FOLDER, Words, data_of, lines_of, shown
from jpipe import InputError
from jpipe_train.console.terminal import count
from jpipe_train.data.data import Data

Row = tuple[dict[str, Int32[np.ndarray, "..."]], Int32[np.ndarray, " s"]]


@dataclass(frozen=True)
class Streams:
    """The text in as many equal pieces as a batch has rows, read window by window: element t · rows + b is window t of piece b.

    The labels of a window are the same words shifted by one. After the last window the first one follows, marked as a new beginning.
    Words at the end of a piece that fill no window are not read.

    Attributes:
        words: the numbers of all words.
        rows: of a batch, or of one when the run began.
        length: of a window.
        epochs: the windows come again and again.
    """

    words: Int32[np.ndarray, " n"]
    rows: int
    length: int
    epochs: bool

    def in_pieces(self, pieces: int) -> "Streams":
        """Return the same text in that many pieces, those of a run that continues with another batch size."""
        return replace(self, rows=pieces)

    @property
    def windows(self) -> int:
        """The number of windows of a piece."""
        return max(self._piece - 1, 0) // self.length

    @property
    def _piece(self) -> int:
        return self.words.size // self.rows

    def __len__(self) -> int:
        return sys.maxsize if self.epochs else self.windows * self.rows

    def __getitem__(self, index: int) -> Row:
        turn, row = divmod(index, self.rows)
        window = turn % self.windows
        start = row * self._piece + window * self.length
        window_and_next = self.words[start : start + self.length + 1]
        return {"tokens": window_and_next[:-1], "continues": np.asarray(window > 0, np.int32)}, window_and_next[1:]


def load(seed: int, batch_size: int, folder: str, length: int = 70, vocab_size: int | None = None) -> Data:
    """Read the training and the validation text of a folder; the text is read in its own order, and nothing is drawn.

    Args:
        seed: is not used.
        batch_size: rows of a batch, so pieces of the text.
        folder: has `train.txt` and `validation.txt`: words with spaces between, a sentence to a line.
        length: words of a row.
        vocab_size: the number of the most frequent words to keep; None: all.

    Raises:
        InputError: an argument is out of range; a file is missing or is no text, or has less than one window for each row.
    """
    check_integers(DATA, 1, MOST_POSITIONS, length=length)
    if vocab_size is not None:
        check_integers(DATA, 2, MOST_SYMBOLS, vocab_size=vocab_size)
    texts = [[line.split() for line in lines_of(folder, f"{part}.txt")] for part in ("train", "validation")]
    sentences = [[line for line in lines if line] for lines in texts]
    vocabulary = Words.of(sentences[0], vocab_size)
    parts = []
    for name, lines, epochs in zip(("train", "validation"), sentences, (True, False), strict=True):
        numbers = vocabulary.numbers([word for line in lines for word in (*line, END)])
        streams = Streams(numbers, batch_size, length, epochs)
        if streams.windows == 0:
            raise InputError(
                f"{FOLDER}: expected at least {batch_size * (length + 1)} words in '{name}.txt' (train.batch_size {batch_size} "
                f"rows of {length} words, plus one), found {numbers.size}; give more text, or make rows fewer or shorter"
            )
        parts.append(streams)
    blank = sum(not line for lines in texts for line in lines)
    unknown = vocabulary.unknown(sentences[1])
    remarks = (
        f"{count(blank, 'empty line')} left out" if blank else None,
        f"{unknown:,} of {parts[1].words.size:,} words for validation are not known" if unknown else None,
    )
    tokens = jax.ShapeDtypeStruct((length,), np.dtype(np.int32))
    spec = {"tokens": tokens, "continues": jax.ShapeDtypeStruct((), np.dtype(np.int32))}, tokens
    amount = f"{parts[0].words.size:,} words for training, {parts[1].words.size:,} for validation"
    arrays = [part.words for part in parts]
    size = len(vocabulary.words)
    return data_of((parts[0], parts[1]), spec, batch_size, shown(folder), amount, arrays, size, remarks)
