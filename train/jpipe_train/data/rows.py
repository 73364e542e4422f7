"""Batches whose rows are read when they are asked for, so that a process reads only those that its own workers need."""

import functools
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import grain
import jax
import numpy as np
from jpipe_planner import usable_cores

from jpipe_train.data import position
from jpipe_train.data.position import Position

Tree = Any
Batch = tuple[Tree, Tree]

THREADS = ThreadPoolExecutor(usable_cores(), "rows")
"""Make rows, several at a time, where that is work in which Python lets others go on."""


@dataclass(frozen=True)
class Rows:
    """One array of a batch: its shape and type are known, its rows are read when they are sliced, as `Pipeline.step` does.

    Attributes:
        shape: of the whole array.
        dtype: of its numbers.
        read: gives rows start .. stop - 1.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[int, int], np.ndarray]

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(len(self))
        return self.read(start, stop)


@runtime_checkable
class Elements(Protocol):
    """Pairs of (inputs, labels) by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


@runtime_checkable
class Pieces(Protocol):
    """Elements whose order depends on the number of pieces into which they are cut."""

    def in_pieces(self, pieces: int, /) -> Elements:
        """Return the same elements cut into that many pieces."""
        ...


@dataclass(frozen=True)
class BatchesOfRows:
    """Batch t is made of the elements t·b to (t + 1)·b - 1, each read when its row is; another `order` moves them.

    Attributes:
        elements: pairs of (inputs, labels), each an array or a tree of arrays. In place of an array may be a function that gives it: it is
            called when that array's row is read, with others at a time.
        batch_size: b.
        spec: shapes and dtypes of one of them.
        begins: where the order of the batches begins; None: batch 0 is made of the first elements.
    """

    elements: Elements
    batch_size: int
    spec: Batch
    begins: Position | None = None

    def __len__(self) -> int:
        return len(self.elements) // self.batch_size

    @property
    def order(self) -> Position:
        """Where the order of the batches begins."""
        return self.begins or position.start(self.batch_size)

    def position(self, batch: int) -> Position:
        """Return where this batch begins."""
        return self.order.later(batch, self.batch_size)

    def continued(self, position: Position) -> "BatchesOfRows":
        """Return the same rows in batches that begin at `position`."""
        elements = self.elements.in_pieces(position.pieces) if isinstance(self.elements, Pieces) else self.elements
        return replace(self, elements=elements, begins=position)

    def __getitem__(self, index: int) -> Batch:
        specs, structure = jax.tree.flatten(self.spec)
        order = self.order
        first = order.total + (index - order.batch) * self.batch_size

        @functools.lru_cache(maxsize=2)  # the arrays of a batch are sliced one after the other, mostly alike
        def rows(start: int, stop: int) -> list[list[Any]]:
            return [jax.tree.leaves(self.elements[first + i]) for i in range(start, stop)]

        found = [Rows((self.batch_size, *leaf.shape), leaf.dtype, partial(_stacked, rows, i, leaf)) for i, leaf in enumerate(specs)]
        batch: Batch = jax.tree.unflatten(structure, found)
        return batch


def _stacked(rows: Callable[[int, int], list[list[Any]]], number: int, spec: Any, start: int, stop: int) -> np.ndarray:
    """Leaf `number` of some rows."""
    found = [row[number] for row in rows(start, stop)]
    if not found:
        return np.zeros((0, *spec.shape), spec.dtype)
    return np.stack(list(THREADS.map(lambda make: make(), found)) if callable(found[0]) else found)


def when_sliced(specs: Tree, make: Callable[[], Tree]) -> Tree:
    """A batch of these shapes that is made, all of it, when the first of its rows are read.

    Args:
        specs: shape and dtype of each of its arrays.
        make: gives the batch.
    """
    leaves = functools.cache(lambda: jax.tree.leaves(make()))
    numbers = itertools.count()
    return jax.tree.map(lambda spec: Rows(spec.shape, spec.dtype, partial(_read, leaves, next(numbers))), specs)


def _read(leaves: Callable[[], list[np.ndarray]], number: int, start: int, stop: int) -> np.ndarray:
    return leaves()[number][start:stop]


class _Part(NamedTuple):
    """`rows` rows from number `first` on, each `copies` times."""

    first: int
    rows: int
    copies: int


@dataclass(frozen=True)
class AllRows:
    """Whole batches, and the rows that are left after them in one or two smaller ones, each of whole microbatches.

    Rows that do not fill a microbatch are repeated until they fill some. Each of them is there equally often, so the mean over such a batch
    is the mean over them, for any loss that is a sum over rows; a weight is as many times too large as there are copies.

    Attributes:
        batches: the whole ones.
        microbatch: rows of a microbatch.
    """

    batches: BatchesOfRows
    microbatch: int

    def __len__(self) -> int:
        return len(self.batches) + len(self._left)

    def __getitem__(self, index: int) -> Batch:
        whole = len(self.batches)
        return self.batches[index] if index < whole else _repeated(self.batches, self._left[index - whole])

    def rows_of(self, index: int) -> int:
        """How many rows of the data a batch has."""
        whole = len(self.batches)
        return self.batches.batch_size if index < whole else self._left[index - whole].rows

    def copies_of(self, index: int) -> int:
        """How often each of them is there."""
        whole = len(self.batches)
        return 1 if index < whole else self._left[index - whole].copies

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.batches.elements)

    @cached_property
    def _left(self) -> list[_Part]:
        """What is left after the whole batches: what fills microbatches, and the rest."""
        left = self.rows % self.batches.batch_size
        odd = left % self.microbatch
        copies = self.microbatch // math.gcd(odd, self.microbatch)
        parts = _Part(self.rows - left, left - odd, 1), _Part(self.rows - odd, odd, copies)
        return [part for part in parts if part.rows]


def like_a_batch(batches: BatchesOfRows) -> Batch:
    """A batch of the usual size, where there may be less than one."""
    return batches[0] if len(batches) else _repeated(batches, _Part(0, len(batches.elements), batches.batch_size), batches.batch_size)


def _repeated(batches: BatchesOfRows, part: _Part, size: int | None = None) -> Batch:
    """A batch of the rows of this part, over and over, its first `size` ones or all."""
    size = part.rows * part.copies if size is None else size
    elements = _Cycle(batches.elements, part.first, part.rows, size)
    return replace(batches, elements=grain.MapDataset.source(elements), batch_size=size)[0]


@dataclass(frozen=True)
class _Cycle:
    """`size` elements: `rows` of those given, from `first` on, over and over."""

    elements: Elements
    first: int
    rows: int
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Batch:
        return self.elements[self.first + index % self.rows]
