"""Call the callbacks of a run with its records, and let a callback end the run."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jpipe import InputError
from jpipe.errors import nearest

METHODS = ("on_step", "on_eval", "on_checkpoint")
"""The methods that a callback may have."""


@dataclass(frozen=True)
class StepRecord:
    """The numbers of a step, for `on_step`.

    Attributes:
        step: the number of the batch, from 0.
        loss: the mean loss of the batch; NaN if the batch was skipped and its loss is not finite.
        values: all numbers of the step, such as `gradient_norm`; the keys are the same as in `metrics.jsonl`.
    """

    step: int
    loss: float
    values: Mapping[str, int | float]


@dataclass(frozen=True)
class EvalRecord:
    """The results of an evaluation, for `on_eval`.

    Attributes:
        step: the step with these results in `metrics.jsonl`. They are for the weights before this step; the last results of a run are for
            its final weights.
        loss: the mean loss over the evaluation data.
        metrics: the mean of each metric; the keys are the names of the metrics.
    """

    step: int
    loss: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class CheckpointRecord:
    """A complete checkpoint, for `on_checkpoint`.

    Attributes:
        step: the number of batches before the checkpoint.
        path: the folder of the checkpoint. It may already be removed, if newer checkpoints have replaced it.
    """

    step: int
    path: Path


class Callbacks:
    """Calls the callbacks of a run, and remembers whether one of them has asked to end the run.

    Args:
        callbacks: objects with at least one of the methods in `METHODS`. A method gets a record and returns None or "stop".

    Attributes:
        stop: whether a callback has returned "stop".

    Raises:
        InputError: `callbacks` is not a list, or an object has none of these methods, or has an unknown method `on_…`.
    """

    def __init__(self, callbacks: Sequence[object] = ()) -> None:
        if not isinstance(callbacks, Iterable):
            raise InputError(f"callbacks: expected a list of objects, found {type(callbacks).__name__}; write it as a list, [callback]")
        self._callbacks = tuple(callbacks)
        for number, callback in enumerate(self._callbacks):
            _check(callback, f"callbacks[{number}]")
        self._saved = 0  # the number of checkpoints that were reported
        self.stop = False

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def finished(self, step: int, row: Mapping[str, int | float], validation: Mapping[str, float]) -> None:
        """Report a finished step with its numbers, as in `metrics.jsonl`, and its evaluation if there was one.

        The evaluation has `val_loss` and `val_NAME` for each metric.
        """
        self._call("on_step", StepRecord(step, float(row.get("loss", math.nan)), dict(row)))
        if validation:
            means = {name.removeprefix("val_"): value for name, value in validation.items()}
            loss = means.pop("loss")
            self._call("on_eval", EvalRecord(step, loss, means))

    def saved(self, steps: Sequence[int], folder: Path) -> None:
        """Report the checkpoints that were not yet reported; `steps` has all complete ones of this run, in order."""
        for step in steps[self._saved :]:
            self._saved += 1
            self._call("on_checkpoint", CheckpointRecord(step, folder / "checkpoints" / str(step)))

    def _call(self, method: str, record: StepRecord | EvalRecord | CheckpointRecord) -> None:
        for callback in self._callbacks:
            if (function := getattr(callback, method, None)) is None:
                continue
            name = f"{method} of {type(callback).__name__}"
            try:
                answer = function(record)
            except OSError as error:  # the run would report an OSError as an error of the run folder
                raise RuntimeError(f"{name} failed: {error}") from error
            if answer is not None and not (isinstance(answer, str) and answer == "stop"):
                raise InputError(f'callbacks: expected {name} to return None or "stop", found {type(answer).__name__}; fix it')
            self.stop = self.stop or answer is not None


def _check(callback: object, name: str) -> None:
    methods = [method for method in dir(callback) if method.startswith("on_") and callable(getattr(callback, method))]
    if unknown := [method for method in methods if method not in METHODS]:
        raise InputError(f"{name}: unknown method '{unknown[0]}' of {type(callback).__name__}; {nearest(unknown[0], METHODS)}")
    if not methods:
        raise InputError(
            f"{name}: expected an object with at least one of the methods {', '.join(METHODS)}, found {type(callback).__name__}; add a "
            "method, or remove the object"
        )
