"""All rows of a data set in batches: those after the last whole batch, too."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import grain

from train.data.rows import Batch, BatchesOfRows, Elements


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
