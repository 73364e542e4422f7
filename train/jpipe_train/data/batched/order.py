"""The order of rows: shuffled anew in each epoch for training, and once for validation."""

from collections.abc import Callable

import grain

from jpipe_train.config.config import Config
from jpipe_train.data import masked
from jpipe_train.data.rows import Elements


def ordered(config: Config, rows: Elements | masked.Masked, part: int) -> Elements:
    """Return the rows in the order of their batches, endlessly for training."""
    if isinstance(rows, masked.Masked):
        return masked.Drawn(rows, epochs=part == 0)
    shuffled = grain.MapDataset.source(rows).shuffle(seed=seed_of(config, part))
    return shuffled.repeat() if part == 0 else shuffled


def numbers_of(config: Config, rows: Elements | masked.Masked, part: int) -> Callable[[int], int] | None:
    """Return what gives the number of a row to train on by its place in the order of the batches; None for rows that are drawn anew."""
    if part or isinstance(rows, masked.Masked):
        return None
    numbers = grain.MapDataset.range(len(rows)).shuffle(seed=seed_of(config, part)).repeat()
    return lambda place: int(numbers[place])


def seed_of(config: Config, part: int) -> int:
    """Return the seed of the order of one part: validation is spread over the files, but never by `config.seed`."""
    return config.seed if part == 0 else 0
