"""Choose the source and the row for each row of a mixture, and join the validation batches of several sources."""

import functools
import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from jpipe_train.data.rows import Batch, Divisible, Elements


def proportions(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest whole numbers in proportion to `weights`. A weight counts as the decimal number that Python prints for it."""
    fractions = [Fraction(repr(weight)) for weight in weights]
    whole = [int(fraction * math.lcm(*(each.denominator for each in fractions))) for fraction in fractions]
    return tuple(number // math.gcd(*whole) for number in whole)


def source_of(index: int, shares: Sequence[int], totals: Sequence[int] | None = None) -> tuple[int, int]:
    """Return the source of a row of the mixture, and the index of the row in this source, for shares in whole numbers.

    Of the first k rows, the last source has its share, rounded. The other sources divide the remaining rows in the same way. So any
    `sum(shares)` consecutive rows have exactly `shares[i]` rows of source i. Grain's `MapDataset.mix` uses the same rule, but rounds the
    shares. A caller may have computed `totals`, the cumulative sums of the shares.
    """
    totals = totals or list(itertools.accumulate(shares))
    for source in range(len(shares) - 1, 0, -1):
        total = totals[source]
        before, after = ((2 * k * shares[source] + total) // (2 * total) for k in (index, index + 1))
        if after > before:
            return source, before
        index -= before
    return 0, index


@dataclass(frozen=True)
class Mixed:
    """An endless mixture of the rows of several sources, in proportion to `shares`."""

    sources: tuple[Elements, ...]  # the endless rows of each source
    shares: tuple[int, ...]  # the proportions of the sources, as whole numbers

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> Batch:
        source, row = source_of(index, self.shares, self._totals)
        return self.sources[source][row]

    @functools.cached_property
    def _totals(self) -> tuple[int, ...]:
        return tuple(itertools.accumulate(self.shares))


@dataclass(frozen=True)
class Joined:
    """The batches of several sources, one source after the other."""

    parts: tuple[Any, ...]  # the batches of each source

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, index: int) -> Batch:
        for part in self.parts:
            if index < len(part):
                batch: Batch = part[index]
                return batch
            index -= len(part)
        raise IndexError(index)

    def with_remainder(self) -> "Joined":
        """Return the same batches; the remaining rows of each source follow its batches in smaller batches."""
        return Joined(tuple(part.with_remainder() if isinstance(part, Divisible) else part for part in self.parts))
