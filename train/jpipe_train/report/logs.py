"""Write the logs that the config key `log` names, in addition to metrics.jsonl."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from jpipe_train.config.run_settings import RunSettings
from jpipe_train.report.loggers.sender import Sender, check_installed
from jpipe_train.report.loggers.services import SERVICES
from jpipe_train.report.loggers.tensorboard import TensorBoard


def check(names: Sequence[str]) -> None:
    """Check that the libraries of the logs with these names are installed."""
    for service in SERVICES:
        if service in names:
            check_installed(service)


class Logs:
    """Writes the same values to all logs of a run. Use it in a `with` statement. A failing log does not stop the run.

    Args:
        settings: the settings of the run.
        folder: the folder of the run.
        say: prints a line.
    """

    def __init__(self, settings: RunSettings, folder: Path, say: Callable[[str], None]) -> None:
        self._logs: list[TensorBoard | Sender] = []
        with contextlib.ExitStack() as opened:
            if "tensorboard" in settings.log:
                self._logs.append(opened.enter_context(TensorBoard(folder / "tensorboard", say)))
            for service in SERVICES:
                if service in settings.log:
                    self._logs.append(opened.enter_context(Sender(service, folder, settings.record, say)))
            self._until_end = opened.pop_all()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the values of `step`, such as `{"loss": 2.3}`."""
        for log in self._logs:
            log.write(step, scalars)

    def hurry(self) -> None:
        """Make the closing wait only a few seconds, because the run was told to stop."""
        for log in self._logs:
            if isinstance(log, Sender):
                log.hurry()

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._until_end.__exit__(kind, error, traceback)
