"""Check the labels and tokens of the built-in losses and models. Wrong ones would silently turn the loss into NaN."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jpipe import InputError
from jpipe_train.config.config import Config
from jpipe_train.config.model_section import Limit
from jpipe_train.data import data
from jpipe_train.data.position import Position
from jpipe_train.data.rows import Batch, Rows
from jpipe_train.losses import cross_entropy

_NEVER_COUNTED = -(2**31)


@dataclass(frozen=True)
class CheckedBatches:
    """Batches of integers. They are checked when their rows are read."""

    batches: Any  # the batches
    name: str  # the name of the batches in messages
    # for inputs and for labels, a mapping from the keys of arrays ("" for a single array) to limits
    limits: tuple[Mapping[str, Limit], Mapping[str, Limit]]

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def first_position(self) -> Position:
        """The position of the first batch."""
        first: Position = self.batches.first_position
        return first

    def position(self, batch: int) -> Position:
        """Return the position at which a batch begins."""
        start: Position = self.batches.position(batch)
        return start

    def continued(self, position: Position) -> "CheckedBatches":
        """Return batches of the same data that begin at `position`."""
        return replace(self, batches=self.batches.continued(position))

    def __getitem__(self, index: int) -> Batch:
        batch = self.batches[index]
        inputs, labels = (
            jax.tree_util.tree_map_with_path(partial(self._with_check, index, what, limits), part)
            for part, what, limits in zip(batch, ("input", "label"), self.limits, strict=True)
        )
        return inputs, labels

    def _with_check(self, index: int, what: str, limits: Mapping[str, Limit], path: Any, rows: Rows) -> Rows:
        key = jax.tree_util.keystr(path, simple=True, separator="/")
        if key not in limits:
            return rows
        least, most, why = limits[key]

        def read(start: int, stop: int) -> np.ndarray:
            values = rows[start:stop]
            outside = values[(values < least) | (values > most)]
            if outside.size:
                expected = f"from {least} to {most}" if least > _NEVER_COUNTED else f"at most {most}"
                raise InputError(
                    f"data: expected every {what} to be {expected} ({why}), found {outside.flat[0]} in {self.name}[{index}]"
                    f"{f' ({key})' if key else ''}; correct the {what}s, or the model"
                )
            return values

        return replace(rows, read=read)


def check_labels(config: Config, batches: data.Data, outputs: Any) -> data.Data:
    """Return the same data with checks of the labels and tokens against the specs of the model's outputs.

    Process 0 checks the first training and validation batch immediately. Raise InputError if a label or token is out of range, or the model
    has fewer outputs than the data have words or classes.
    """
    if batches.vocab_size is not None:
        _check_outputs(batches.vocab_size, batches, outputs)
    limits = ({}, {}) if config.model.knows(config.data) else (config.model.input_limits(), _label_limits(config, outputs))
    if not any(limits):
        return batches
    if limits[1]:
        _check_largest(limits[1][""], [batches, *(part for _, part in batches.parts)])
    train, validation = CheckedBatches(batches.train, "train", limits), CheckedBatches(batches.validation, "validation", limits)
    if jax.process_index() == 0:  # other processes read only the rows that their workers need
        for first in (validation[0], train[batches.first]):  # in an evaluation `train` has rows of `validation`
            jax.tree.map(lambda rows: rows[: len(rows)], first)
    return replace(batches, train=train, validation=validation)


def _check_largest(limit: Limit, parts: Sequence[data.Data]) -> None:
    """Check the largest label, if the data say what it is."""
    _, most, why = limit
    for part in parts:
        if part.largest_class is not None and part.largest_class[0] > most:
            label, place = part.largest_class
            raise InputError(
                f"data: expected every label to be at most {most} ({why}), found {label} in {place}; correct the labels, or the model"
            )


def _check_outputs(need: int, batches: data.Data, outputs: Any) -> None:
    """Check that a model with logits for each label has at least `need` logits, one for each word or class in the data."""
    labels = batches.like[1]
    if not hasattr(outputs, "shape") or not hasattr(labels, "shape") or len(outputs.shape) != len(labels.shape) + 1:
        return
    if need > (have := cross_entropy.vocab_size(outputs)):
        raise InputError(
            f"model.arguments: expected at least {need} outputs for each label, for the words or classes of {batches.source}, "
            f"found {have}; raise it, or use data with fewer words or classes"
        )


def _label_limits(config: Config, outputs: Any) -> dict[str, Limit]:
    """Return the limits of labels for the cross-entropy. Labels below zero are allowed, and do not count."""
    if config.loss_name != "cross_entropy":
        return {}
    count = cross_entropy.vocab_size(outputs)
    symbols = _NEVER_COUNTED, count - 1, f"the model has {count} outputs for each"
    return {"": symbols, "tokens": symbols, "next": (0, 1, "the second sentence follows, or not")}
