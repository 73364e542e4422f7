"""Batches whose rows are read when they are asked for, so that a process reads only those that its own workers need."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

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


@runtime_checkable
class Elements(Protocol):
    """Pairs of (inputs, labels) by their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


@dataclass(frozen=True)
class BatchesOfRows:
    """Batch t is made of the elements t·b to (t + 1)·b - 1, each read when its row is.

    Attributes:
        elements: pairs of (inputs, labels), each an array or a tree of arrays.
        batch_size: b.
        spec: shapes and dtypes of one of them.
    """

    elements: Elements
    batch_size: int
    spec: Batch

    def __len__(self) -> int:
        return len(self.elements) // self.batch_size

    def __getitem__(self, index: int) -> Batch:
        specs, structure = jax.tree.flatten(self.spec)

        @functools.lru_cache(maxsize=2)  # the arrays of a batch are sliced one after the other, mostly alike
        def leaves(start: int, stop: int) -> list[np.ndarray]:
            rows = [jax.tree.leaves(self.elements[index * self.batch_size + i]) for i in range(start, stop)]
            if not rows:
                return [np.zeros((0, *leaf.shape), leaf.dtype) for leaf in specs]
            return [np.stack(same) for same in zip(*rows, strict=True)]

        found = [Rows((self.batch_size, *leaf.shape), leaf.dtype, partial(_of, leaves, i)) for i, leaf in enumerate(specs)]
        batch: Batch = jax.tree.unflatten(structure, found)
        return batch


def _of(leaves: Callable[[int, int], list[np.ndarray]], number: int, start: int, stop: int) -> np.ndarray:
    return leaves(start, stop)[number]


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
