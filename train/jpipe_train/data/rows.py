"""Batches that read rows on request, so that a process reads only the rows that its workers need."""

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jpipe_planner.machine.local import usable_cores
from jpipe_train.data import position
from jpipe_train.data.position import Position

Tree = Any
Batch = tuple[Tree, Tree]

THREADS = ThreadPoolExecutor(usable_cores(), "rows")
"""Threads for functions that create rows and release the GIL."""


@dataclass(frozen=True)
class Rows:
    """One array of a batch. Its shape and dtype are known, and rows are read when `Pipeline.step` slices them."""

    shape: tuple[int, ...]  # the shape of the whole array
    dtype: np.dtype[Any]  # the dtype of the array
    read: Callable[[int, int], np.ndarray]  # a function (start, stop) that returns rows start to stop - 1

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        return self.read(start, stop)


@runtime_checkable
class Elements(Protocol):
    """Pairs of (inputs, labels) that have an index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


@runtime_checkable
class Pieces(Protocol):
    """Elements that are cut into pieces; their order depends on the number of pieces."""

    def in_pieces(self, pieces: int, /) -> Elements:
        """Return the same elements, cut into `pieces` pieces."""
        ...


@dataclass(frozen=True)
class BatchesOfRows:
    """Batches of elements. Batch t has the elements t·b to (t + 1)·b - 1, counted from the position of the first batch.

    An element is read when its row is read. Elements from `end` on are replaced by padding: zeros, with labels of -1, which do not count.
    """

    # pairs of (inputs, labels), each an array or a tree of arrays. A function without arguments may stand for an array. It is called when
    # the row is read, in a thread, at the same time as the functions of other rows.
    elements: Elements
    batch_size: int  # the number b of elements in a batch
    spec: Batch  # the shapes and dtypes of an element
    begins: Position | None = None  # the position of the first batch; None if batch 0 has the first elements
    end: int | None = None  # the index of the first element that is replaced by padding; None if all elements count
    has_remainder: bool = False  # whether a smaller batch with the remaining elements follows the whole batches

    def __len__(self) -> int:
        return -(-len(self.elements) // self.batch_size) if self.has_remainder else self.whole

    @property
    def whole(self) -> int:
        """The number of whole batches."""
        return len(self.elements) // self.batch_size

    def rows_of(self, index: int) -> int:
        """Return how many rows a batch has."""
        return min(self.batch_size, len(self.elements) - index * self.batch_size) if self.has_remainder else self.batch_size

    @property
    def first_position(self) -> Position:
        """The position of the first batch."""
        return self.begins or position.start(self.batch_size)

    def position(self, batch: int) -> Position:
        """Return the position of a batch."""
        return self.first_position.later(batch, self.batch_size)

    def continued(self, position: Position) -> "BatchesOfRows":
        """Return batches of the same rows that begin at `position`."""
        elements = self.elements.in_pieces(position.pieces) if isinstance(self.elements, Pieces) else self.elements
        return replace(self, elements=elements, begins=position)

    def with_remainder(self) -> "BatchesOfRows":
        """Return these batches, followed by a smaller batch with the remaining rows."""
        return replace(self, has_remainder=True)

    def __getitem__(self, index: int) -> Batch:
        specs, structure = jax.tree.flatten(self.spec)
        start = self.first_position
        first, count = start.total + (index - start.batch) * self.batch_size, self.rows_of(index)

        @functools.lru_cache(maxsize=2)  # the arrays of a batch are sliced in turn, usually for the same rows
        def rows(start: int, stop: int) -> list[list[Any]]:
            return [jax.tree.leaves(self._element(first + i)) for i in range(start, stop)]

        leaves = [Rows((count, *leaf.shape), leaf.dtype, partial(_stacked, rows, i, leaf)) for i, leaf in enumerate(specs)]
        batch: Batch = jax.tree.unflatten(structure, leaves)
        return batch

    def _element(self, number: int) -> Batch:
        if self.end is None or number < self.end:
            return self.elements[number]
        inputs, labels = self.spec
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), inputs), jax.tree.map(
            lambda leaf: np.full(leaf.shape, -1, leaf.dtype), labels
        )


def _stacked(rows: Callable[[int, int], list[list[Any]]], number: int, spec: Any, start: int, stop: int) -> np.ndarray:
    """Stack leaf `number` of some rows."""
    leaves = [row[number] for row in rows(start, stop)]
    if not leaves:
        return np.zeros((0, *spec.shape), spec.dtype)
    if any(map(callable, leaves)):
        leaves = list(THREADS.map(lambda leaf: leaf() if callable(leaf) else leaf, leaves))
    return np.stack(leaves)


def when_sliced(specs: Tree, make: Callable[[], Tree]) -> Tree:
    """Return a batch that is created as a whole, by `make`, when its first rows are read."""
    leaves = functools.cache(lambda: jax.tree.leaves(make()))
    numbers = itertools.count()
    return jax.tree.map(lambda spec: Rows(spec.shape, spec.dtype, partial(_read, leaves, next(numbers))), specs)


def _read(leaves: Callable[[], list[np.ndarray]], number: int, start: int, stop: int) -> np.ndarray:
    return leaves()[number][start:stop]


@runtime_checkable
class Divisible(Protocol):
    """Batches that leave out the rows that do not fill a batch, or have them in smaller batches after the whole ones."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...

    @property
    def has_remainder(self) -> bool:
        """Whether there are smaller batches."""
        ...

    @property
    def whole(self) -> int:
        """The number of whole batches."""
        ...

    def rows_of(self, index: int) -> int:
        """Return how many rows a batch has."""
        ...

    def with_remainder(self) -> "Divisible":
        """Return these batches with the smaller ones."""
        ...


def like_a_batch(batches: BatchesOfRows) -> Batch:
    """Return a full batch. If there are too few rows, they are repeated."""
    if batches.whole:
        return batches[0]
    rows = [batches.elements[i] for i in range(len(batches.elements))]
    return replace(batches, elements=[rows[i % len(rows)] for i in range(batches.batch_size)])[0]
