"""Labels and tokens that the built-in loss and model have no place for: without a message the loss would only be not a number."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jpipe import InputError
from jpipe_train.config.config import Config
from jpipe_train.data import data
from jpipe_train.data.position import Position
from jpipe_train.data.rows import Batch, Rows
from jpipe_train.models import cross_entropy

Limit = tuple[int, int, str]
"""The least and the largest value that have a place, and what has so many."""
_NEVER_COUNTED = -(2**31)


@dataclass(frozen=True)
class Checked:
    """The same batches, their integers checked as their rows are read.

    Attributes:
        batches: of which.
        name: of them, for messages.
        limits: for inputs and labels, by the key of an array in them ("" where they are one array).
    """

    batches: Any
    name: str
    limits: tuple[dict[str, Limit], dict[str, Limit]]

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def first_position(self) -> Position:
        """Where the order of the batches begins."""
        first: Position = self.batches.first_position
        return first

    def position(self, batch: int) -> Position:
        """Return where this batch begins."""
        found: Position = self.batches.position(batch)
        return found

    def continued(self, position: Position) -> "Checked":
        """Return the same data in batches that begin at `position`."""
        return replace(self, batches=self.batches.continued(position))

    def __getitem__(self, index: int) -> Batch:
        batch = self.batches[index]
        inputs, labels = (
            jax.tree_util.tree_map_with_path(partial(self._checked, index, what, limits), part)
            for part, what, limits in zip(batch, ("input", "label"), self.limits, strict=True)
        )
        return inputs, labels

    def _checked(self, index: int, what: str, limits: dict[str, Limit], path: Any, rows: Rows) -> Rows:
        key = jax.tree_util.keystr(path, simple=True, separator="/")
        if key not in limits:
            return rows
        least, most, why = limits[key]

        def read(start: int, stop: int) -> np.ndarray:
            found = rows[start:stop]
            outside = found[(found < least) | (found > most)]
            if outside.size:
                begins = f"from {least} to {most}" if least > _NEVER_COUNTED else f"at most {most}"
                raise InputError(
                    f"data: expected every {what} to be {begins} ({why}), found {outside.flat[0]} in {self.name}[{index}]"
                    f"{f' ({key})' if key else ''}; correct the {what}s, or the model"
                )
            return found

        return replace(rows, read=read)


def checked(config: Config, batches: data.Data, outputs: Any) -> data.Data:
    """The same data, checked where something built in reads it; the first batch of each kind at once, by process 0.

    Args:
        config: of the run.
        batches: its data.
        outputs: shapes and dtypes of the outputs of the model.

    Raises:
        InputError: a label or a token of a first batch is out of range; the model has fewer outputs than the data has words or classes.
    """
    if batches.vocab_size is not None:
        _check_outputs(batches.vocab_size, batches, outputs)
    limits = _of_inputs(config), _of_labels(config, outputs)
    if not any(limits):
        return batches
    train, validation = Checked(batches.train, "train", limits), Checked(batches.validation, "validation", limits)
    if jax.process_index() == 0:  # the others read only what their own workers need, and hear of what it refuses
        for first in (train[batches.first], validation[0]):
            jax.tree.map(lambda rows: rows[: len(rows)], first)
    return replace(batches, train=train, validation=validation)


def _check_outputs(need: int, batches: data.Data, outputs: Any) -> None:
    """Check that a model with logits for each label has one for each of the words or classes of the data.

    Raises:
        InputError: it has fewer.
    """
    labels = batches.like[1]
    if not hasattr(outputs, "shape") or not hasattr(labels, "shape") or len(outputs.shape) != len(labels.shape) + 1:
        return
    if need > (have := cross_entropy.vocab_size(outputs)):
        raise InputError(
            f"model.arguments: expected at least {need} outputs for each label, for the words or classes of {batches.source}, "
            f"found {have}; raise their number, or keep fewer words or classes"
        )


def _of_inputs(config: Config) -> dict[str, Limit]:
    """Of tokens and of the first or second sentence, where a built-in model reads other data than bytes."""
    if config.data.target is None or config.model.target is not None:
        return {}
    symbols = 0, config.model.vocab_size - 1, f"the built-in model has {config.model.vocab_size} symbols, model.vocab_size"
    return {"": symbols, "tokens": symbols, "types": (0, 1, "there are two sentences")}


def _of_labels(config: Config, outputs: Any) -> dict[str, Limit]:
    """Where the built-in loss reads something else than its own labels: those below zero are not counted."""
    if config.loss.target is not None or (config.model.target is None and config.data.target is None):
        return {}
    count = cross_entropy.vocab_size(outputs)
    symbols = _NEVER_COUNTED, count - 1, f"the model has {count} outputs for each"
    return {"": symbols, "tokens": symbols, "next": (0, 1, "the second sentence follows, or not")}
