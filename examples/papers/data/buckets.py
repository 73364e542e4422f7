"""Batches of several shapes: rows of similar length share a batch, so that batches contain little padding."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import jax
import numpy as np

from examples.papers.data.sentences import check_held_out, in_order, nothing_to_learn
from jpipe_train.data import position
from jpipe_train.data.position import Position
from jpipe_train.data.rows import Batch, BatchesOfRows, Elements

Place = tuple[int, int]  # a bucket, and the number of a batch of it


@dataclass(frozen=True)
class TrainingBatches:
    """Endless training batches in shuffled order; rows that do not fill a batch of their bucket wait for the next epoch.

    Attributes:
        buckets: rows of each, without end.
        rows: how many rows of each bucket an epoch has.
        seed: of the order.
        begins: the position of the first batch; None: at the first rows of all buckets.
    """

    buckets: tuple[BatchesOfRows, ...]
    rows: tuple[int, ...]
    seed: int
    begins: Position | None = None

    def __len__(self) -> int:
        return max(map(len, self.buckets))

    def __getitem__(self, index: int) -> Batch:
        bucket, number = self.place(index)
        return self.buckets[bucket][number]

    @property
    def first_position(self) -> Position:
        """The position of the first batch."""
        return self.begins or position.start(self._batch_size, len(self.buckets))

    def position(self, batch: int) -> Position:
        """Return the position of a batch: how many rows of each bucket come before it."""
        before, _, earlier = self._epoch_of(batch)
        counts = [count + int((earlier == bucket).sum()) for bucket, count in enumerate(before)]
        first = self.first_position
        rows = tuple(rows + count * self._batch_size for rows, count in zip(first.rows, counts, strict=True))
        return Position(batch=batch, rows=rows, pieces=first.pieces)

    def continued(self, position: Position) -> "TrainingBatches":
        """Return the same rows in batches that begin at `position`.

        If the position is one of other buckets, only its total number of rows counts.
        """
        if len(position.rows) != len(self.buckets):
            same = replace(self, begins=None, buckets=tuple(replace(each, batch_size=position.pieces) for each in self.buckets))
            position = position.model_copy(update={"rows": same.position(position.total // position.pieces).rows})
        begins = [Position(batch=0, rows=(rows,), pieces=position.pieces) for rows in position.rows]
        buckets = tuple(each.continued(first) for each, first in zip(self.buckets, begins, strict=True))
        return replace(self, begins=position, buckets=buckets)

    def place(self, index: int) -> Place:
        """Return the bucket of a batch, and its number in that bucket."""
        before, bucket, earlier = self._epoch_of(index)
        return bucket, before[bucket] + int((earlier == bucket).sum())

    def _epoch_of(self, index: int) -> tuple[tuple[int, ...], int, np.ndarray]:
        """Locate a batch in its epoch.

        Returns:
            The number of batches of each bucket before the epoch, the batch's bucket, and the buckets of the epoch's earlier batches.
        """
        first = self.first_position
        ahead = index - first.batch
        epoch = max((first.total + ahead * self._batch_size) // sum(self.rows), self._first_epoch)  # this one or a little later
        while sum(self._before(epoch + 1)) <= ahead:
            epoch += 1
        before = self._before(epoch)
        buckets = _shuffled(self.seed, epoch, tuple(b - a for a, b in zip(before, self._before(epoch + 1), strict=True)))
        at = ahead - sum(before)
        return before, int(buckets[at]), buckets[:at]

    @property
    def _batch_size(self) -> int:
        return self.buckets[0].batch_size

    @cached_property
    def _first_epoch(self) -> int:
        """The epoch in which the first batch lies."""
        return max(0, *(-(-seen // rows) - 1 for seen, rows in zip(self.first_position.rows, self.rows, strict=True) if rows))

    def _before(self, epoch: int) -> tuple[int, ...]:
        """Return the number of batches of each bucket before an epoch, counted from the first batch."""
        if epoch <= self._first_epoch:
            return (0,) * len(self.rows)
        return tuple((epoch * rows - seen) // self._batch_size for rows, seen in zip(self.rows, self.first_position.rows, strict=True))


@dataclass(frozen=True)
class HeldOutBatches:
    """The full batches of each bucket, in shuffled order.

    Attributes:
        buckets: the rows of each.
        has_remainder: whether smaller batches with the remaining rows follow.
    """

    buckets: tuple[BatchesOfRows, ...]
    has_remainder: bool = False

    def __len__(self) -> int:
        return len(self.locations)

    def __getitem__(self, index: int) -> Batch:
        bucket, number = self.locations[index]
        return self.buckets[bucket][number]

    @property
    def whole(self) -> int:
        """The number of whole batches."""
        return sum(bucket.whole for bucket in self.buckets)

    def rows_of(self, index: int) -> int:
        """Return how many rows of the data a batch has."""
        bucket, number = self.locations[index]
        return self.buckets[bucket].rows_of(number)

    def with_remainder(self) -> "HeldOutBatches":
        """Return these batches, followed by smaller ones with the rows that fill none."""
        return HeldOutBatches(tuple(bucket.with_remainder() for bucket in self.buckets), has_remainder=True)

    @cached_property
    def locations(self) -> list[Place]:
        """The bucket of each batch, and its number in that bucket."""
        numbers = [itertools.count() for _ in self.buckets]
        order = _shuffled(0, 0, tuple(bucket.whole for bucket in self.buckets)).tolist()
        smaller = [(number, bucket.whole) for number, bucket in enumerate(self.buckets) if len(bucket) > bucket.whole]
        return [(bucket, next(numbers[bucket])) for bucket in order] + smaller


class RowsOfOneShape(Elements, Protocol):
    """The rows of one bucket."""

    @property
    def spec(self) -> Batch:
        """The shapes and dtypes of one row."""
        ...


def batches_of(
    buckets: Sequence[tuple[RowsOfOneShape, RowsOfOneShape]], seed: int, batch_size: int, source: str
) -> tuple[TrainingBatches, HeldOutBatches]:
    """Create batches for training and for validation.

    Args:
        buckets: of each the rows for both; it may have none for one of them.
        seed: of the order of rows and batches.
        batch_size: rows of a batch.
        source: a phrase that says where they come from.

    Raises:
        InputError: there is nothing to learn from, or less than a batch for validation.
    """
    rows = tuple(len(train) for train, _ in buckets)
    if not sum(rows):
        raise nothing_to_learn()
    check_held_out(max(len(validation) for _, validation in buckets), batch_size, source)

    def batches(part: RowsOfOneShape, seed: int, *, epochs: bool) -> BatchesOfRows:
        return BatchesOfRows(in_order(part, seed, epochs=epochs) if len(part) else part, batch_size, part.spec)

    learnt = tuple(batches(train, seed, epochs=True) for train, _ in buckets)
    held_out = tuple(batches(validation, 0, epochs=False) for _, validation in buckets)
    return TrainingBatches(learnt, rows, seed), HeldOutBatches(held_out)


def shapes_of(batches: TrainingBatches) -> tuple[Batch, ...]:
    """Return the shapes and dtypes of batches, the largest first, or nothing if all batches have one shape."""
    if len(batches.buckets) < 2:
        return ()
    size = batches.buckets[0].batch_size
    shapes = [jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), each.spec) for each in batches.buckets]
    return tuple(reversed(shapes))


def bucket_of(lengths: Sequence[np.ndarray], most: Sequence[Sequence[int]]) -> np.ndarray:
    """Find the first bucket into which each row fits.

    Args:
        lengths: tokens of the sentences of each file.
        most: that they may have, in each file, by bucket from the shortest on; every row fits the last.
    """
    fits = [np.all([each <= limit for each, limit in zip(lengths, limits, strict=True)], axis=0) for limits in most]
    return np.argmax(fits, axis=0)


@functools.lru_cache(maxsize=4)
def _shuffled(seed: int, epoch: int, counts: tuple[int, ...]) -> np.ndarray:
    """Return each bucket's number as often as the bucket has batches, in shuffled order."""
    return np.random.default_rng((seed, epoch)).permutation(np.repeat(np.arange(len(counts)), counts))
