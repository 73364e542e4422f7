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
from train.assemble import compile_cache, model
from train.assemble.build import build, check, prepare_devices
from train.checkpoint import resume
from train.checkpoint.export import Weights, step_of
from train.config import config_file
from train.config.config import Config, OptimizerConfig, ResumeConfig
from train.console import interrupt
from train.console.progress import Reporter
from train.console.terminal import count
from train.data import data
from train.data.rest import AllRows
from train.data.rows import BatchesOfRows
from train.launch.together import facts, joined
from train.report.metrics_log import RunStopped, mean_of, means_of
from train.run.loop import reason
from train.run.starting import begin

_AHEAD = 2  # batches whose numbers are waited for later, so that devices always have work


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
        examples: that were evaluated.
        labels: the total weight of the loss.
        loss: the mean over them.
        metrics: those of the config, by name; they may be NaN.
    """

    step: int
    examples: int
    labels: float
    loss: float
    metrics: dict[str, float]


def main(request: Request, num_processes: int = 1, connect_limit: float = 300.0, wait_limit: float = 45.0) -> Found:
    """Evaluate a checkpoint, and print what was found.

    Args:
        request: the same in all processes.
        num_processes: as in `train.run.loop.main`, and so are the other two.
        connect_limit: seconds.
        wait_limit: seconds.

    Raises:
        InputError: there is no such run or checkpoint, it is damaged, or it does not fit its config; the data cannot be read, or there
            is not a single example.
        RunStopped: a device failed.
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
        pipe, batches, everything = together.run_on_all(lambda: _ready(config, request, reporter))
        together.agree(lambda: {"plan": pipe.plan.to_json(), "data": batches.digest()})
        interrupt.check()
        resumed = together.run_on_all(lambda: resume.at(place, step))
        try:
            with reporter.phase(f"compiling {count(pipe.plan.depth, 'stage')}, reading the checkpoint", compile_cache.Counted()):
                state = begin(config, pipe, batches, together, resumed)
            found = _evaluate(config, request, pipe, state, everything, reporter, step)
        except jax.errors.JaxRuntimeError as error:
            raise RunStopped(reason(error)) from error
        _tell(config, request, found, everything, batches.source, reporter)
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
    config = config_file.load(place / "config.yaml", request.overrides, allow_code=request.allow_code, sections=sections)
    if request.weights == "ema":
        if config.optimizer.ema_decay is None:
            raise InputError("--weights: the run has no moving average of the weights; leave it out, or train with optimizer.ema_decay")
        return config
    # An optimizer without state needs no memory for it. The checkpoint's own is left aside.
    return config.model_copy(update={"optimizer": OptimizerConfig(name="sgd"), "resume": ResumeConfig(optimizer="reset")})


Everything = data.Batches
"""All batches; an `AllRows` where the data can tell what is left after the last whole one."""


def _ready(config: Config, request: Request, reporter: Reporter) -> tuple[jpipe.Pipeline, data.Data, Everything]:
    """The pipeline, data with one batch of the usual size to compile for, and all batches to evaluate."""
    rows: list[Everything] = []

    def load(config: Config) -> data.Data:
        try:
            found = data.held_out(config, request.data)
        except InputError as error:
            where = "data.path: " if request.data is None else "--data: "
            raise InputError(*(line.replace("data.path: ", where, 1) for line in error.args)) from None
        if not isinstance(found.validation, BatchesOfRows):
            rows.append(found.validation)
            return replace(found, train=found.validation)
        whole = AllRows(found.validation, 1)
        rows.append(whole)
        return replace(found, train=[whole.like], validation=[whole.like])

    pipe, batches = build(config, reporter, load=load)
    checked = check(config, pipe, batches)
    (everything,) = rows
    if not isinstance(everything, AllRows):
        return pipe, checked, checked.validation
    return pipe, checked, replace(everything, microbatch=config.train.batch_size // pipe.plan.microbatches)


def _evaluate(
    config: Config,
    request: Request,
    pipe: jpipe.Pipeline,
    state: jpipe.State,
    everything: Everything,
    reporter: Reporter,
    step: int,
) -> Found:
    """Through the pipeline, one batch after the other."""
    metrics = model.metrics(config.eval)
    number = len(everything) if request.batches is None else min(request.batches, len(everything))
    pending: list[jpipe.Evaluation] = []
    found: list[dict[str, tuple[float, float]]] = []
    with reporter.counting(f"evaluating {count(number, 'batch', 'es')}") as progress:
        for index in range(number):
            interrupt.check()
            pending.append(pipe.evaluate(state, everything[index], metrics, weights=request.weights))
            if len(pending) > _AHEAD:
                found.append(means_of(pending.pop(0)))
            progress(index + 1 - len(pending), number)
        found += [means_of(evaluation) for evaluation in pending]
    examples = number * config.train.batch_size
    if isinstance(everything, AllRows) and number > len(everything.batches):
        examples = everything.rows
        found[-1] = {name: (mean, weight / everything.copies) for name, (mean, weight) in found[-1].items()}
    means = mean_of(found)
    labels = sum(batch["val_loss"][1] for batch in found)
    loss = means.pop("val_loss")
    return Found(step, examples, labels, loss, {name.removeprefix("val_"): mean for name, mean in means.items()})


def _tell(config: Config, request: Request, found: Found, everything: Everything, source: str, reporter: Reporter) -> None:
    """A few words and a small table."""
    there = everything.rows if isinstance(everything, AllRows) else len(everything) * config.train.batch_size
    of_all = "" if found.examples == there else f" of {there:,}"
    which = "" if request.weights == "newest" else ", moving average of the weights"
    reporter.say(f"{request.run}, step {found.step}{which}; data: {source}, {found.examples:,}{of_all} examples")
    unit = data.loss_unit(config).strip()
    rows = {f"loss, {unit}" if unit else "loss": found.loss}
    if config.loss.target is None:
        rows["perplexity"] = math.exp(found.loss) if found.loss < 700 else math.inf
    if unit == "nats per byte":
        rows["bits per byte"] = found.loss / math.log(2)
    rows |= found.metrics
    reporter.table(("", f"over {found.labels:,.10g} {_labels(config)}"), [(name, f"{value:.6g}") for name, value in rows.items()])


def _labels(config: Config) -> Literal["labels", "in weight"]:
    return "labels" if config.loss.target is None else "in weight"
