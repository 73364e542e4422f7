"""`jpipe evaluate`: compute the loss, perplexity and metrics of a checkpoint on a whole data set, through the run's pipeline."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console

import jpipe
from jpipe import InputError
from jpipe.files import resolved
from jpipe_train.assemble import compile_cache
from jpipe_train.assemble.build import build, check, check_by_reading, prepare_devices
from jpipe_train.assemble.metrics import metrics
from jpipe_train.checkpoint import resume
from jpipe_train.checkpoint.weights import check_steps, choose
from jpipe_train.config import config_file
from jpipe_train.config.config import Config, OptimizerConfig, ResumeConfig
from jpipe_train.config.data_section import SourceConfig
from jpipe_train.console import interrupt
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count
from jpipe_train.data import data
from jpipe_train.data.mixture import Joined
from jpipe_train.data.rows import BatchesOfRows, Divisible, like_a_batch
from jpipe_train.launch.team import Team, facts, joined
from jpipe_train.report.metrics_log import RunStopped, mean_of, means_of
from jpipe_train.run.ending import reason
from jpipe_train.run.requests import EvaluateRequest
from jpipe_train.run.starting import begin, initial_params, read_checkpoint

_MOST_PENDING = 2  # batches that may be in flight before a result is read, so that the devices always have work


@dataclass(frozen=True)
class Result:
    """The result of an evaluation."""

    step: int  # the step of the checkpoint
    rows: int  # the number of rows evaluated
    total: int  # the number of rows in the data
    labels: float  # the total weight of the loss; for built-in losses, the number of labels that count
    loss: float  # the mean loss over the labels
    metrics: dict[str, float]  # the mean of each metric in the config, which may be NaN; the keys are the names of the metrics


def main(request: EvaluateRequest, num_processes: int = 1, connect_limit: float = 300.0, wait_limit: float = 45.0) -> Result:
    """Evaluate a checkpoint, and print the result. All processes have the same request.

    Args:
        connect_limit: seconds to wait for the other processes at the start.
        wait_limit: seconds without a sign of life after which another process counts as lost.

    Raises:
        InputError: the run or the checkpoint does not exist, is damaged, or does not match its config; the data cannot be read, or have no
            rows.
        RunStopped: a device failed, or a file can no longer be read.
        jpipe.PeerLost: another process died, hung or stopped.
    """
    with joined(num_processes, connect_limit, wait_limit) as team:
        interrupt.check()
        quiet = None if team.is_first else Console(quiet=True)
        lines: list[str] = []
        folder = team.run_on_all(lambda: _run_folder(request))
        team.run_on_all(lambda: check_steps(folder, request.step, "evaluate") if team.is_first else None)
        config = team.run_on_all(lambda: _config(folder, request))
        team.agree(lambda: facts(config) | {"what is evaluated": str(request)})
        team.run_on_all(lambda: prepare_devices(config.plan, num_processes))
        cache_problem = team.run_on_all(lambda: compile_cache.use(config.compile_cache))
        team.run_on_all(lambda: _check_by_reading(config, request))
        team.start_devices(connect_limit)
        # Reading a checkpoint starts the devices (in Orbax), and this waits for all processes, so it comes after start_devices.
        step = int(team.from_first("the checkpoint", lambda: str(choose(folder, request.step, "evaluate", lines.append).step)))
        reporter = Reporter(1, *data.portion(config), quiet)
        for line in (*lines, cache_problem):
            if line:
                reporter.say(line)
        pipe, batches, selection = team.run_on_all(lambda: _built(config, request, reporter))
        team.agree(lambda: {"plan": pipe.plan.to_json(), "data": batches.digest()})
        interrupt.check()
        resumed, fresh = team.run_on_all(lambda: resume.at(folder, step)), config.resume.optimizer == "reset"
        try:
            _finish_labels(config, folder, pipe, batches, team, reporter)
            with reporter.phase(f"compiling {count(pipe.plan.depth, 'stage')}, reading the checkpoint", compile_cache.CacheCount()):
                with _other_shapes_named(config, request):
                    layers, damaged = read_checkpoint(pipe, batches, team, resumed, fresh_optimizer=fresh)
                if layers is None:
                    raise team.shared(InputError(damaged, change=resume.ANOTHER))
                state = begin(config.seed, pipe, batches, resumed, layers, fresh_optimizer=fresh)
            means, labels = _evaluate(config, request, pipe, state, selection, reporter)
        except (jax.errors.JaxRuntimeError, OSError) as error:
            raise RunStopped(reason(error)) from error
        loss = means.pop("val_loss")
        of_config = {name.removeprefix("val_"): mean for name, mean in means.items()}
        result = Result(step, selection.rows, selection.total, labels, loss, of_config)
        _print(config, request, result, batches.source, reporter, over="by the weights of the sources," if selection.sources else "over")
        return result


def _finish_labels(config: Config, folder: Path, pipe: jpipe.Pipeline, batches: data.Data, team: Team, reporter: Reporter) -> None:
    """Add the numbers of the run's initial model to labels that need them: kept ones, otherwise from the initial weights, made again."""
    unfinished = [rows for rows in batches.unfinished if not rows.read(folder)]
    if unfinished:
        config = config.model_copy(update={"warm_start": config_file.load_resolved(folder / "config.yaml").warm_start})
        state = begin(config.seed, pipe, batches, None, initial_params(config, pipe, batches, team, None, reporter))
        for rows in unfinished:
            rows.compute(pipe, state, config.train.batch_size, None, reporter)


def _run_folder(request: EvaluateRequest) -> Path:
    if request.batches is not None and request.batches < 1:
        raise InputError(f"--batches: expected 1 or more, found {request.batches}; without --batches all batches are evaluated")
    return resolved(request.run, "evaluate")


def _config(folder: Path, request: EvaluateRequest) -> Config:
    """Return the run's config without the parts that an evaluation does not need. The plan comes from plan.json unless overridden."""
    sections: dict[str, dict[str, Any]] = {"warm_start": {}}
    if not any(override.startswith(("plan.", "plan=")) for override in request.overrides):
        sections["plan"] = {"file": str(folder / "plan.json")}
    elif config_file.load_resolved(folder / "config.yaml").plan.file is not None:  # a plan.file would override all other keys
        sections["plan"] = {}
    config = config_file.load(folder / "config.yaml", request.overrides, allow_code=request.allow_code, sections=sections)
    if request.weights == "ema":
        if config.optimizer.ema_decay is None:
            raise InputError("--weights: the run has no moving average of the weights; remove --weights, or train with optimizer.ema_decay")
        return config
    # SGD has no optimizer state, so it needs no memory; the optimizer state of the checkpoint is not read.
    return config.model_copy(update={"optimizer": OptimizerConfig(name="sgd"), "resume": ResumeConfig(optimizer="reset")})


def _check_by_reading(config: Config, request: EvaluateRequest) -> None:
    with _option_named(request):
        check_by_reading(config, request.data)


@contextmanager
def _option_named(request: EvaluateRequest) -> Iterator[None]:
    """In errors about the path of other data, write `--data` in place of `data.path`."""
    try:
        yield
    except InputError as error:
        if request.data is None:
            raise
        raise error.renamed({"data.path": "--data"}) from error.__cause__


@contextmanager
def _other_shapes_named(config: Config, request: EvaluateRequest) -> Iterator[None]:
    """If the arrays at `--data` differ in shape from the run's arrays, replace any InputError by one about the shapes."""
    try:
        yield
    except InputError:
        if request.data is not None and config.data.target is None and config.data.format == "arrays":
            _check_shapes(config, request.data)
        raise


def _check_shapes(config: Config, path: str) -> None:
    """Check that the rows at `path` have the same shapes as the rows of the run, if both can be read."""
    specs = []
    for each in (None, path):
        try:
            rows = data.held_out(config, each).validation
        except InputError:
            return
        rows = rows.parts[0] if isinstance(rows, Joined) else rows
        assert isinstance(rows, BatchesOfRows), "arrays have rows"
        specs.append(rows.spec)
    for name, one, other in zip(("inputs", "targets"), *specs, strict=True):
        if one.shape != other.shape:
            raise InputError(
                f"--data: expected {name} of shape {list(one.shape)}, as in training, found {list(other.shape)} in '{path}'; give rows "
                "with the shape of training"
            )


def _built(config: Config, request: EvaluateRequest, reporter: Reporter) -> tuple[jpipe.Pipeline, data.Data, "_Selection"]:
    """Build the pipeline and its data: all rows to evaluate as `validation`, and one batch to compile for as `train`."""

    def load(config: Config) -> data.Data:
        with _option_named(request):
            held_out = data.held_out(config, request.data)
        rows = held_out.validation
        first = rows.parts[0] if isinstance(rows, Joined) else rows
        return replace(held_out, train=[like_a_batch(first)] if isinstance(first, BatchesOfRows) else first)

    with _other_shapes_named(config, request):
        pipe, batches = build(config, reporter, load=load)
        if isinstance(rows := batches.validation, Divisible | Joined):
            batches = replace(batches, validation=rows.with_remainder())
        return pipe, check(config, pipe, batches), _select(config, request, batches)


@dataclass(frozen=True)
class _Selection:
    """The batches to evaluate."""

    batches: list[tuple[data.Batches, int, int]]  # each one's place, as the batches of a source and an index, and its number of rows
    sources: list[SourceConfig]  # the source of each batch, if there are several sources
    total: int  # the number of rows in the data, including rows that are not evaluated

    @property
    def rows(self) -> int:
        """The number of rows to evaluate."""
        return sum(rows for _, _, rows in self.batches)


def _select(config: Config, request: EvaluateRequest, batches: data.Data) -> _Selection:
    """Select the first `request.batches` whole batches of each source. If that is all of the data, also select the remaining rows."""
    joined = batches.validation
    chosen, sources, total = [], list[SourceConfig](), 0
    for number, part in enumerate(joined.parts if isinstance(joined, Joined) else [joined]):
        whole = part.whole if isinstance(part, Divisible) else len(part)
        rows = [part.rows_of(i) if isinstance(part, Divisible) else config.train.batch_size for i in range(len(part))]
        first = [(part, i, size) for i, size in enumerate(rows)]
        chosen += first if request.batches is None or request.batches > whole else first[: request.batches]
        sources += [batches.parts[number][0]] * (len(chosen) - len(sources)) if batches.parts else []
        total += sum(rows)
    return _Selection(chosen, sources, total)


def _evaluate(
    config: Config,
    request: EvaluateRequest,
    pipe: jpipe.Pipeline,
    state: jpipe.State,
    selection: _Selection,
    reporter: Reporter,
) -> tuple[dict[str, float], float]:
    """Return the mean loss and metrics over all selected batches, and the total weight of the loss."""
    functions = metrics(config.eval, config.model, pipe.loss)
    pending: list[jpipe.Evaluation] = []
    results: list[dict[str, tuple[float, float]]] = []
    total, done = selection.rows, 0

    def finish() -> None:
        results.append(means_of(pending.pop(0)))

    with reporter.counting(f"evaluating {count(total, 'row')}") as progress:
        for batches, index, rows in selection.batches:
            interrupt.check()
            pending.append(pipe.evaluate(state, batches[index], functions, weights=request.weights))
            if len(pending) > _MOST_PENDING:
                finish()
                done += rows
                progress(done, total)
        while pending:
            finish()
    return mean_of(results, selection.sources), sum(batch["val_loss"][1] for batch in results)


def _print(config: Config, request: EvaluateRequest, result: Result, source: str, reporter: Reporter, over: str) -> None:
    """Print the result as a line and a small table."""
    of_all = "" if result.rows == result.total else f" of {result.total:,}"
    amount = f"{result.rows:,}{of_all} row{'' if result.total == 1 else 's'}"
    suffix = "" if request.weights == "newest" else ", moving average of the weights"
    reporter.say(f"{request.run}, step {result.step}{suffix}; data: {source}, {amount}")
    unit = data.loss_unit(config).strip()
    rows = {f"loss, {unit}" if unit else "loss": result.loss}
    if unit.startswith("nats per"):
        rows["perplexity"] = math.exp(result.loss) if result.loss < 700 else math.inf
    if unit == "nats per byte":
        rows["bits per byte"] = result.loss / math.log(2)
    rows |= result.metrics
    for name, metric in config.eval.metrics.items():
        if metric == "cross_entropy" and "perplexity" not in rows:
            rows["perplexity"] = math.exp(min(result.metrics[name], 700.0))
    reporter.table(
        ("", f"{over} {result.labels:,.10g} {_labels(config, result.labels)}"), [(name, f"{value:.6g}") for name, value in rows.items()]
    )


def _labels(config: Config, number: float) -> Literal["label", "labels", "in weight"]:
    if config.loss.target is not None:
        return "in weight"
    return "label" if number == 1 else "labels"
