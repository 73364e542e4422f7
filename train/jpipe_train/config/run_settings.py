"""The settings of a run that the training loop needs, whether they come from a config or from a Python program."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jpipe.files import resolved, shown
from jpipe_planner.machine.plain_yaml import dump
from jpipe_train.config.train_config import CheckpointConfig, Mode, TrainConfig


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run in the training loop. `jpipe train` makes them from a config, and `jpipe_train.fit` from its arguments.

    Attributes:
        record: the keys and values of `config.yaml` in the run folder.
        seed: the seed of the initial weights.
        train: the length of the run, and when it is evaluated and logged.
        checkpoint: when checkpoints are written, and which checkpoints are kept.
        log: the names of additional logs.
        metrics: a function that returns a dict of the evaluation's metric functions; it may import the user's code.
        results: for each result of a validation, named as in `metrics.jsonl`, whether lower or higher values are better.
        items: the amount of data that a step processes, and its unit.
        loss_unit: the unit that follows a loss in messages.
        learning_rate: a function from the number of steps to a function from a batch number to the learning rate, or to None if unknown.
        accumulate_batches: the number of batches per update.
        fresh_optimizer: whether a resumed run begins with new optimizer state.
        in_python: whether a Python program called `fit`; if it named no run folder, nothing is written.
    """

    record: Mapping[str, Any]
    seed: int
    train: TrainConfig
    checkpoint: CheckpointConfig
    log: Sequence[str]
    metrics: Callable[[], Mapping[str, Any]]
    results: Mapping[str, Mode]
    items: tuple[int, str]
    loss_unit: str = ""
    learning_rate: Callable[[int], Callable[[int], float] | None] = lambda steps: None
    accumulate_batches: int = 1
    fresh_optimizer: bool = False
    in_python: bool = False

    @property
    def folder(self) -> str | None:
        """The value of `run.dir`: the run folder, or None for the next numbered folder."""
        folder: str | None = self.record["run"]["dir"]
        return folder

    @property
    def path(self) -> Path | None:
        """The absolute path of `folder`, without symbolic links. Raise InputError if a run cannot be written there."""
        return None if self.folder is None else resolved(self.folder, "run.dir")

    @property
    def yaml(self) -> str:
        """The record as YAML text."""
        return dump(dict(self.record))

    def yaml_in(self, folder: Path) -> str:
        """Return the text of `config.yaml` for a run in `folder`."""
        return dump({**self.record, "run": {"dir": shown(folder)}})

    def with_steps(self, steps: int) -> "RunSettings":
        """Return the settings with `train.steps` set to `steps`, the number of steps in the run's epochs."""
        return replace(self, train=self.train.model_copy(update={"steps": steps}))
