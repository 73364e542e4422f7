"""`jpipe_train.fit`: train a pipeline that a Python program has built, in the training loop of `jpipe train`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, SupportsFloat, SupportsIndex, get_args

import jax
import pydantic
from rich.console import Console

import jpipe
from jpipe import InputError
from jpipe.errors import explain, nearest, short
from jpipe_train.assemble.metrics import metrics as built_in_metrics
from jpipe_train.assemble.metrics import results_of
from jpipe_train.checkpoint.resume import ANOTHER, Resume, Resumed
from jpipe_train.checkpoint.resume import find as find_resumed
from jpipe_train.config.config import (
    CheckpointConfig,
    Config,
    EvalConfig,
    LogNames,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    Seed,
    TrainConfig,
)
from jpipe_train.config.functions.entry_point import name_in_python
from jpipe_train.config.run_settings import RunSettings
from jpipe_train.config.section import Section
from jpipe_train.config.train_config import MOST_EPOCHS
from jpipe_train.console import interrupt
from jpipe_train.console.progress import Reporter
from jpipe_train.data.data import Data
from jpipe_train.launch.team import Team, code_facts, joined
from jpipe_train.report import logs
from jpipe_train.report.summary import Summary
from jpipe_train.run import fit_data, stopping
from jpipe_train.run.callbacks import Callbacks
from jpipe_train.run.loop import RunParts, already_complete, start
from jpipe_train.run.starting import begin, read_checkpoint

_CONNECT_LIMIT, _WAIT_LIMIT = 300.0, 45.0  # seconds, the defaults of `jpipe train`
_EVERY = CheckpointConfig().every  # the default of `checkpoint`, too


@dataclass(frozen=True, repr=False)
class FitResult:
    """The result of `fit`.

    Attributes:
        state: the final state, drained, for methods such as `Pipeline.predict` and `Pipeline.model`. After SIGTERM or Ctrl-C the state may
            be some steps ahead of the checkpoint.
        summary: the numbers of the run. `steps` counts all batches, also batches before a resume. `val_loss_before` and `val_loss_after`
            are None without evaluation. `seconds` is the duration. `stopped_by` is the number of the signal that ended the run, or None.
        folder: the run folder. It is None if there is none, and in all processes other than process 0.
    """

    state: jpipe.State
    summary: Summary
    folder: Path | None

    def __repr__(self) -> str:
        known = {name: getattr(self.summary, name) for name in ("val_loss_before", "val_loss_after")}
        losses = "".join(f", {name}={loss:.4g}" for name, loss in known.items() if loss is not None)
        return f"FitResult(steps={self.summary.steps}{losses}, folder={None if self.folder is None else str(self.folder)!r})"


def fit(
    pipe: jpipe.Pipeline,
    data: Any,
    *,
    steps: SupportsIndex | None = None,
    epochs: SupportsFloat | None = None,
    batch_size: SupportsIndex | None = None,
    eval_data: Any = None,
    eval_every: SupportsIndex = 50,
    metrics: Mapping[str, Any] | None = None,
    seed: SupportsIndex = 0,
    state: jpipe.State | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    checkpoint: SupportsIndex | Mapping[str, Any] | None = 10,
    log: Sequence[str] = ("tensorboard",),
    log_every: SupportsIndex = 1,
    callbacks: Sequence[object] = (),
    resume: Resume = "auto",
    progress: bool = True,
) -> FitResult:
    """Train a pipeline in the loop of `jpipe train`, with evaluations, and with checkpoints, logs and a report in a run folder.

    A resumed run has bit for bit the same results as an uninterrupted run. If a run writes checkpoints, Ctrl-C and SIGTERM end it after a
    checkpoint. All processes of a run must call `fit` once, with the same arguments. Only process 0 prints, writes and calls callbacks.

    Args:
        pipe: the pipeline, compiled or not.
        data: with `batch_size`, the pair (inputs, labels) of arrays or trees of arrays; the rows are shuffled anew in each epoch. Without
            it, batches as for `Pipeline.step`: an object with `data[t]`, such as a `grain.MapDataset` of batches, or a function of t.
        steps: the number of batches, including batches before a resume.
        epochs: the number of passes over `data`, in place of `steps`. If `data` has batches, it must have a length.
        batch_size: the number of rows in a batch, if `data` are arrays.
        eval_data: arrays, or an object with a limited number of batches. All of them are evaluated before the first step, every
            `eval_every` steps, and at the end.
        eval_every: the number of steps between evaluations.
        metrics: a mapping from names to metrics. A metric is a function as in `Pipeline.evaluate`, or a built-in one such as "accuracy".
        seed: the seed of the initial weights, dropout and the order of rows.
        state: the initial state of a new run, which is consumed; by default the state of `Pipeline.init`.
        run_dir: the folder of the run, new or with a run to resume; None: nothing is written.
        checkpoint: the number of steps between checkpoints, or the keys of the config section `checkpoint`, such as
            `{"every": 100, "keep": 2}`; None: no checkpoints.
        log: further logs of the run: "tensorboard", "wandb", "trackio" and "mlflow".
        log_every: the number of steps between rows of `metrics.jsonl`.
        callbacks: objects with some of the methods `on_step`, `on_eval` and `on_checkpoint`. They get a `StepRecord`, an `EvalRecord` and a
            `CheckpointRecord`. A method returns None, or "stop" to end the run one or two steps later.
        resume: "auto": resume if the folder has a checkpoint. "must": raise an error if it has none. "never": raise an error if it has a
            run.
        progress: whether to show the progress, on a terminal as a bar and elsewhere as lines.

    Raises:
        InputError: an argument is invalid, such as data that can only be iterated; nothing was trained.
        RuntimeError: a loss is not finite, a device failed, or the disk is full.
        PeerLost: another process died, hung or stopped.
        KeyboardInterrupt: Ctrl-C was pressed in a program, in a run without checkpoints; the state is lost. In a notebook or another
            interactive session, a run without `run_dir` ends after the step and returns its result, and only a second Ctrl-C raises this.
    """
    folder = _folder(run_dir, checkpoint, resume)
    length, called = _length(steps, epochs), Callbacks(callbacks)
    with interrupt.watched(), joined(jax.process_count(), _CONNECT_LIMIT, _WAIT_LIMIT) as team:
        batches, rows = team.run_on_all(lambda: fit_data.load(data, eval_data, batch_size, seed, **length))
        train = {**length, "batch_size": rows, "log_every": log_every, "eval_every": eval_every}
        train |= {"eval_batches": max(len(batches.validation), 1), **({} if folder else {"trace_batches": 0})}
        saves = dict(checkpoint) if isinstance(checkpoint, Mapping) else {"every": checkpoint}
        written = {"log": [*log], "checkpoint": saves} if folder else {"log": [], "checkpoint": {"every": None}}
        arguments = {"seed": seed, "train": train, "run": {"dir": folder}, **written}
        settings = team.run_on_all(lambda: _settings(pipe, arguments, metrics or {}))
        return _run(pipe, settings, batches, state, called, resume, team, progress)


class _Arguments(Section):
    """The arguments of `fit` that are also config keys."""

    seed: Seed
    log: LogNames
    run: RunConfig
    train: TrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig

    @pydantic.model_validator(mode="after")
    def _metrics_have_their_classes(self) -> "_Arguments":
        self.eval.check_classes(None)
        return self


def _folder(run_dir: str | os.PathLike[str] | None, checkpoint: SupportsIndex | Mapping[str, Any] | None, resume: Resume) -> str | None:
    """Return the run folder as text. Raise InputError if `resume` is unknown, or an argument needs a folder and there is none."""
    if resume not in get_args(Resume):
        raise InputError(f"fit: resume: unknown {resume!r}; {nearest(str(resume), get_args(Resume))}")
    if run_dir is not None:
        return os.fspath(run_dir)
    for name, is_used in (("checkpoint", checkpoint not in (None, _EVERY)), ("resume 'must'", resume == "must")):
        if is_used:
            raise InputError(f"fit: {name} has no effect without run_dir, the folder of the run; give run_dir, or remove {name}")
    return None


def _length(steps: SupportsIndex | None, epochs: Any) -> dict[str, Any]:
    """Return the length of the run as a key of a config's section `train`.

    Raise InputError if both `steps` and `epochs` are given, or neither, or `epochs` is not a positive number.
    """
    if (steps is None) == (epochs is None):
        found = "neither" if steps is None else f"steps={steps} and epochs={epochs}"
        raise InputError(where="fit", expected="either steps or epochs", found=found, change="give one of them")
    if epochs is None:
        return {"steps": steps}
    if isinstance(epochs, bool) or not isinstance(epochs, Real) or not 0 < float(epochs) <= MOST_EPOCHS:
        raise InputError(f"fit: epochs: expected a number above 0 and at most {MOST_EPOCHS:,}, found {short(epochs)}; change it")
    return {"epochs": float(epochs)}


def _settings(pipe: jpipe.Pipeline, arguments: Mapping[str, Any], metrics: Mapping[str, Any]) -> RunSettings:
    """Return the settings of a run with these metrics, by name: functions or names of built-in ones.

    Raise InputError if a value is invalid.
    """
    named = {name: metric if isinstance(metric, str) else name_in_python("metric") for name, metric in metrics.items()}
    try:
        checked = _Arguments.model_validate({**arguments, "eval": {"metrics": named}})
    except pydantic.ValidationError as error:
        raise explain(error, _Arguments, "fit") from None
    built_in = EvalConfig(metrics={name: metric for name, metric in metrics.items() if isinstance(metric, str)})
    functions = {name: metric for name, metric in metrics.items() if not isinstance(metric, str)}
    return RunSettings(
        record=_record(pipe, checked.model_copy(update={"eval": built_in})),
        seed=checked.seed,
        train=checked.train,
        checkpoint=checked.checkpoint,
        log=checked.log,
        metrics=lambda: built_in_metrics(built_in) | functions,
        results=results_of(checked.eval.metrics, has_average=pipe.ema_decay is not None),
        items=(checked.train.batch_size, "samples"),
        in_python=True,
    )


def _record(pipe: jpipe.Pipeline, arguments: _Arguments) -> dict[str, Any]:
    """Return the keys of `config.yaml` for a run. Parts that are objects of the Python program have names that say so."""
    scale = pipe.precision.fixed_scale if pipe.precision.dynamic_scale is None else "dynamic"
    dtypes = {name: getattr(pipe.precision, name) for name in ("params", "compute", "accumulate")}
    norms = {name: getattr(pipe, name) for name in ("clip_global_norm", "clip_stage_norm", "skip_nonfinite", "ema_decay")}
    optimizer = OptimizerConfig(name=name_in_python("optimizer"), delay_correction=pipe.delay_factor, **norms)
    parts = {name: {"target": name_in_python(name), "arguments": {}} for name in ("model", "data", "loss")}
    precision = PrecisionConfig(**dtypes, loss_scale=scale)
    sections = {"optimizer": optimizer.model_dump(), "precision": precision.model_dump(), "plan": {"file": "plan.json"}}
    return Config().model_dump() | arguments.model_dump() | parts | sections | {"compile_cache": None}


def _run(
    pipe: jpipe.Pipeline,
    settings: RunSettings,
    batches: Data,
    state: jpipe.State | None,
    callbacks: Callbacks,
    resume: Resume,
    team: Team,
    progress: bool,
) -> FitResult:
    """Check the arguments against each other and between processes, train, and return the result."""
    team.run_on_all(lambda: logs.check(settings.log) if team.is_first else None)
    facts = {"resume": str(resume), "callbacks": "some" if callbacks else "none"}
    team.agree(lambda: {"arguments of fit": settings.yaml, **facts, **code_facts()})
    rows, epochs = settings.train.batch_size, settings.train.epochs
    reporter = Reporter(batches.steps or settings.train.length, *settings.items, _console(progress and team.is_first))
    resumed = find_resumed(settings.folder, resume, team, reporter.say)
    steps = team.run_on_all(lambda: fit_data.continued(batches, resumed, rows, epochs)).steps or settings.train.length

    def build(resumed: Resumed | None) -> tuple[jpipe.Pipeline, Data]:
        continued = team.run_on_all(lambda: _checked(pipe, settings, fit_data.continued(batches, resumed, rows, epochs)))
        team.agree(lambda: {"plan": pipe.plan.to_json(), "data": continued.digest()})
        return pipe, continued

    if resumed is not None:
        if state is not None:
            reporter.say("the argument state is ignored, because it is for new runs and this run resumes")
        if resumed.step >= steps:
            return _completed(settings.with_steps(steps), build(resumed), team, resumed, reporter)
    elif state is not None and state.batch >= steps:
        raise InputError(f"fit: steps: expected more than {state.batch}, the number of batches before state, found {steps}; raise steps")
    summary = start(settings, RunParts(build, state=state, callbacks=callbacks), team, resumed, resume, reporter)
    assert summary.state is not None
    return FitResult(summary.state, summary, summary.folder)


def _checked(pipe: jpipe.Pipeline, settings: RunSettings, batches: Data) -> Data:
    """Check that the pipeline can train on the data, and that evaluations have the results that settings name. Return the data."""
    if settings.checkpoint.best is not None and not len(batches.validation):
        raise InputError(
            "fit: checkpoint.best has no effect without eval_data, because it compares results on eval_data; give eval_data, or remove best"
        )
    stopping.check(settings)
    metrics = settings.metrics()
    pipe.check(batches.like, metrics if metrics or len(batches.validation) else None)
    return batches


def _completed(settings: RunSettings, built: tuple[jpipe.Pipeline, Data], team: Team, resumed: Resumed, reporter: Reporter) -> FitResult:
    """Return the result of a run that has no steps left, with the state from its checkpoint."""
    pipe, batches = built
    layers, damage = read_checkpoint(pipe, batches, team, resumed, fresh_optimizer=False)
    if layers is None:
        raise team.shared(InputError(damage, change=ANOTHER))
    state = begin(settings.seed, pipe, batches, resumed, layers)
    return FitResult(state, already_complete(resumed, settings, reporter, team), resumed.folder if team.is_first else None)


def _console(shows: bool) -> Console:
    """Return the console for the progress. In a notebook it prints plain lines, because a stored notebook would not show a bar."""
    console = Console(highlight=False, quiet=not shows)
    return Console(highlight=False, quiet=not shows, force_jupyter=False, force_terminal=False) if console.is_jupyter else console
