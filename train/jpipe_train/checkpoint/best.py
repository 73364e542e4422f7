"""The best checkpoints of a run by a validation result, and the state of early stopping in a checkpoint."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from jpipe import InputError
from jpipe.files import shown
from jpipe_train.assemble.metrics import mode_of, results
from jpipe_train.checkpoint.history import Count
from jpipe_train.config import config_file
from jpipe_train.config.config import BestConfig, Mode, StopConfig

Step = int | Literal["best"] | None
"""Which checkpoint of a run: its step, "best", or None for the newest complete one."""


class StopState(pydantic.BaseModel):
    """How long a validation result of a run has not improved."""

    model_config = pydantic.ConfigDict(extra="ignore", frozen=True)

    metric: Annotated[str, pydantic.Field(max_length=100)]  # the name of the result
    mode: Mode  # whether lower or higher values are better
    step: Count  # the step of the last validation
    waited: Count = 0  # the number of validations since the best value
    best: Annotated[float, pydantic.Field(allow_inf_nan=False)] | None = None  # the best value; None if there is none yet
    best_step: Count | None = None  # the step of the validation with the best value

    def after(self, step: int, value: float, min_delta: float) -> "StopState":
        """Return the state after a validation before `step`. A value that is not finite is no improvement."""
        if math.isfinite(value) and (self.best is None or is_better(value, self.best, self.mode, min_delta)):
            return self.model_copy(update={"step": step, "waited": 0, "best": value, "best_step": step})
        return self.model_copy(update={"step": step, "waited": self.waited + 1})

    def continues(self, config: StopConfig, mode: Mode) -> bool:
        """Return whether this state is for the same result and mode."""
        return (self.metric, self.mode) == (config.metric, mode)

    def words(self) -> str:
        """Describe why the run has stopped."""
        best = "it was never finite" if self.best is None else f"the best one, {self.best:.6g}, was at step {self.best_step}"
        return f"{self.metric} has not improved in {self.waited} validation{'s' if self.waited > 1 else ''}; {best}"


def is_better(value: float, other: float, mode: Mode, min_delta: float = 0.0) -> bool:
    """Return whether a value is better than another by more than `min_delta`."""
    return value < other - min_delta if mode == "min" else value > other + min_delta


class Best:
    """Decides which checkpoints of a run are among its best. All processes have the same results, so they decide alike.

    Args:
        config: the result to compare, and the number of best checkpoints.
        mode: whether lower or higher values are better.
        values: the values of the checkpoints that exist when this part of the run begins, by step.
    """

    def __init__(self, config: BestConfig, mode: Mode, values: Mapping[int, float]) -> None:
        self._config, self._mode = config, mode
        self._values = dict(values)

    def record(self, step: int, facts: Mapping[str, Any]) -> bool:
        """Record the checkpoint at a step with its facts, and return whether it is among the best."""
        value = _value(facts, self._config.metric)
        if value is None:
            return False
        self._values[step] = value
        self._values = {step: self._values[step] for step in ranked(self._values, self._mode)[: self._config.keep]}
        return step in self._values

    def in_folder(self, folder: Path) -> list[int]:
        """Return the steps of the best complete checkpoints in a run folder, the best first."""
        return ranked(values_in(folder, self._config.metric), self._mode)[: self._config.keep]


def ranked(values: Mapping[int, float], mode: Mode) -> list[int]:
    """Return the steps sorted by value, the best first. Among equal values, the earlier step is first."""
    return sorted(values, key=lambda step: (values[step] if mode == "min" else -values[step], step))


def values_in(folder: Path, metric: str, steps: Iterable[int] | None = None, since: int = 0) -> dict[int, float]:
    """Return the values of a result by step, from the complete checkpoints that have it. Damaged checkpoints are left out.

    Only `steps` are considered, if given, and only steps after `since` and after a change of the validation data (a checkpoint's
    `val_since`).
    """
    from jpipe import checkpoints

    values = {}
    for step in checkpoints.steps(folder) if steps is None else steps:
        try:
            facts = checkpoints.Checkpoint(folder, step).facts
        except InputError:
            continue
        if not isinstance(facts, Mapping):
            continue
        changed, value = facts.get("val_since"), _value(facts, metric)
        since = max(since, changed) if type(changed) is int else since
        if value is not None:
            values[step] = value
    return {step: value for step, value in values.items() if not since or step > since}


def _value(facts: Mapping[str, Any], metric: str) -> float | None:
    """Return a validation result of a checkpoint's weights, or None if it is missing or not finite."""
    others = facts.get("val_metrics")
    results = {"val_loss": facts.get("val_loss")} | (others if isinstance(others, dict) else {})
    final = facts.get("val_final")
    value: Any = (final if isinstance(final, dict) and final else results).get(metric)
    return float(value) if type(value) in (int, float) and math.isfinite(value) else None


def best_step(folder: Path, where: str) -> int:
    """Return the step of the best checkpoint of a run. Raise InputError if it does not keep its best checkpoints, or has none yet."""
    config = config_file.load_resolved(folder / "config.yaml")
    best = config.checkpoint.best
    if best is None:
        raise InputError(
            f"{where}: expected a run with checkpoint.best, which keeps its best checkpoints, found '{shown(folder)}' without it; give "
            "the number of a step, or train with checkpoint.best"
        )
    if (found := find(folder, best, results(config))) is not None:
        return found[0]
    raise InputError(
        f"{where}: expected a checkpoint with {best.metric} in '{shown(folder)}', found none; only the last checkpoint and checkpoints at "
        "multiples of train.eval_every have it; give the number of a step"
    )


def find(folder: Path, best: BestConfig, results: Mapping[str, Mode]) -> tuple[int, float] | None:
    """Return the step and value of the checkpoint in a run folder that is best by `best`, or None if there is none."""
    values = values_in(folder, best.metric)
    steps = ranked(values, mode_of(best, results))
    return (steps[0], values[steps[0]]) if steps else None
