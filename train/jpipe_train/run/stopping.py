"""Early stopping. After each validation all processes decide, from the same results, whether the run ends."""

import contextlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jpipe import InputError
from jpipe.errors import nearest
from jpipe_train.assemble.metrics import mode_of
from jpipe_train.checkpoint import best as best_checkpoints
from jpipe_train.checkpoint.best import Best, StopState
from jpipe_train.checkpoint.resume import Resumed
from jpipe_train.config.run_settings import RunSettings
from jpipe_train.config.train_config import StopConfig
from jpipe_train.launch.team import Team


def check(settings: RunSettings) -> None:
    """Check that the metrics in `train.stop` and `checkpoint.best` are results of the run's validations."""
    known = settings.results
    for key, chosen in (("train.stop", settings.train.stop), ("checkpoint.best", settings.checkpoint.best)):
        if chosen is not None and chosen.metric not in known:
            raise InputError(
                f"{key}.metric: expected a result of the validations of this run, found '{chosen.metric}'; {nearest(chosen.metric, known)}"
            )


class Stopping:
    """Decides when a run stops early. Without `train.stop` it never does.

    Args:
        settings: the settings of the run.
        resumed: the checkpoint to resume from. Its count of validations goes on if `train.stop` has the same metric.
    """

    def __init__(self, settings: RunSettings, resumed: Resumed | None = None) -> None:
        self._config = settings.train.stop
        self._states: list[StopState] = []  # after each validation, in order
        if self._config is not None:
            mode = mode_of(self._config, settings.results)
            state = None if resumed is None else resumed.facts.stop
            self._first = StopState(metric=self._config.metric, mode=mode, step=0)
            self._states = [state] if state is not None and state.continues(self._config, mode) else []

    def record(self, step: int, results: Mapping[str, float]) -> bool:
        """Record the validation before `step`, with the names in `metrics.jsonl`, once, and return whether the run ends there."""
        if self._config is None or (self._states and step <= self._states[-1].step):
            return False
        state = self._states[-1] if self._states else self._first
        self._states.append(state.after(step, results.get(self._config.metric, math.nan), self._config.min_delta))
        return self._states[-1].waited >= self._config.patience

    @property
    def is_active(self) -> bool:
        """Whether the run may stop early."""
        return self._config is not None

    def facts(self, step: int) -> dict[str, Any] | None:
        """Return the state after all validations up to `step`, for the checkpoint at `step`."""
        state = next((state for state in reversed(self._states) if state.step <= step), None)
        return None if state is None else state.model_dump(mode="json")

    def words(self, end: int) -> str:
        """Describe why the run ended early, before step `end`; "" if it did not end early."""
        over = self._config is not None and self._states and self._states[-1].waited >= self._config.patience
        return self._states[-1].words() if over and self._states[-1].step == end else ""


def stopped_words(stop: StopConfig | None, resumed: Resumed) -> str:
    """Describe why the resumed run had stopped early; "" if it had not, or if it continues because `train.stop` has changed."""
    state = resumed.facts.stop
    if stop is None or state is None or not state.continues(stop, stop.mode or state.mode):
        return ""
    return state.words() if state.step == resumed.step and state.waited >= stop.patience else ""


def remarks(settings: RunSettings, folder: Path, stopping: Stopping, end: int) -> dict[str, str]:
    """Return remarks about the end of the run and its best checkpoint, for the summary and the report."""
    early = stopping.words(end)
    remarks = {"stopped early": f"at step {end}: {early}"} if early else {}
    if (best := settings.checkpoint.best) is not None:
        with contextlib.suppress(InputError, OSError):  # the folder was moved or the disk has failed; both are reported elsewhere
            if (found := best_checkpoints.find(folder, best, settings.results)) is not None:
                remarks["best checkpoint"] = f"step {found[0]}, {best.metric} {found[1]:.6g}"
    return remarks


def find_best(settings: RunSettings, folder: Path, resumed: Resumed | None, team: Team) -> Best | None:
    """Return the object that selects the best checkpoints of a run; it knows the existing ones. All processes must call this."""
    best = settings.checkpoint.best
    if best is None:
        return None

    def read() -> str:
        if resumed is None:
            return "{}"
        steps = [step for step in resumed.steps if step <= resumed.step]
        return json.dumps(best_checkpoints.values_in(folder, best.metric, steps, resumed.facts.val_since))

    values = json.loads(team.from_first("the best checkpoints", read))
    return Best(best, mode_of(best, settings.results), {int(step): value for step, value in values.items()})
