"""Read the losses of a run as devices compute them, check them, write them to `metrics.jsonl` and print them."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jpipe
from jpipe.files import shown
from jpipe_train.assemble.metrics import centred, combined
from jpipe_train.checkpoint.history import History
from jpipe_train.checkpoint.run_folder import METRICS, FolderChanged, RunFolder
from jpipe_train.config.data_section import SourceConfig
from jpipe_train.config.run_settings import RunSettings
from jpipe_train.console.progress import Reporter
from jpipe_train.launch.team import Team
from jpipe_train.report.logs import Logs
from jpipe_train.report.performance.measure import Measure
from jpipe_train.report.performance.mfu import Utilization


class Evaluated(NamedTuple):
    """The evaluation of a batch and, if there are several sources, the batch's source."""

    evaluation: jpipe.Evaluation
    source: SourceConfig | None = None


Validation = Mapping[str, float] | Sequence[Evaluated]
"""The results of a validation, such as `{"val_loss": 2.3, "val_accuracy": 0.4}`, or the evaluations that `means_of` reads them from."""


TIMES = frozenset({"seconds", "tokens_per_second", "samples_per_second", "mfu"})
"""The names of values in a row that differ when the same run is repeated."""


def repeatable(row: Mapping[str, float]) -> dict[str, float]:
    """Return the values of a row that a repeated or resumed run must reproduce bit for bit."""
    return {name: value for name, value in row.items() if name not in TIMES}


class RunStopped(RuntimeError):
    """The run could not continue; its folder holds the earlier steps."""


class NonFiniteLoss(RunStopped):
    """A loss became infinite or NaN, or too many batches in a row were skipped."""


MOST_SKIPPED = 20
"""A run ends after this many skipped batches in a row."""


OnRow = Callable[[int, Mapping[str, int | float], Mapping[str, float]], None]
"""A function that is called with the number of a finished step, its row, and the results of its validation (empty without one)."""


class MetricsLog:
    """Turns losses into rows of `metrics.jsonl`, values for other logs and lines on the terminal.

    Processes without a folder also read the losses, so that all processes stop at the same step. If the disk is full and the config allows
    the run to continue, rows are kept in memory until there is space again. Each row is passed to `on_row` after it is written.
    """

    def __init__(
        self,
        settings: RunSettings,
        folder: RunFolder | None,
        logs: Logs | None,
        reporter: Reporter,
        measure: Measure,
        team: Team,
        history: History,
        pipe: jpipe.Pipeline,
        utilization: Utilization | None = None,
        on_row: OnRow = lambda step, row, validation: None,
    ) -> None:
        self._log_every, self._pipe = settings.train.log_every, pipe
        self._on_row = on_row
        self._clipped_stages = range(0 if pipe.clip_stage_norm is None else pipe.plan.depth)
        self._needs_disk = settings.checkpoint.on_full_disk == "stop"
        self._lacks_rows = False  # whether rows are missing on disk; the user was informed
        self._folder = folder
        self._logs = logs
        self._reporter = reporter
        self._measure = measure
        self._team = team
        self._history = history
        self._utilization = utilization
        self._learning_rate = None if folder is None else settings.learning_rate(settings.train.length)
        self._validation: dict[int, Validation] = {}
        self._known: jpipe.Metrics = jpipe.Metrics.empty()  # values of steps with rows that are not written yet
        self._delay_norms: dict[int, jpipe.runtime.DelayNorms] = {}
        self._skips_nonfinite = pipe.skip_nonfinite or pipe.precision.dynamic_scale is not None
        self._skipped = 0  # the number of skipped steps in a row
        self._who = "" if pipe.plan.agree is None else " by at least one of the pipelines"
        self.last_step = -1  # the last processed step; its row, if any, is written
        self.steps = settings.train.length  # the number of steps of the run; lowered if it ends early

    @property
    def seconds(self) -> float:
        """Seconds since the run began, including its start-up."""
        return self._reporter.seconds

    @property
    def folder(self) -> Path | None:
        """The folder to which rows are written, or None."""
        return None if self._folder is None else self._folder.path

    def validation(self, step: int, results: "Validation") -> None:
        """Add a validation to the row of `step`, without waiting for its results."""
        self._validation[step] = results

    def delay_norms(self, step: int, norms: jpipe.runtime.DelayNorms) -> None:
        """Add the norms of the delay to the row of `step`, without waiting for their computation."""
        self._delay_norms[step] = norms

    def validated(self, step: int) -> dict[str, float] | None:
        """Return the validation in the row of `step`, or None."""
        known = self._validation.get(step)
        return None if known is None else means(known)

    def finished(self, metrics: jpipe.Metrics | None) -> None:
        """Wait for `metrics`, and write the rows of all steps with complete values. The norm of a step may arrive after its loss."""
        for name, numbers in ({} if metrics is None else metrics._asdict()).items():
            getattr(self._known, name).update(numbers)
        losses, _, norms, _, _, stage_norms = self._known
        for step in sorted(losses):
            of_stages = {(step, s) for s in self._clipped_stages}
            if (self._pipe.uses_global_norm and step not in norms) or not of_stages <= stage_norms.keys():
                break
            self._write(step)
            for known in self._known[:-1]:
                known.pop(step, None)
            for key in of_stages:
                del stage_norms[key]

    def _write(self, step: int) -> None:
        """Write the row of a step."""
        row = self._training_values(step) | self._validation_values(step) | self._delay_values(step)
        self._reporter.tick(step)
        logged = step % self._log_every == 0 or step == self.steps - 1 or "val_loss" in row or "skipped" in row
        if logged and self._folder is not None:
            row |= self._progress(step)
            self._log(self._folder, row)  # before printing, so that the file has everything that is printed
        self.last_step = step
        if interruption := self._history.logged(step):
            self._reporter.say(interruption)
        measured = self._measure.measured
        bubble = None if measured is None else measured.bubble
        self._reporter.step(step, row.get("loss", math.nan), self.validated(step) or {}, bubble, self._mfu)
        if logged and self._logs is not None:
            shown = row if bubble is None else row | {"bubble": bubble}
            self._logs.write(step, {name: value for name, value in shown.items() if name != "step"})
        self._on_row(step, row, self.validated(step) or {})

    def _training_values(self, step: int) -> dict[str, int | float]:
        """Return the loss and the gradient norms of a step. If the step was skipped, only finite values are returned."""
        losses, _, norms, nonfinite, scales, stage_norms = self._known
        values = {"loss": float(losses[step])} | ({"gradient_norm": float(norms[step])} if step in norms else {})
        values |= {f"gradient_norm_stage_{s}": float(stage_norms[step, s]) for s in self._clipped_stages}
        if step in norms and not float(nonfinite[step]) and math.isinf(values["gradient_norm"]):
            del values["gradient_norm"]  # the gradients are finite, but their squares overflow
        scale = {"loss_scale": float(scales[step])} if step in scales else {}
        if not self._skips_nonfinite or not float(nonfinite[step]):
            self._skipped = 0
            labels = {"loss": "loss", "gradient_norm": "norm of the gradient"}
            labels |= {f"gradient_norm_stage_{s}": f"norm of the gradient of stage {s}" for s in self._clipped_stages}
            return {"step": step} | {name: self._finite(step, labels[name], value) for name, value in values.items()} | scale
        self._skipped += 1
        new_scale = f"; the loss scale is now {scale['loss_scale']:,.0f}" if scale else ""
        self._reporter.say(
            f"step {step}: skipped{self._who}, because {float(nonfinite[step]):,.0f} entries of its gradient are NaN or infinite{new_scale}"
        )
        if self._skipped == MOST_SKIPPED:
            hint = "lower optimizer.learning_rate, or look at the data of these steps"
            raise self._team.shared(NonFiniteLoss(f"step {step}: {MOST_SKIPPED} steps in a row were skipped; {hint}"))
        return {"step": step, "skipped": 1} | {name: value for name, value in values.items() if math.isfinite(value)} | scale

    def close(self) -> None:
        """Try once more to write the rows that are missing on disk."""
        if self._lacks_rows and self._folder is not None:
            self._log(self._folder)

    def check_complete(self, end: int) -> None:
        """Check that the rows of all steps before `end` are written, if there is a run folder.

        Raise RunStopped if rows are missing, and FolderChanged if another program has changed them.
        """
        if self.last_step < end - 1:
            missing = f"step {self.last_step + 1}" if self.last_step == end - 2 else f"steps {self.last_step + 1} to {end - 1}"
            raise self._team.shared(RunStopped(f"the run ended without a loss for {missing}; this is a bug in jpipe"))
        if self._folder is None:
            return
        if self._lacks_rows:
            raise RunStopped(f"'{shown(self._folder.path / METRICS)}' lacks its last rows, because the disk was full")
        self._folder.logged()

    def _log(self, folder: RunFolder, *rows: dict[str, int | float]) -> None:
        try:
            folder.log(*rows)
        except OSError as error:
            if self._needs_disk or isinstance(error, FolderChanged):
                raise
            if not self._lacks_rows:
                self._reporter.say(
                    f"'{shown(folder.path / METRICS)}' cannot be written: {error.strerror}; the run continues, and keeps the rows in memory"
                )
            self._lacks_rows = True
        else:
            if self._lacks_rows:
                self._reporter.say(f"'{shown(folder.path / METRICS)}' has all rows again")
            self._lacks_rows = False

    @property
    def _mfu(self) -> float | None:
        """The MFU of the recent steps, if known."""
        seconds = self._reporter.step_seconds
        return None if self._utilization is None or seconds is None else float(f"{self._utilization.at(seconds):.4g}")

    def _progress(self, step: int) -> dict[str, float]:
        """Return the learning rate, the time, the speed and the MFU, as far as they are known."""
        updates, speed = self._history.updates(step), self._reporter.speed
        values = {} if self._learning_rate is None or updates is None else {"learning_rate": self._learning_rate(updates)}
        values["seconds"] = round(self._history.seconds, 3)
        values |= {} if speed is None else {f"{self._reporter.unit}_per_second": float(f"{speed:.4g}")}
        return values if self._mfu is None else values | {"mfu": self._mfu}

    def _validation_values(self, step: int) -> dict[str, float]:
        """Return the validation loss of `step` and the finite metrics; empty if there was no validation."""
        if step not in self._validation:
            return {}
        try:
            values = means(self._validation[step])
        except jpipe.InputError as error:
            raise self._team.shared(error) from None
        self._finite(step, "validation loss", values["val_loss"])
        for name in [name for name, value in values.items() if not math.isfinite(value)]:
            self._reporter.say(f"step {step}: {name} is {values.pop(name)}; it is left out of metrics.jsonl")
        self._validation[step] = values
        return values

    def _delay_values(self, step: int) -> dict[str, float]:
        """Return the norms of the delay correction and of the distance between weight versions after `step`, if computed and finite."""
        if step not in self._delay_norms:
            return {}
        norms = self._delay_norms.pop(step)
        values = {"version_distance": float(norms.distance)}
        if self._pipe.delay_factor is not None:
            values["correction_norm"] = float(norms.correction)
        return {name: value for name, value in values.items() if math.isfinite(value)}

    def _finite(self, step: int, name: str, value: float) -> float:
        if not math.isfinite(value):
            hint = "; lower optimizer.learning_rate or raise optimizer.warmup_steps"
            if step == 0 and not (self.steps == 1 and name == "validation loss"):
                hint = " before any update; look for NaN or infinite values in the data, the outputs of the model and the loss"
            raise self._team.shared(NonFiniteLoss(f"step {step}: the {name} is {value}{hint}"))
        return value


def means(results: Validation) -> dict[str, float]:
    """Return the loss and the metrics of a validation as values of a row. They are means over the batches, weighted by their weights."""
    if isinstance(results, Mapping):
        return dict(results)
    return mean_of([means_of(each.evaluation) for each in results], [each.source for each in results])


def means_of(evaluation: jpipe.Evaluation) -> dict[str, tuple[float, float]]:
    """Wait for the loss and the metrics of an evaluation of a batch, and return a dict from their names in a row to (mean, weight)."""
    means = {"loss": jpipe.Mean(evaluation.loss, evaluation.weight), **evaluation.metrics}
    numbers = {name: (float(mean.mean), float(mean.weight)) for name, mean in means.items()}
    return {f"val_{name}": number for name, number in centred(numbers, evaluation.microbatches).items()}


Means = Mapping[str, tuple[float, float]]
"""The results of a batch: a mapping from names to (mean, weight)."""


def mean_of(batches: Sequence[Means], sources: Sequence[SourceConfig | None] = ()) -> dict[str, float]:
    """Return the mean loss and metrics over all batches; the keys are the names in a row.

    With several sources, one for each batch, losses and accuracies are weighted means over the sources, and other metrics are computed from
    all rows together. Each source also has its own loss `val_loss_NAME`. Raise jpipe.InputError if the weights of the loss sum to 0.
    """
    groups: dict[SourceConfig, list[Means]] = {}
    for batch, source in zip(batches, sources, strict=False):
        if source is not None:
            groups.setdefault(source, []).append(batch)
    losses = {f"val_loss_{source.name}": _mean("val_loss", [batch["val_loss"] for batch in of]) for source, of in groups.items()}
    weighted = [batch for source, of in groups.items() for batch in _summing_to(source.weight, of)] or batches
    return combined({name: _mean(name, [batch[name] for batch in weighted]) for name in weighted[0]}) | losses


def _summing_to(total: float, batches: Sequence[Means]) -> list[Means]:
    """Scale the weights of each result so that they sum to `total` over the batches; the means do not change."""
    sums = {name: sum(batch[name][1] for batch in batches) for name in batches[0]}
    return [
        {name: (mean, weight * total / sums[name] if sums[name] else 0.0) for name, (mean, weight) in batch.items()} for batch in batches
    ]


def _mean(name: str, batches: Sequence[tuple[float, float]]) -> float:
    weights = [weight for _, weight in batches]
    if not sum(weights):
        if name != "val_loss":
            return math.nan
        raise jpipe.InputError(
            f"validation: the weights that the loss returns for the {len(weights)} validation batches sum to 0, so there is no mean; "
            "give validation data with unmasked examples, or change the loss"
        )
    return sum(mean * weight for mean, weight in batches) / sum(weights)


def mean_loss(results: Validation) -> float | None:
    """Return the mean loss of a validation; None if it has no results."""
    return means(results)["val_loss"] if results else None
