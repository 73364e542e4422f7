"""Tokenized pairs in memory, and the log-probabilities of their answers by the reference, which are kept with the run."""

import functools
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float32

import jpipe
from jpipe.files import open_to_read, write_atomically
from jpipe_lm.preferences.losses import pairs_of
from jpipe_train.console import interrupt
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count
from jpipe_train.data.rows import Batch, BatchesOfRows

FOLDER = "reference"
_MOST_PENDING = 2  # batches that may be in flight before a result is read, so that the devices always have work


class Answer(NamedTuple):
    """A prompt with an answer, as tokens."""

    tokens: np.ndarray  # the tokens of both
    start: int  # the index of the first token of the answer
    stop: int  # the index after its last token


@dataclass(frozen=True)
class PairRows:
    """Pairs of rows: a prompt with the chosen answer, and the same prompt with the rejected answer. A pair is one element."""

    rows: Sequence[tuple[Answer, ...]]  # both rows of each pair
    seq_len: int  # the number of positions in a row
    padding: int  # the token that fills rows
    # the log-probability of each answer by the reference, filled in before training; None if the loss needs none
    reference: Float32[np.ndarray, "pairs 2"] | None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        shape = 2, self.seq_len
        tokens, segments, labels = np.full(shape, self.padding, np.int32), np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        for place, (whole, start, stop) in enumerate(self.rows[index]):
            size = whole.size - 1
            tokens[place, :size], segments[place, :size] = whole[:-1], 1
            labels[place, start - 1 : stop - 1] = whole[start:stop]
        reference = {} if self.reference is None else {"reference": self.reference[index]}
        return {"tokens": tokens, "segments": segments}, {"tokens": labels, **reference}

    @property
    def spec(self) -> Batch:
        """The shapes and dtypes of a pair."""
        row = jax.ShapeDtypeStruct((2, self.seq_len), np.dtype(np.int32))
        reference = {} if self.reference is None else {"reference": jax.ShapeDtypeStruct((2,), np.dtype(np.float32))}
        return {"tokens": row, "segments": row}, {"tokens": row, **reference}

    def digest(self) -> str:
        """Return a hash of all pairs."""
        hasher = hashlib.sha256(f"{self.seq_len} {self.padding}".encode())
        for whole, start, stop in (row for pair in self.rows for row in pair):
            hasher.update(f"{whole.size} {start} {stop} ".encode() + whole.tobytes())
        return hasher.hexdigest()

    def read(self, folder: Path) -> bool:
        """Read the log-probabilities that a run has kept in its folder. Return False if it has none for these pairs."""
        assert self.reference is not None
        try:
            with open_to_read(self._file(folder)) as file:
                found = np.load(file, allow_pickle=False)
        except (OSError, ValueError):
            return False
        if (found.shape, found.dtype) != (self.reference.shape, self.reference.dtype):
            return False
        self.reference[:] = found
        return True

    def compute(self, pipe: jpipe.Pipeline, state: jpipe.State, batch_size: int, folder: Path | None, reporter: Reporter) -> None:
        """Compute the log-probabilities with the weights of a state, and keep them in a folder, if it is given."""
        assert self.reference is not None
        without = replace(self, reference=np.zeros_like(self.reference))
        batches, number = BatchesOfRows(without, batch_size, self.spec, end=len(self)), -(-len(self) // batch_size)
        metrics = {f"pair {i}": _log_probs(i) for i in range(batch_size // pipe.plan.microbatches)}
        pending: list[jpipe.Evaluation] = []
        found: list[tuple[float, float]] = []
        with reporter.counting(f"the reference's log-probabilities of {count(len(self), 'pair')}") as progress:
            for i in range(number + _MOST_PENDING):
                interrupt.check()
                if i < number:
                    pending.append(pipe.evaluate(state, batches[i], metrics))
                if pending and i >= _MOST_PENDING:
                    of_pairs = pending.pop(0).microbatches.values()
                    found += [(float(chosen), float(rejected)) for pairs in zip(*of_pairs, strict=True) for chosen, rejected in pairs]
                    progress(min(len(found), len(self)), len(self))
        self.reference[:] = np.asarray(found, np.float32)[: len(self)]
        if folder is not None:
            content = io.BytesIO()
            np.save(content, self.reference)
            (folder / FOLDER).mkdir(exist_ok=True)
            write_atomically(self._file(folder), content.getvalue())

    def _file(self, folder: Path) -> Path:
        return folder / FOLDER / f"{self.digest()[:16]}.npy"


@dataclass(frozen=True)
class _LogProbs:
    """A metric with the log-probabilities of one pair of a microbatch: its sum is of the chosen answer, its weight of the rejected one."""

    index: int

    def __call__(self, outputs: Any, labels: Any) -> tuple[Any, Any]:
        chosen, rejected = pairs_of(outputs, labels).log_probs[self.index]
        return chosen, rejected


_log_probs = functools.cache(_LogProbs)
"""Return the same object for the same pair, because an evaluation is compiled once for each object."""
