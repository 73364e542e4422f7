"""`jpipe evaluate`: loss, perplexity and metrics of a run's checkpoint over whole data, through its pipeline. The run is not changed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console

import jpipe
from jpipe import InputError
from jpipe.files import resolved
from jpipe_train.assemble import compile_cache, model
from jpipe_train.assemble.build import build, check, prepare_devices
from jpipe_train.checkpoint import resume
from jpipe_train.checkpoint.export import Weights, step_of
from jpipe_train.config import config_file
from jpipe_train.config.config import Config, OptimizerConfig, ResumeConfig
from jpipe_train.console import interrupt
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count
from jpipe_train.data import data
from jpipe_train.data.rows import BatchesOfRows, Divisible, WithRemainder, like_a_batch
from jpipe_train.launch.together import facts, joined
from jpipe_train.report.metrics_log import RunStopped, mean_of, means_of
from jpipe_train.run.loop import reason
from jpipe_train.run.starting import begin, read_checkpoint

_AHEAD = 2  # batches whose numbers are waited for later, so that devices always have work
_OR_NULL = ", or null for the standard library's source"  # of a key's value, not of an option's


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        run: the folder of the run.
        data: a path of other data than the run is validated on.
        step: of the checkpoint; None: the newest that is whole.
        weights: the newest, or their moving average.
        batches: at most so many; None: all, the last rows included, however few.
        overrides: of keys of the run's config.
        allow_code: whether its config may name functions to import and call.
    """

    run: str
    data: str | None = None
    step: int | None = None
    weights: Weights = "newest"
    batches: int | None = None
    overrides: Sequence[str] = ()
    allow_code: bool = False


@dataclass(frozen=True)
class Found:
    """The result.

    Attributes:
        step: of the checkpoint.
        rows: that were evaluated, sequences of a text.
        there: rows of the data.
        labels: the total weight of the loss, the number of labels that count.
        loss: the mean over them.
        metrics: those of the config, by name; they may be NaN.
    """

    step: int
    rows: int
    there: int
    labels: float
    loss: float
    metrics: dict[str, float]


def main(request: Request, num_processes: int = 1, connect_limit: float = 300.0, wait_limit: float = 45.0) -> Found:
    """Evaluate a checkpoint, and print what was found.

    Args:
        request: the same in all processes.
        num_processes: as in `jpipe_train.run.loop.main`, and so are the other two.
        connect_limit: seconds.
        wait_limit: seconds.

    Raises:
        InputError: there is no such run or checkpoint, it is damaged, or it does not fit its config; the data cannot be read, or there
            is not a single row.
        RunStopped: a device failed, or a file could be read no longer.
        jpipe.PeerLost: another process died, hung or stopped.
    """
    with joined(num_processes, connect_limit, wait_limit) as together:
        interrupt.check()
        quiet = None if together.is_first else Console(quiet=True)
        told: list[str] = []
        place = together.run_on_all(lambda: _place(request))
        step = int(together.from_first("the checkpoint", lambda: str(step_of(place, request.step, "evaluate", told.append))))
        config = together.run_on_all(lambda: _config(place, request))
        together.agree(lambda: facts(config) | {"what is evaluated": f"step {step}, {request}"})
        together.run_on_all(lambda: prepare_devices(config.plan, num_processes))
        not_kept = together.run_on_all(lambda: compile_cache.use(config.compile_cache))
        together.start_devices(connect_limit)
        reporter = Reporter(1, *data.portion(config), quiet)
        for line in (*told, not_kept):
            if line:
                reporter.say(line)
        pipe, batches, parts = together.run_on_all(lambda: _ready(config, request, reporter))
        together.agree(lambda: {"plan": pipe.plan.to_json(), "data": batches.digest()})
        interrupt.check()
        resumed = together.run_on_all(lambda: resume.at(place, step))
        try:
            with reporter.phase(f"compiling {count(pipe.plan.depth, 'stage')}, reading the checkpoint", compile_cache.Counted()):
                layers, damaged = read_checkpoint(config, pipe, batches, together, resumed)
                if layers is None:
                    raise together.shared(InputError(damaged))
                state = begin(config, pipe, batches, resumed, layers)
            means = _evaluate(config, request, pipe, state, batches.validation, parts, reporter)
        except (jax.errors.JaxRuntimeError, OSError) as error:
            raise RunStopped(reason(error)) from error
        (loss, labels), *_ = means.values()
        metrics = {name.removeprefix("val_"): mean for name, (mean, _) in means.items() if name != "val_loss"}
        found = Found(step, sum(parts.rows), parts.there, labels, loss, metrics)
        _tell(config, request, found, batches.source, reporter)
        return found


def _place(request: Request) -> Path:
    if request.batches is not None and request.batches < 1:
        raise InputError(f"--batches: expected 1 or more, found {request.batches}; leave it out for all")
    return resolved(request.run, "evaluate")


def _config(place: Path, request: Request) -> Config:
    """The run's own, its plan that of plan.json unless another is asked for; without what evaluation has no use for."""
    sections: dict[str, dict[str, Any]] = {"warm_start": {}}
    if not any(override.startswith(("plan.", "plan=")) for override in request.overrides):
        sections["plan"] = {"file": str(place / "plan.json")}
    elif config_file.load_resolved(place / "config.yaml").plan.file is not None:  # beside it no other key would mean anything
        sections["plan"] = {}
    config = config_file.load(place / "config.yaml", request.overrides, allow_code=request.allow_code, sections=sections)
    if request.weights == "ema":
        if config.optimizer.ema_decay is None:
            raise InputError("--weights: the run has no moving average of the weights; leave it out, or train with optimizer.ema_decay")
        return config
    # An optimizer without state needs no memory for it. The checkpoint's own is left aside.
    return config.model_copy(update={"optimizer": OptimizerConfig(name="sgd"), "resume": ResumeConfig(optimizer="reset")})


def _ready(config: Config, request: Request, reporter: Reporter) -> tuple[jpipe.Pipeline, data.Data, "_Parts"]:
    """The pipeline, its data, and how much of that is evaluated: of what is there as `validation`. `train` has a batch to compile for."""

    def load(config: Config) -> data.Data:
        try:
            found = data.held_out(config, request.data)
        except InputError as error:
            if request.data is None:
                raise
            lines = (line.replace("data.path: ", "--data: ", 1).replace(_OR_NULL, "") for line in error.args)
            raise InputError(*lines) from None
        rows = found.validation
        return replace(found, train=[like_a_batch(rows)] if isinstance(rows, BatchesOfRows) else rows)

    pipe, batches = build(config, reporter, load=load)
    if isinstance(rows := batches.validation, Divisible):
        batches = replace(batches, validation=rows.with_remainder(config.train.batch_size // pipe.plan.microbatches))
    return pipe, check(config, pipe, batches), _parts(config, request, batches.validation)


@dataclass(frozen=True)
class _Parts:
    """What is evaluated, batch by batch.

    Attributes:
        rows: of the data in each.
        copies: of each of these rows.
        there: rows in all, those that are not evaluated as well.
    """

    rows: list[int]
    copies: list[int]
    there: int


def _parts(config: Config, request: Request, everything: data.Batches) -> _Parts:
    """The whole batches that are asked for; if these are all and more, the rows that are left after them, too."""
    rows = [config.train.batch_size] * len(everything)
    copies = [1] * len(everything)
    whole = len(everything)
    if isinstance(everything, WithRemainder):
        whole = everything.whole
        rows, copies = ([of(i) for i in range(len(everything))] for of in (everything.rows_of, everything.copies_of))
    number = len(everything) if request.batches is None or request.batches > whole else request.batches
    return _Parts(rows[:number], copies[:number], sum(rows))


def _evaluate(
    config: Config, request: Request, pipe: jpipe.Pipeline, state: jpipe.State, batches: data.Batches, parts: _Parts, reporter: Reporter
) -> dict[str, tuple[float, float]]:
    """The mean and the weight of the loss and of each metric, through the pipeline, one batch after the other."""
    metrics = model.metrics(config.eval)
    pending: list[jpipe.Evaluation] = []
    found: list[dict[str, tuple[float, float]]] = []
    total, done = sum(parts.rows), 0

    def finish() -> None:
        copies = parts.copies[len(found)]
        found.append({name: (mean, weight / copies) for name, (mean, weight) in means_of(pending.pop(0)).items()})

    with reporter.counting(f"evaluating {count(total, 'row')}") as progress:
        for index, rows in enumerate(parts.rows):
            interrupt.check()
            pending.append(pipe.evaluate(state, batches[index], metrics, weights=request.weights))
            if len(pending) > _AHEAD:
                finish()
                done += rows
                progress(done, total)
        while pending:
            finish()
    means = mean_of(found)
    return {name: (mean, sum(batch[name][1] for batch in found)) for name, mean in means.items()}


def _tell(config: Config, request: Request, found: Found, source: str, reporter: Reporter) -> None:
    """A few words and a small table."""
    of_all = "" if found.rows == found.there else f" of {found.there:,}"
    which = "" if request.weights == "newest" else ", moving average of the weights"
    reporter.say(f"{request.run}, step {found.step}{which}; data: {source}, {found.rows:,}{of_all} rows")
    unit = data.loss_unit(config).strip()
    rows = {f"loss, {unit}" if unit else "loss": found.loss}
    if unit.startswith("nats per"):
        rows["perplexity"] = math.exp(found.loss) if found.loss < 700 else math.inf
    if unit == "nats per byte":
        rows["bits per byte"] = found.loss / math.log(2)
    rows |= found.metrics
    for name, metric in config.eval.metrics.items():
        if metric == "cross_entropy" and "perplexity" not in rows:
            rows["perplexity"] = math.exp(min(found.metrics[name], 700.0))
    reporter.table(("", f"over {found.labels:,.10g} {_labels(config)}"), [(name, f"{value:.6g}") for name, value in rows.items()])


def _labels(config: Config) -> Literal["labels", "in weight"]:
    return "labels" if config.loss.target is None else "in weight"
