"""The losses of a run: read when they arrive, checked, written and shown."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jpipe
from jpipe.files import shown
from jpipe_train.assemble.optimizer import learning_rate
from jpipe_train.checkpoint.history import History
from jpipe_train.checkpoint.run_folder import METRICS, FolderChanged, RunFolder
from jpipe_train.config.config import Config
from jpipe_train.console.progress import Reporter
from jpipe_train.launch.together import Together
from jpipe_train.report.logs import Logs
from jpipe_train.report.measure import Measure
from jpipe_train.report.mfu import Utilization

Validation = Mapping[str, float] | Sequence[jpipe.Evaluation]
"""Results of one step: `{"val_loss": 2.3, "val_accuracy": 0.4}`, or numbers from which these are computed."""


TIMES = frozenset({"seconds", "tokens_per_second", "samples_per_second", "mfu"})
"""The values of a row that differ when the same run is repeated."""


def repeatable(row: Mapping[str, float]) -> dict[str, float]:
    """The values of a row that a repeated or resumed run gives again, bit for bit."""
    return {name: value for name, value in row.items() if name not in TIMES}


class RunStopped(RuntimeError):
    """The run could not continue; its folder has the earlier steps."""


class NonFiniteLoss(RunStopped):
    """A loss became infinite or not a number, or too many batches in a row were skipped."""


MOST_SKIPPED = 20
"""Batches skipped in a row after which a run ends."""


class MetricsLog:
    """Turns losses into rows of `metrics.jsonl`, values for other logs and lines on the screen.

    Processes that write nothing read the same losses, so that all stop at the same step. If the disk is full and the config says to
    continue, rows are kept in memory, and written when there is space again.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder | None,
        logs: Logs | None,
        reporter: Reporter,
        measure: Measure,
        together: Together,
        history: History,
        utilization: Utilization | None = None,
    ) -> None:
        self._config = config
        self._needs_disk = config.checkpoint.on_full_disk == "stop"
        self._lacks_rows = False  # whether rows are missing on disk, and the user was informed
        self._folder = folder
        self._logs = logs
        self._reporter = reporter
        self._measure = measure
        self._together = together
        self._history = history
        self._utilization = utilization
        self._learning_rate = None if folder is None else learning_rate(config.optimizer, config.train.steps)
        self._validation: dict[int, Validation] = {}
        self._known: jpipe.Metrics = jpipe.Metrics.empty()  # of steps whose rows are not written yet
        self._skipped = 0  # steps in a row
        self.through = -1  # the last step whose row was written, if it was to be

    @property
    def seconds(self) -> float:
        """Seconds since the run began, including start-up."""
        return self._reporter.seconds

    @property
    def folder(self) -> Path | None:
        """The folder to which rows are written, if any."""
        return None if self._folder is None else self._folder.path

    def validation(self, step: int, found: "Validation") -> None:
        """Add a validation to the row of `step`, without waiting for its numbers."""
        self._validation[step] = found

    def validated(self, step: int) -> dict[str, float] | None:
        """The validation in the row of `step`, or None."""
        known = self._validation.get(step)
        return None if known is None else means(known)

    def finished(self, metrics: jpipe.Metrics | None) -> None:
        """Wait for these numbers, and write the rows of all steps whose numbers are complete; a norm may come later than its loss."""
        for known, found in zip(self._known, metrics or (), strict=False):
            known.update(found)
        losses, _, norms, *_ = self._known
        for step in sorted(losses):
            if self._config.uses_global_norm and step not in norms:
                break
            self._write(step)
            for known in self._known:
                known.pop(step, None)

    def _write(self, step: int) -> None:
        """Write the row of a step."""
        row = self._trained(step) | self._evaluated(step)
        config = self._config.train
        self._reporter.tick(step)
        logged = step % config.log_every == 0 or step == config.steps - 1 or "val_loss" in row or "skipped" in row
        if logged and self._folder is not None:
            row |= self._progress(step)
            self._log(self._folder, row)  # first, so that everything printed is also in the file
        self.through = step
        measured = self._measure.measured
        bubble = None if measured is None else measured.bubble
        self._reporter.step(step, row.get("loss", math.nan), self.validated(step) or {}, bubble, self._mfu)
        if logged and self._logs is not None:
            shown = row if bubble is None else row | {"bubble": bubble}
            self._logs.write(step, {name: value for name, value in shown.items() if name != "step"})

    def _trained(self, step: int) -> dict[str, int | float]:
        """Loss and norm of the gradient of a step. If the step was skipped, those that are numbers."""
        losses, _, norms, nonfinite, scales = self._known
        found = {"loss": float(losses[step])} | ({"gradient_norm": float(norms[step])} if step in norms else {})
        if step in norms and not float(nonfinite[step]) and math.isinf(found["gradient_norm"]):
            del found["gradient_norm"]  # of finite gradients, whose squares are too large
        scale = {"loss_scale": float(scales[step])} if step in scales else {}
        if not self._config.skips_nonfinite or not float(nonfinite[step]):
            self._skipped = 0
            words = {"loss": "loss", "gradient_norm": "norm of the gradient"}
            return {"step": step} | {name: self._finite(step, words[name], value) for name, value in found.items()} | scale
        self._skipped += 1
        then = f"; the loss scale is now {scale['loss_scale']:,.0f}" if scale else ""
        self._reporter.say(f"step {step}: skipped, because {float(nonfinite[step]):,.0f} entries of its gradient are NaN or infinite{then}")
        if self._skipped == MOST_SKIPPED:
            hint = "lower optimizer.learning_rate, or look at the data of these steps"
            raise self._together.shared(NonFiniteLoss(f"step {step}: {MOST_SKIPPED} steps in a row were skipped; {hint}"))
        return {"step": step, "skipped": 1} | {name: value for name, value in found.items() if math.isfinite(value)} | scale

    def close(self) -> None:
        """Try again to write the rows that are missing on disk, if there are any."""
        if self._lacks_rows and self._folder is not None:
            self._log(self._folder)

    def check_complete(self, end: int) -> None:
        """Check that the rows of all steps before `end` are written, wherever there is a folder for them.

        Raises:
            RunStopped: some are missing.
            FolderChanged: somebody has changed them.
        """
        if self.through < end - 1:
            missing = f"step {self.through + 1}" if self.through == end - 2 else f"steps {self.through + 1} to {end - 1}"
            raise self._together.shared(RunStopped(f"the run came to its end without a loss of {missing}; this is a fault of jpipe"))
        if self._folder is None:
            return
        if self._lacks_rows:
            raise RunStopped(f"'{shown(self._folder.path / METRICS)}' lacks its last rows, for which there was no room on the disk")
        self._folder.logged()

    def _log(self, folder: RunFolder, *rows: dict[str, int | float]) -> None:
        try:
            folder.log(*rows)
        except OSError as error:
            if self._needs_disk or isinstance(error, FolderChanged):
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

    @property
    def _mfu(self) -> float | None:
        """Of the recent steps, if it is known."""
        seconds = self._reporter.step_seconds
        return None if self._utilization is None or seconds is None else float(f"{self._utilization.at(seconds):.4g}")

    def _progress(self, step: int) -> dict[str, float]:
        """Learning rate, time and speed, if known."""
        updates, speed = self._history.updates(step), self._reporter.speed
        found = {} if self._learning_rate is None or updates is None else {"learning_rate": self._learning_rate(updates)}
        found["seconds"] = round(self._history.seconds, 3)
        found |= {} if speed is None else {f"{self._reporter.unit}_per_second": float(f"{speed:.4g}")}
        return found if self._mfu is None else found | {"mfu": self._mfu}

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
            hint = "lower optimizer.learning_rate or raise optimizer.warmup_steps"
            raise self._together.shared(NonFiniteLoss(f"step {step}: the {name} is {value}; {hint}"))
        return value


def means(found: Validation) -> dict[str, float]:
    """The loss and the metrics over all batches of a validation, in the form of a row; batches are weighted by their weights."""
    if isinstance(found, Mapping):
        return dict(found)
    return mean_of([means_of(evaluation) for evaluation in found])


def means_of(evaluation: jpipe.Evaluation) -> dict[str, tuple[float, float]]:
    """(mean, weight) of the loss and of each metric, by their names in a row; waits for them."""
    means = {"loss": jpipe.Mean(evaluation.loss, evaluation.weight), **evaluation.metrics}
    return {f"val_{name}": (float(mean.mean), float(mean.weight)) for name, mean in means.items()}


def mean_of(batches: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """The means over all of these batches, by name.

    Raises:
        jpipe.InputError: the loss has no weight at all.
    """
    return {name: _mean(name, [batch[name] for batch in batches]) for name in batches[0]}


def _mean(name: str, batches: Sequence[tuple[float, float]]) -> float:
    weights = [weight for _, weight in batches]
    if not sum(weights):
        if name != "val_loss":
            return math.nan
        raise jpipe.InputError(
            f"validation: the weights that the loss returns for the {len(weights)} validation batches sum to 0, so that there is no mean; "
            "give validation data with unmasked examples, or change the loss"
        )
    return sum(mean * weight for mean, weight in batches) / sum(weights)


def mean_loss(found: Validation) -> float:
    """The loss over all the batches of a validation."""
    return means(found)["val_loss"]
