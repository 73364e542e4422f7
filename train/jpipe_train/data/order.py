"""The order of rows: shuffled anew in each epoch for training, and once for validation."""

import grain

from jpipe_train.config.config import Config
from jpipe_train.data.rows import Elements


def shuffled(rows: Elements, seed: int, *, epochs: bool) -> Elements:
    """Return rows in shuffled order; with `epochs`, endlessly and shuffled anew in each epoch."""
    order = grain.MapDataset.source(rows).shuffle(seed=seed)
    return order.repeat() if epochs else order


def ordered(config: Config, rows: Elements, part: int) -> Elements:
    """Return the rows in the order of their batches, endlessly for training."""
    return shuffled(rows, seed_of(config, part), epochs=part == 0)


def seed_of(config: Config, part: int) -> int:
    """Return the seed for the order of one part; validation data are shuffled, too, but never by `config.seed`."""
    return config.seed if part == 0 else 0
