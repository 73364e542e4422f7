"""All rows of a data set in batches: those after the last whole batch, too."""

import math
from dataclasses import dataclass, replace
from typing import Any

import grain

from train.data.rows import Batch, BatchesOfRows


@dataclass(frozen=True)
class AllRows:
    """Whole batches, and where rows are left after them one more, in which these are repeated until they fill whole microbatches.

    Each of them is there equally often, `copies` times, so the mean over the last batch is the mean over them, for any loss that is a sum
    over rows; a weight is `copies` times too large.

    Attributes:
        batches: the whole ones.
        microbatch: rows of a microbatch.
    """

    batches: BatchesOfRows
    microbatch: int

    def __len__(self) -> int:
        return len(self.batches) + (self.left > 0)

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index] if index < len(self.batches) else self._last(self.left * self.copies)[0]

    @property
    def rows(self) -> int:
        """How many there are."""
        return len(self.batches.elements)

    @property
    def left(self) -> int:
        """How many are left after the last whole batch."""
        return self.rows % self.batches.batch_size

    @property
    def copies(self) -> int:
        """How often each of these is in the last batch."""
        return self.microbatch // math.gcd(self.left, self.microbatch)

    @property
    def like(self) -> Batch:
        """A batch of the usual size."""
        return self.batches[0] if len(self.batches) else self._last(self.batches.batch_size)[0]

    def _last(self, size: int) -> BatchesOfRows:
        repeated = grain.MapDataset.source(_Repeated(self.batches.elements, self.rows - self.left, self.left, size))
        return replace(self.batches, elements=repeated, batch_size=size)


@dataclass(frozen=True)
class _Repeated:
    """`size` elements: `count` of those given, from `first` on, over and over."""

    elements: Any
    first: int
    count: int
    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.elements[self.first + index % self.count]
