"""What the training loop needs to know of a run, whether a config describes it or a Python program."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jpipe.files import resolved, shown
from jpipe_planner.machine.plain_yaml import dump
from jpipe_train.config.train_config import CheckpointConfig, Mode, TrainConfig


@dataclass(frozen=True)
class RunSettings:
    """The settings of a run in the training loop: `jpipe train` makes them from a config, and `jpipe_train.fit` from its arguments.

    Attributes:
        record: the keys and values that `config.yaml` in the run folder has.
        seed: the seed of the initial weights.
        train: the length of the run, and when it is evaluated and logged.
        checkpoint: when checkpoints are written, and which ones are kept.
        log: the names of further logs.
        metrics: returns the functions of an evaluation by name; it may import the user's code.
        results: the results of a validation by their names in a row, each with whether lower or higher values are better.
        items: how much a step processes, and in which unit.
        loss_unit: the unit that follows a loss in messages.
        learning_rate: returns, for a number of steps, a function from the number of a batch to its learning rate, or None if unknown.
        accumulate_batches: the number of batches of an update.
        fresh_optimizer: whether a resumed run begins with new optimizer state.
        in_python: whether a Python program has called `fit`; without a folder of its own nothing is written then.
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
        """The key `run.dir`: the run folder, or None for one of the numbered folders."""
        folder: str | None = self.record["run"]["dir"]
        return folder

    @property
    def path(self) -> Path | None:
        """The absolute path of `folder`, without symbolic links.

        Raises:
            InputError: no run can be written there.
        """
        return None if self.folder is None else resolved(self.folder, "run.dir")

    @property
    def yaml(self) -> str:
        """The record as text."""
        return dump(dict(self.record))

    def yaml_in(self, folder: Path) -> str:
        """Return the text of `config.yaml` of the run in a folder."""
        return dump({**self.record, "run": {"dir": shown(folder)}})

    def with_steps(self, steps: int) -> "RunSettings":
        """Return the settings with the number of steps that the epochs of the run have."""
        return replace(self, train=self.train.model_copy(update={"steps": steps}))
