"""Shuffle rows: for training anew in each epoch, for validation once."""

import grain

from jpipe_train.config.config import Config
from jpipe_train.data.rows import Elements


def shuffled(rows: Elements, seed: int, *, epochs: bool) -> Elements:
    """Return the rows in shuffled order. With `epochs` they repeat endlessly, and are shuffled anew in each epoch."""
    order = grain.MapDataset.source(rows).shuffle(seed=seed)
    return order.repeat() if epochs else order


def ordered(config: Config, rows: Elements, part: int) -> Elements:
    """Return the rows in the order in which batches use them. Training rows (`part` 0) repeat endlessly."""
    return shuffled(rows, seed_of(config, part), epochs=part == 0)


def seed_of(config: Config, part: int) -> int:
    """Return the seed for the order of a part: `config.seed` for training (0), and always 0 for validation."""
    return config.seed if part == 0 else 0
