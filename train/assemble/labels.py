"""Labels and tokens that the built-in loss and model have no place for: without a message the loss would only be not a number."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jpipe import InputError
from train.assemble import gpt
from train.config.config import Config
from train.data import data
from train.data.rows import Batch, Rows


@dataclass(frozen=True)
class Checked:
    """The same batches, their integers checked as their rows are read.

    Attributes:
        batches: of which.
        name: of them, for messages.
        limits: for inputs and labels how many values there are, and what has so many; None: any will do.
    """

    batches: Any
    name: str
    limits: tuple[tuple[int, str] | None, tuple[int, str] | None]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        batch = self.batches[index]
        parts = zip(batch, ("input", "label"), self.limits, strict=True)
        inputs, labels = (part if limit is None else self._checked(part, index, what, *limit) for part, what, limit in parts)
        return inputs, labels

    def _checked(self, part: Any, index: int, what: str, count: int, why: str) -> Any:
        def read(rows: Rows, start: int, stop: int) -> np.ndarray:
            found = rows[start:stop]
            outside = found[(found < 0) | (found >= count)]
            if outside.size:
                raise InputError(
                    f"data: expected every {what} to be from 0 to {count - 1} ({why}), found {outside.flat[0]} in {self.name}[{index}]; "
                    f"correct the {what}s, or the model"
                )
            return found

        return jax.tree.map(lambda rows: replace(rows, read=lambda start, stop: read(rows, start, stop)), part)


def checked(config: Config, batches: data.Data, outputs: Any) -> data.Data:
    """The same data, checked where something built in reads it; the first batch of each kind at once, by process 0.

    Args:
        config: of the run.
        batches: its data.
        outputs: shapes and dtypes of the outputs of the model.

    Raises:
        InputError: a label or a token of a first batch is out of range.
    """
    inputs = labels = None
    if config.model.target is None and config.data.target is not None:
        inputs = gpt.SYMBOLS, "the built-in model reads bytes"
    if config.loss.target is None and (config.model.target is not None or config.data.target is not None):
        labels = outputs.shape[-1], f"the model has {outputs.shape[-1]} outputs for each"
    if inputs is None and labels is None:
        return batches
    train, validation = Checked(batches.train, "train", (inputs, labels)), Checked(batches.validation, "validation", (inputs, labels))
    if jax.process_index() == 0:  # the others read only what their own workers need, and hear of what it refuses
        for first in (train[0], validation[0]):
            jax.tree.map(lambda rows: rows[: len(rows)], first)
    return replace(batches, train=train, validation=validation)
