"""The losses of a run as they come in: read, checked, written and shown."""

import math
from collections.abc import Sequence
from pathlib import Path

import jpipe
from train.config import Config
from train.measure import Measure
from train.progress import Reporter
from train.run_folder import METRICS, RunFolder
from train.tensorboard import TensorBoard
from train.together import Together


class RunStopped(RuntimeError):
    """The run could not go on; what came before is in its folder."""


class NonFiniteLoss(RunStopped):
    """A loss became infinite or not a number."""


class MetricsLog:
    """Turns losses, as they come in, into rows of `metrics.jsonl`, events for TensorBoard and words on the screen.

    In the processes that write nothing it reads the same losses, so that all stop at the same step.
    Rows for which the disk has no room are kept, where the config says to go on without it, and written as soon as there is some.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder | None,
        tensorboard: TensorBoard | None,
        reporter: Reporter,
        measure: Measure,
        together: Together,
    ) -> None:
        self._config = config.train
        self._needs_disk = config.checkpoint.on_full_disk == "stop"
        self._lacks_rows = False  # whether some are not on the disk, and that was told
        self._folder = folder
        self._tensorboard = tensorboard
        self._reporter = reporter
        self._measure = measure
        self._together = together
        self._validation: dict[int, float | Sequence[jpipe.Evaluation]] = {}
        self.through = -1  # the last step whose row was written, if it was to be

    @property
    def seconds(self) -> float:
        """Since the run began, start-up included."""
        return self._reporter.seconds

    @property
    def folder(self) -> Path | None:
        """Where the rows are written, if they are."""
        return None if self._folder is None else self._folder.path

    def validation(self, step: int, evaluations: float | Sequence[jpipe.Evaluation]) -> None:
        """These, or the loss that came of them, go into the row of `step`; nothing waits for them yet."""
        self._validation[step] = evaluations

    def validation_loss(self, step: int) -> float | None:
        """What goes into the row of `step`, or has gone there."""
        known = self._validation.get(step)
        return None if known is None else mean_loss(known)

    def finished(self, metrics: jpipe.Metrics | None) -> None:
        """Wait for these losses and write their rows."""
        if metrics is None:
            return
        for step, loss in metrics.losses.items():
            row = {"step": step, "loss": self._finite(step, "loss", float(loss))}
            if step in metrics.norms:
                row["gradient_norm"] = self._finite(step, "norm of the gradient", float(metrics.norms[step]))
            if step in self._validation:
                row["val_loss"] = self._validation[step] = self._finite(step, "validation loss", mean_loss(self._validation[step]))
            logged = step % self._config.log_every == 0 or step == self._config.steps - 1 or "val_loss" in row
            if logged and self._folder is not None:
                self._log(self._folder, row)  # first of all: what is told can be found there
            self.through = step
            measured = self._measure.measured
            bubble = None if measured is None else measured.bubble
            self._reporter.step(step, row["loss"], row.get("val_loss"), bubble)
            if logged and self._tensorboard is not None:
                shown = row | {f"{self._reporter.unit}_per_second": self._reporter.speed, "bubble": bubble}
                self._tensorboard.write(step, {name: value for name, value in shown.items() if name != "step" and value is not None})

    def close(self) -> None:
        """Try once more to write the rows that are not on the disk, if there are any."""
        if self._lacks_rows and self._folder is not None:
            self._log(self._folder)
            if self._lacks_rows:
                self._reporter.say(f"'{self._folder.path / METRICS}' lacks its last rows")

    def _log(self, folder: RunFolder, *rows: dict[str, int | float]) -> None:
        try:
            folder.log(*rows)
        except OSError as error:
            if self._needs_disk:
                raise
            if not self._lacks_rows:
                self._reporter.say(f"'{folder.path / METRICS}' cannot be written: {error.strerror}; the run goes on, and keeps its rows")
            self._lacks_rows = True
        else:
            if self._lacks_rows:
                self._reporter.say(f"'{folder.path / METRICS}' has all rows again")
            self._lacks_rows = False

    def _finite(self, step: int, name: str, value: float) -> float:
        if not math.isfinite(value):
            hint = "lower optimizer.learning_rate or lengthen optimizer.warmup_steps"
            raise self._together.shared(NonFiniteLoss(f"step {step}: the {name} is {value}; {hint}"))
        return value


def mean_loss(evaluations: float | Sequence[jpipe.Evaluation]) -> float:
    """The loss over all the batches, each counting for its weight; one that is known already as it is."""
    if isinstance(evaluations, float):
        return evaluations
    weights = [float(evaluation.weight) for evaluation in evaluations]
    return sum(float(e.loss) * weight for e, weight in zip(evaluations, weights, strict=True)) / sum(weights)
