"""The losses of a run as they come in: read, checked, written and shown."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jpipe
from jpipe.files import shown
from train.assemble.optimizer import learning_rate
from train.checkpoint.history import History
from train.checkpoint.run_folder import METRICS, RunFolder
from train.config.config import Config
from train.console.progress import Reporter
from train.launch.together import Together
from train.report.measure import Measure
from train.report.tensorboard import TensorBoard

Validation = Mapping[str, float] | Sequence[jpipe.Evaluation]
"""Of one step: `{"val_loss": 2.3, "val_accuracy": 0.4}`, or what these come of."""


TIMES = frozenset({"seconds", "tokens_per_second", "samples_per_second"})
"""What a row has that is another number when the same run is run again."""


def repeatable(row: Mapping[str, float]) -> dict[str, float]:
    """What a row has that the same run, run again or resumed, gives again, bit for bit."""
    return {name: value for name, value in row.items() if name not in TIMES}


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
        history: History,
    ) -> None:
        self._config = config.train
        self._needs_disk = config.checkpoint.on_full_disk == "stop"
        self._lacks_rows = False  # whether some are not on the disk, and the user knows
        self._folder = folder
        self._tensorboard = tensorboard
        self._reporter = reporter
        self._measure = measure
        self._together = together
        self._history = history
        self._learning_rate = None if folder is None else learning_rate(config.optimizer, config.train.steps)
        self._validation: dict[int, Validation] = {}
        self.through = -1  # the last step whose row was written, if it was to be

    @property
    def seconds(self) -> float:
        """Since the run began, start-up included."""
        return self._reporter.seconds

    @property
    def folder(self) -> Path | None:
        """Where the rows are written, if they are."""
        return None if self._folder is None else self._folder.path

    def validation(self, step: int, found: "Validation") -> None:
        """It goes into the row of `step`; nothing waits for it yet."""
        self._validation[step] = found

    def validated(self, step: int) -> dict[str, float] | None:
        """What goes into the row of `step`, or has gone there; None: nothing."""
        known = self._validation.get(step)
        return None if known is None else means(known)

    def finished(self, metrics: jpipe.Metrics | None) -> None:
        """Wait for these losses and write their rows."""
        if metrics is None:
            return
        for step, loss in metrics.losses.items():
            row = {"step": step, "loss": self._finite(step, "loss", float(loss))}
            if step in metrics.norms:
                row["gradient_norm"] = self._finite(step, "norm of the gradient", float(metrics.norms[step]))
            row |= self._evaluated(step)
            self._reporter.tick(step)
            logged = step % self._config.log_every == 0 or step == self._config.steps - 1 or "val_loss" in row
            if logged and self._folder is not None:
                row |= self._progress(step)
                self._log(self._folder, row)  # first: whatever is printed can be found there
            self.through = step
            measured = self._measure.measured
            bubble = None if measured is None else measured.bubble
            self._reporter.step(step, row["loss"], self.validated(step) or {}, bubble)
            if logged and self._tensorboard is not None:
                shown = row if bubble is None else row | {"bubble": bubble}
                self._tensorboard.write(step, {name: value for name, value in shown.items() if name != "step"})

    def close(self) -> None:
        """Try once more to write the rows that are not on the disk, if there are any."""
        if self._lacks_rows and self._folder is not None:
            self._log(self._folder)
            if self._lacks_rows:
                self._reporter.say(f"'{shown(self._folder.path / METRICS)}' lacks its last rows")

    def _log(self, folder: RunFolder, *rows: dict[str, int | float]) -> None:
        try:
            folder.log(*rows)
        except OSError as error:
            if self._needs_disk:
                raise
            if not self._lacks_rows:
                self._reporter.say(
                    f"'{shown(folder.path / METRICS)}' cannot be written: {error.strerror}; the run goes on, and keeps its rows"
                )
            self._lacks_rows = True
        else:
            if self._lacks_rows:
                self._reporter.say(f"'{shown(folder.path / METRICS)}' has all rows again")
            self._lacks_rows = False

    def _progress(self, step: int) -> dict[str, float]:
        """Learning rate, time and speed, as far as they are known."""
        updates, speed = self._history.updates(step), self._reporter.speed
        found = {} if self._learning_rate is None or updates is None else {"learning_rate": self._learning_rate(updates)}
        found["seconds"] = round(self._history.seconds, 3)
        return found if speed is None else found | {f"{self._reporter.unit}_per_second": float(f"{speed:.4g}")}

    def _evaluated(self, step: int) -> dict[str, float]:
        """The validation loss of `step` and the metrics that are numbers, if there was a validation."""
        if step not in self._validation:
            return {}
        try:
            found = means(self._validation[step])
        except jpipe.InputError as error:
            raise self._together.shared(error) from None
        self._finite(step, "validation loss", found["val_loss"])
        for name in [name for name, value in found.items() if not math.isfinite(value)]:
            self._reporter.say(f"step {step}: {name} is {found.pop(name)}; metrics.jsonl does not have it")
        self._validation[step] = found
        return found

    def _finite(self, step: int, name: str, value: float) -> float:
        if not math.isfinite(value):
            hint = "lower optimizer.learning_rate or lengthen optimizer.warmup_steps"
            raise self._together.shared(NonFiniteLoss(f"step {step}: the {name} is {value}; {hint}"))
        return value


def means(found: Validation) -> dict[str, float]:
    """The loss and the metrics over all the batches of a validation, as a row has them; each batch counts for its weight."""
    if isinstance(found, Mapping):
        return dict(found)
    of_metrics = {f"val_{name}": [evaluation.metrics[name] for evaluation in found] for name in found[0].metrics}
    parts = {"val_loss": [jpipe.Mean(evaluation.loss, evaluation.weight) for evaluation in found]} | of_metrics
    return {name: _mean(name, batches) for name, batches in parts.items()}


def _mean(name: str, batches: Sequence[jpipe.Mean]) -> float:
    weights = [float(batch.weight) for batch in batches]
    if not sum(weights):
        if name != "val_loss":
            return math.nan
        raise jpipe.InputError(
            f"validation: the weights that the loss returns for the {len(weights)} validation batches sum to 0, so that there is no mean; "
            "give validation data with rows that count, or change the loss"
        )
    return sum(float(batch.mean) * weight for batch, weight in zip(batches, weights, strict=True)) / sum(weights)


def mean_loss(found: Validation) -> float:
    """The loss over all the batches of a validation."""
    return means(found)["val_loss"]
