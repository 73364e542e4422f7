"""The order of rows: shuffled anew in each epoch for training, and once for validation."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import grain

from jpipe_train.config.config import Config
from jpipe_train.data import masked
from jpipe_train.data.rows import Batch, Elements

_MOST_KEPT = 2**17  # numbers, so that those of a batch and its rows are computed once


@dataclass(frozen=True)
class Shuffled:
    """Rows in shuffled order.

    Attributes:
        rows: the rows, each once.
        seed: of the order.
        epochs: whether they follow each other without end, shuffled anew in each epoch.
    """

    rows: Elements
    seed: int
    epochs: bool

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, place: int) -> Batch:
        return self.rows[self.number(place)]

    @functools.cached_property
    def number(self) -> Callable[[int], int]:
        """A function that gives the number of a row in the data by its place in the order."""
        return functools.lru_cache(_MOST_KEPT)(lambda place: int(self._numbers[place]))

    @functools.cached_property
    def _numbers(self) -> grain.MapDataset:
        numbers = grain.MapDataset.range(len(self.rows)).shuffle(seed=self.seed)
        return numbers.repeat() if self.epochs else numbers


def ordered(config: Config, rows: Elements | masked.Masked, part: int) -> tuple[Elements, Callable[[int], int] | None]:
    """Return the rows in the order of their batches, endlessly for training, and the numbers of training rows by their place in it.

    There are no numbers of rows that are drawn anew.
    """
    if isinstance(rows, masked.Masked):
        return masked.Drawn(rows, epochs=part == 0), None
    shuffled = Shuffled(rows, seed_of(config, part), epochs=part == 0)
    return shuffled, shuffled.number if part == 0 else None


def seed_of(config: Config, part: int) -> int:
    """Return the seed of the order of one part: validation is spread over the files, but never by `config.seed`."""
    return config.seed if part == 0 else 0
