"""Batches whose rows are read when they are asked for, so that a process reads only those that its own workers need."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grain
import jax
import numpy as np

Tree = Any
Batch = tuple[Tree, Tree]


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


@dataclass(frozen=True)
class BatchesOfRows:
    """Batch t is made of the elements t·b to (t + 1)·b - 1 of a data set of pairs, each read when its row is."""

    elements: grain.MapDataset[tuple[np.ndarray, np.ndarray]]
    batch_size: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return len(self.elements) // self.batch_size

    def __getitem__(self, index: int) -> Batch:
        def half(part: int) -> Rows:
            def read(start: int, stop: int) -> np.ndarray:
                return np.stack([self.elements[index * self.batch_size + i][part] for i in range(start, stop)])

            return Rows((self.batch_size, *self.shape), self.dtype, read)

        return half(0), half(1)


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
