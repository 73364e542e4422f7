"""Rows of arrays that have an index: pairs of (inputs, targets). The arrays may be in memory or in files."""

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from jpipe import InputError
from jpipe_train.data.arrays.numbers import fitted
from jpipe_train.data.files.wrong_lines import Place, WrongLine
from jpipe_train.data.rows import Batch

_BLOCK = 2**24  # bytes of rows that are copied into one array at a time
_MOST_ROWS = 4096  # the most rows of such an array


@dataclass(frozen=True)
class RowsOfArrays:
    """The rows of arrays. Row i consists of row i of each array."""

    # (inputs, targets), trees of arrays with the same number of rows. An array is a NumPy array, or an object with `shape`, `dtype`,
    # `len()` and `[i]` like one.
    arrays: Batch

    def __len__(self) -> int:
        return len(jax.tree.leaves(self.arrays)[0])

    def __getitem__(self, index: int) -> Batch:
        row: Batch = jax.tree.map(lambda leaf: leaf[index], self.arrays)
        return row

    @property
    def spec(self) -> Batch:
        """The shapes and dtypes of a row."""
        row: Batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), self.arrays)
        return row


@runtime_checkable
class Stored(Protocol):
    """Rows of numbers, read from files or still in a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> np.ndarray: ...

    def place(self, row: int, /) -> str:
        """Name a row for messages."""
        ...

    def largest(self) -> tuple[int, str] | None:
        """Return the largest integer and the name of its row, or None if it is unknown."""
        ...

    def digest(self) -> str:
        """Return a hash of the rows in memory, or of a sample of the rows in a file."""
        ...


@dataclass(frozen=True)
class Chosen:
    """Some of the stored rows, as one array of numbers."""

    stored: Stored  # all rows
    numbers: np.ndarray | None  # the indices of the chosen rows, in their order; None means all rows
    row_shape: tuple[int, ...]  # the shape of each row
    dtype: np.dtype[Any]  # the dtype of the rows that `[i]` returns

    def __len__(self) -> int:
        return len(self.stored) if self.numbers is None else int(self.numbers.size)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return (len(self), *self.row_shape)

    def __getitem__(self, index: int) -> np.ndarray:
        row = index if self.numbers is None else int(self.numbers[index])
        try:
            return fitted(self.stored[row], self.dtype)
        except WrongLine as error:
            raise InputError(f"data: {self.stored.place(row)}: {error}; correct the number") from None

    def digest(self) -> str:
        """Return a hash of the stored rows, the indices of the chosen rows, and the dtype."""
        hasher = hashlib.sha256(f"{self.stored.digest()} {self.shape} {self.dtype}".encode())
        hasher.update(b"" if self.numbers is None else np.ascontiguousarray(self.numbers).data)
        return hasher.hexdigest()


class Memory:
    """Rows in memory. They are added one by one and kept in blocks, so that not all rows are copied at the same time.

    Attributes:
        extremes: the smallest and the largest integer, each with the place of its row.
    """

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._each = 1  # the number of rows in a block
        self.extremes: list[tuple[int, Place]] = []

    def add(self, row: np.ndarray, place: Place) -> None:
        """Add a row with the same shape as the earlier ones."""
        if row.dtype.kind in "iu":
            least, most = (int(row.min()), int(row.max())) if row.ndim else (int(row),) * 2
            if not self.extremes:
                self.extremes = [(least, place), (most, place)]
            elif least < self.extremes[0][0]:
                self.extremes[0] = least, place
            if most > self.extremes[1][0]:
                self.extremes[1] = most, place
        if not self._blocks and not self._rows:
            self._each = min(max(_BLOCK // max(row.nbytes, 1), 1), _MOST_ROWS)
        self._rows.append(row)
        if len(self._rows) == self._each:
            self._blocks.append(np.stack(self._rows))
            self._rows = []

    def __len__(self) -> int:
        return len(self._blocks) * self._each + len(self._rows)

    def __getitem__(self, row: int) -> np.ndarray:
        block, place = divmod(row, self._each)
        return np.asarray(self._blocks[block][place]) if block < len(self._blocks) else self._rows[place]

    def place(self, row: int) -> str:
        """Name a row for messages."""
        return f"row {row}"

    def largest(self) -> tuple[int, str] | None:
        """Return the largest integer and the name of its row, or None if there is none."""
        return (self.extremes[1][0], str(self.extremes[1][1])) if self.extremes else None

    def digest(self) -> str:
        """Return a hash of all rows."""
        hasher = hashlib.sha256()
        for array in (*self._blocks, *self._rows):
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()
