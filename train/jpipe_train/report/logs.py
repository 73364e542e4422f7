"""The logs in addition to metrics.jsonl that `log` of a config names."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from jpipe_planner.machine.plain_yaml import parse
from jpipe_train.config.config import Config
from jpipe_train.config.config_file import to_yaml
from jpipe_train.report import wandb
from jpipe_train.report.tensorboard import TensorBoard


def check(config: Config) -> None:
    """Check that the libraries of the logs are installed.

    Raises:
        jpipe.InputError: a library is missing.
    """
    if "wandb" in config.log:
        wandb.check_installed()


class Logs:
    """Writes the same values to all logs of a run; use it in a `with`. A failing log does not stop the run.

    Args:
        config: the config of the run.
        folder: the folder of the run.
        say: prints a line.
    """

    def __init__(self, config: Config, folder: Path, say: Callable[[str], None]) -> None:
        self._wandb: wandb.Wandb | None = None
        self._tensorboard: TensorBoard | None = None
        with contextlib.ExitStack() as opened:
            if "tensorboard" in config.log:
                self._tensorboard = opened.enter_context(TensorBoard(folder / "tensorboard", say))
            if "wandb" in config.log:
                self._wandb = opened.enter_context(wandb.Wandb(folder, parse(to_yaml(config), "the config"), say))
            self._until_end = opened.pop_all()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the values of `step`, such as `{"loss": 2.3}`."""
        for log in (self._tensorboard, self._wandb):
            if log is not None:
                log.write(step, scalars)

    def hurry(self) -> None:
        """Limit the closing to a few seconds, because the run was told to stop."""
        if self._wandb is not None:
            self._wandb.hurry()

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._until_end.__exit__(kind, error, traceback)
