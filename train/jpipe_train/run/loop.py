"""A whole run: build the pipeline, open the run folder, train and report."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import jpipe
from jpipe.files import shown
from jpipe_train.assemble import compile_cache, frozen, smaller_plan
from jpipe_train.assemble.build import build, check, check_by_reading, param_specs, prepare_devices
from jpipe_train.assemble.delay import correction_words, delay_words
from jpipe_train.assemble.meshes import has_meshes, mesh_words
from jpipe_train.assemble.slices import slices_words
from jpipe_train.checkpoint.best import Step
from jpipe_train.checkpoint.checkpoints import Checkpoints
from jpipe_train.checkpoint.resume import ANOTHER, VERSIONS, Resume, Resumed, may_resume, passed_over
from jpipe_train.checkpoint.resume import find as find_resumed
from jpipe_train.checkpoint.resume import history as find_history
from jpipe_train.checkpoint.run_folder import FolderChanged, RunFolder, check_folder, mark_missing_end
from jpipe_train.config.config import AUTO, Config, TrainConfig
from jpipe_train.config.run_settings import RunSettings
from jpipe_train.console import interrupt
from jpipe_train.console.exit_codes import reported_by_system
from jpipe_train.console.preemption import Preemption
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count
from jpipe_train.data import data
from jpipe_train.launch.numeric_settings import numeric_settings
from jpipe_train.launch.team import Team, facts, joined
from jpipe_train.plan.auto import find_plan
from jpipe_train.plan.inputs import Request
from jpipe_train.report import logs
from jpipe_train.report.metrics_log import MetricsLog, NonFiniteLoss, RunStopped
from jpipe_train.report.performance import comparison, mfu
from jpipe_train.report.performance.measure import Measure
from jpipe_train.report.performance.watch import Watch
from jpipe_train.report.performance.xprof import Profiler
from jpipe_train.report.summary import Summary, epochs_words, print_summary, slow_of, stages_of, write_report
from jpipe_train.run import stopping
from jpipe_train.run.callbacks import Callbacks
from jpipe_train.run.ending import complete, left_words, nonfinite_data_named, reason
from jpipe_train.run.settings import settings_of
from jpipe_train.run.starting import (
    begin,
    check_shared,
    continue_folder,
    finish_labels,
    initial_params,
    make_folder,
    read_checkpoint,
    report_resumed,
)
from jpipe_train.run.training import Training

_LONGEST_DOWNLOAD = 24 * 3600.0  # seconds that hosts wait for the downloads of each other
_MANY_LAYERS = 100  # checking a hundred layers takes seconds, checking a thousand about a minute and a half


def main(
    config: Config,
    num_processes: int = 1,
    connect_limit: float = 300.0,
    wait_limit: float = 45.0,
    resume: Resume = "auto",
    from_checkpoint: Step = None,
    elastic: int | None = None,
) -> Summary:
    """Train a model that a config describes.

    Args:
        num_processes: the number of processes. Each calls this after `jpipe_train.launch.distributed.start` has connected them.
        connect_limit: seconds that each process waits for the other processes at the start.
        wait_limit: seconds without progress in any process after which the run fails.
        from_checkpoint: the step of the checkpoint to resume from, or "best"; None for the newest checkpoint that can be restored.
        elastic: the number of processes that the plan is made for, if there may be fewer processes; otherwise None.

    Raises:
        jpipe.InputError: the config is invalid. Nothing was trained, and no run folder was created.
        RunStopped: training diverged, a device failed or the disk is full; the run folder holds the steps before.
        jpipe.PeerLost: another process died, hung or stopped.
        ReportedElsewhere: this process stops, and another process reports the reason.
        KeyboardInterrupt: Ctrl-C was pressed. The exception names the run folder, if there is one, which holds the steps before.
    """
    with joined(num_processes, connect_limit, wait_limit) as team:
        interrupt.check()
        options = {"--resume": resume, "--from-checkpoint": str(from_checkpoint), "--elastic": str(elastic)}
        config, remarks = agree_on_config(config, num_processes, elastic, options, team)
        settings = team.run_on_all(lambda: settings_of(config))
        reporter = Reporter(config.train.length, *settings.items, None if team.is_first else Console(quiet=True))
        for line in remarks:
            reporter.say(line)
        looks = may_resume(config.run.dir, resume, team, from_checkpoint)
        if not looks:  # with a checkpoint, devices start before Orbax reads it, together in all processes
            team.run_on_all(lambda: check_early(config, settings, team, None, resume))
        team.start_devices(connect_limit)
        resumed = find_resumed(config.run.dir, resume, team, reporter.say, step=from_checkpoint)
        if resumed is not None and is_complete(resumed, settings):
            return already_complete(resumed, settings, reporter, team)
        if looks:
            team.run_on_all(lambda: check_early(config, settings, team, resumed, resume))
        parts = RunParts(
            lambda resumed: build_on_all(config, team, resumed, reporter),
            lambda pipe, batches, resumed: initial_params(config, pipe, batches, team, resumed, reporter),
        )
        return start(settings, parts, team, resumed, resume, reporter, from_checkpoint)


@dataclasses.dataclass(frozen=True)
class RunParts:
    """The pipeline, data and initial state that the loop trains; they come from a config or from a Python program."""

    # takes the checkpoint to resume from, and returns the pipeline and its data
    build: Callable[[Resumed | None], tuple[jpipe.Pipeline, data.Data]]
    # takes the pipeline, its data and the checkpoint, and returns the initial parameters of a new run; None for random parameters
    initial_params: Callable[[jpipe.Pipeline, data.Data, Resumed | None], dict[str, Any] | None] = lambda *_: None
    state: jpipe.State | None = None  # the initial state of a new run; None for the state of `Pipeline.init`
    callbacks: Callbacks = dataclasses.field(default_factory=Callbacks)  # called in process 0 after steps, evaluations and checkpoints


def start(
    settings: RunSettings,
    parts: RunParts,
    team: Team,
    resumed: Resumed | None,
    resume: Resume,
    reporter: Reporter,
    required_step: Step = None,
) -> Summary:
    """Build the pipeline, open the run folder, train and report; the errors are as in `main`.

    With a `required_step` other than "best", no earlier checkpoint than `resumed` is acceptable.
    """
    pipe, batches, resumed, layers = prepare(settings, parts, team, resumed, resume, reporter, required_step)
    interrupt.check()
    settings = with_steps(settings, batches, reporter, team)
    if resumed is not None:
        resumed = resumed.with_data_of(settings.record)
        if is_complete(resumed, settings):
            return already_complete(resumed, settings, reporter, team)
        report_resumed(resumed, settings.record, pipe.plan, batches, reporter)
    initial = parts.initial_params(pipe, batches, resumed) or layers
    writes = team.is_first and (not settings.in_python or settings.folder is not None)
    folder = team.run_on_all(lambda: make_folder(settings, pipe.plan, resume, resumed, reporter) if writes else None)
    try:
        with folder or contextlib.nullcontext():
            return run(settings, parts, pipe, batches, folder, reporter, team, resumed, initial)
    except BaseException as error:
        in_place = None if isinstance(error, FolderChanged) else folder
        logged = "" if in_place is None else left_words(in_place, settings)
        if isinstance(error, KeyboardInterrupt) or interrupt.pressed():
            raise KeyboardInterrupt(f"interrupted{logged}") from None
        if isinstance(error, (jpipe.PeerLost, NonFiniteLoss)):
            raise type(error)(f"{error}{logged}") from None
        if isinstance(error, (OSError, jax.errors.JaxRuntimeError, jpipe.runtime.CopiesDiffer)):
            raise RunStopped(f"{reason(error, folder)}{logged}") from error
        if logged and not isinstance(error, jpipe.InputError):
            reporter.say(logged.removeprefix("; "))
        raise


def agree_on_config(
    config: Config, num_processes: int, elastic: int | None, options: dict[str, str], team: Team
) -> tuple[Config, list[str]]:
    """Check that all processes have the same config and options, and prepare JAX, before any device starts.

    Return the config, with a smaller plan if there are fewer than `elastic` processes, and lines to print. Raise jpipe.InputError if the
    configs or options differ, or the config is not possible with these processes.
    """
    config, remark = team.run_on_all(lambda: smaller_plan.for_processes(config, num_processes, elastic))
    team.agree(lambda: facts(config) | options)
    team.run_on_all(lambda: prepare_devices(config.plan, num_processes))
    team.run_on_all(lambda: logs.check(config.log) if team.is_first else None)
    cache_problem = team.run_on_all(lambda: compile_cache.use(config.compile_cache))
    return config, [line for line in (cache_problem, remark) if line]


def check_early(config: Config, settings: RunSettings, team: Team, resumed: Resumed | None, resume: Resume) -> None:
    """Check everything that needs neither devices nor data, so that a mistake is reported within seconds."""
    stopping.check(settings)
    with team.working("files to be found or downloaded", _LONGEST_DOWNLOAD):
        check_by_reading(config)
        if resumed is None and config.warm_start.file is not None:
            from jpipe_train.checkpoint import warm_start

            warm_start.check_files(config)
    if config.plan.file == AUTO:
        Request().with_extras(config.plan)
    if resumed is None and team.is_first:
        check_folder(settings, anew=resume == "auto")


def prepare(
    settings: RunSettings,
    parts: RunParts,
    team: Team,
    resumed: Resumed | None,
    resume: Resume,
    reporter: Reporter,
    required_step: Step,
) -> tuple[jpipe.Pipeline, data.Data, Resumed | None, dict[str, Any] | None]:
    """Build the pipeline and read the checkpoint to resume from, falling back to earlier checkpoints if one is damaged.

    All processes use the same checkpoint, `resumed` or an earlier one. If `required_step` is a step, and not "best", no earlier checkpoint
    is acceptable. `reporter` prints a line for each damaged one. Return the pipeline, its data, the checkpoint and its layers. The last two
    are None if the run does not resume. Raise jpipe.InputError if the pipeline cannot be built, or no checkpoint can be read.
    """
    while True:
        pipe, batches = parts.build(resumed)
        if resumed is None:
            return pipe, batches, None, None
        layers, damage = read_checkpoint(pipe, batches, team, resumed, fresh_optimizer=settings.fresh_optimizer)
        if layers is not None:
            return pipe, batches, resumed, layers
        if resumed.step == required_step:
            raise team.shared(jpipe.InputError(damage, change=ANOTHER))
        reporter.say(f"checkpoint: {passed_over(jpipe.InputError(damage))}")
        resumed = find_resumed(settings.folder, "must" if resume == "must" else "auto", team, reporter.say, before=resumed.step)


def build_on_all(config: Config, team: Team, resumed: Resumed | None, reporter: Reporter) -> tuple[jpipe.Pipeline, data.Data]:
    """Choose the plan, build the pipeline and its data, and check that they are the same in all processes."""
    plan = None
    if config.plan.file == AUTO:
        same = resumed is not None and resumed.facts.devices == jax.device_count()
        plan = resumed.plan if resumed is not None and same else find_plan(config, reporter, team)
    pipe, batches = team.run_on_all(lambda: build_and_check(config, reporter, plan, resumed))
    team.agree(lambda: {"plan": pipe.plan.to_json(), "data": batches.digest()})
    return pipe, batches


def build_and_check(
    config: Config, reporter: Reporter, plan: jpipe.Plan | None = None, resumed: Resumed | None = None
) -> tuple[jpipe.Pipeline, data.Data]:
    """Build the pipeline and its data, and check everything that can be checked without running on a device."""
    position = None if resumed is None else resumed.position(config.train.batch_size)
    pipe, batches = build(config, reporter, plan, lambda config: data.load(config, position))
    batches = batches.with_some_validation()
    params = pipe.stack.ties.without_seconds(param_specs(pipe.stack, pipe.plan, batches.like))
    if (line := frozen.words(config.tune, params, random=resumed is None and config.warm_start.file is None)) is not None:
        reporter.say(line)
    layers = len(pipe.stack.ids)
    with reporter.phase(f"checking {layers:,} layers") if layers >= _MANY_LAYERS else contextlib.nullcontext():
        batches = check(config, pipe, batches)
    return pipe, batches


def with_steps(settings: RunSettings, batches: data.Data, reporter: Reporter, team: Team) -> RunSettings:
    """Convert the epochs of a run, if any, to steps, and return the settings with them.

    Raise jpipe.InputError if there would be no update, or a step to profile comes after the last step.
    """
    steps, epochs = batches.steps, settings.train.epochs
    if epochs is None or steps is None:
        return settings
    if settings.accumulate_batches > steps:
        raise team.shared(
            jpipe.InputError(
                f"optimizer.accumulate_batches {settings.accumulate_batches} is more than the {count(steps, 'step')} of "
                f"train.epochs {epochs:g}, so there would be no update; change one of them"
            )
        )
    settings = settings.with_steps(steps)
    if problem := settings.train.profile_problem():
        raise team.shared(jpipe.InputError(f"train.{problem}"))
    reporter.plan_steps(steps)
    return settings


def is_complete(resumed: Resumed, settings: RunSettings) -> bool:
    """Return whether nothing is left to train: the run has done all its steps (if their number is known), or has stopped early."""
    return resumed.step >= settings.train.length or bool(stopping.stopped_words(settings.train.stop, resumed))


def already_complete(resumed: Resumed, settings: RunSettings, reporter: Reporter, team: Team) -> Summary:
    """Report that the run is complete, and mark its end. So a job that died while it wrote the report succeeds when restarted."""
    train = settings.train
    where, why = f"the run in '{shown(resumed.folder)}'", stopping.stopped_words(train.stop, resumed)
    state, change = f"has done {count(resumed.step, 'step')} of {train.steps}", "train.steps"
    if resumed.step < train.length:
        state, change = f"stopped early at step {resumed.step}: {why}", "train.stop.patience (or remove train.stop)"
    elif train.epochs is not None:
        change = "train.epochs"
    if team.is_first:
        early = f"at step {resumed.step}: {why}" if resumed.step < train.length else None
        mark_missing_end(settings, resumed.folder, resumed.step, early)
    reporter.say(f"nothing is left to train: {where} {state}; raise {change} to continue, or choose another run.dir")
    return Summary(resumed.step, resumed.facts.val_loss_before, None, reporter.seconds, None, None, None)


def run(
    settings: RunSettings,
    parts: RunParts,
    pipe: jpipe.Pipeline,
    batches: data.Data,
    folder: RunFolder | None,
    reporter: Reporter,
    team: Team,
    resumed: Resumed | None,
    initial: dict[str, Any] | None,
) -> Summary:
    """Compile, train and report. Only process 0 has a folder to write into, and only process 0 calls callbacks."""
    callbacks = parts.callbacks if team.is_first else Callbacks()
    with contextlib.nullcontext() if folder is None else logs.Logs(settings, folder.path, reporter.say) as row_logs:
        interrupt.check()
        path = Path(team.from_first("the run folder", lambda: "" if folder is None else str(folder.path)))
        team.run_on_all(lambda: check_shared(settings, path, team))
        announce(pipe, batches, settings, folder, reporter, several=team.processes is not None)
        with reporter.phase(f"compiling {count(pipe.plan.depth, 'stage')}", compile_cache.CacheCount()):
            state = begin(settings.seed, pipe, batches, resumed, initial, parts.state, fresh_optimizer=settings.fresh_optimizer)
            (initial or {}).clear()  # free the arrays, even if a caller still has the dict
            sizes, temporary = _sizes(pipe, batches, alone=team.processes is None, writes=folder is not None)
            stages = [] if folder is None else stages_of(pipe, batches.like)
        finish_labels(pipe, batches, state if resumed is None else None, path, reporter, writes=folder is not None)
        report_transfers(pipe, reporter)
        earlier = None
        if resumed is not None:
            earlier = team.run_on_all(lambda: None if folder is None else continue_folder(settings, folder, resumed, reporter.say))
        train = settings.train
        measure = Measure(pipe, sizes, train.length, train.eval_every, train.trace_batches, team.processes, state.batch)
        history = find_history(settings, pipe.plan, resumed, lambda: reporter.seconds, earlier)
        utilization = None if folder is None or batches.shapes else mfu.find(pipe, batches.like)  # FLOPs differ between shapes
        log = MetricsLog(settings, folder, row_logs, reporter, measure, team, history, pipe, utilization, callbacks.finished)
        checkpoints = make_checkpoints(settings, pipe, path, folder, resumed, reporter, team)
        stops = stopping.Stopping(settings, resumed)
        watch = make_watch(train, pipe, batches, measure, reporter if team.is_first else None, state.batch)
        preemption = make_preemption(settings, team, callbacks if parts.callbacks else None, watch)
        held_out, chosen = batches.held_out(train.eval_batches), settings.metrics()
        profiler = Profiler(train.profile, path, team.index, reporter.say)
        when = preemption, history, stops, profiler, watch, callbacks
        training = Training(train, pipe, batches.train, held_out, chosen, log, measure, checkpoints, *when)
        completed = False
        try:
            with reporter.training(), preemption, nonfinite_data_named(log, batches.train, state.batch):
                summary = training.run(state, resumed)
                completed = summary.stopped_by is None
        except jpipe.InputError as error:
            if reported_by_system(error) is None:
                raise
            raise RunStopped(str(error)) from error  # the data could be read earlier, so the error may be temporary
        finally:
            if row_logs is not None and (not completed or preemption.signal is not None):
                row_logs.hurry()
            with interrupt.delayed():
                checkpoints.close()
                measure.close()
                profiler.close()
                remarks = {} if folder is None else stopping.remarks(settings, path, stops, log.last_step + 1) | watch.remarks
                if folder is not None and (completed or preemption.signal is None):  # after a signal there is little time
                    done = history.parts(log.last_step + 1)
                    write_report(settings, pipe, folder, measure, reporter, batches, stages, done, temporary, remarks)
    summary = dataclasses.replace(summary, temporary=temporary, slow=slow_of(pipe, summary.measured), remarks=remarks)
    summary = summary if folder is None else complete(summary, settings, pipe.plan, sizes, folder)
    print_summary(summary, settings, reporter)
    return summary


def make_preemption(settings: RunSettings, team: Team, callbacks: Callbacks | None, watch: Watch) -> Preemption:
    """Return the object that decides before each step whether the run ends (after a signal or a callback's request) or traces a batch."""
    stops = None if callbacks is None else (lambda: callbacks.stop)
    traces = watch.wants_trace if watch.can_trace else None
    returns = settings.in_python and settings.folder is None and interrupt.is_interactive()
    return Preemption(team.processes, saves=settings.checkpoint.every is not None, returns=returns, stops=stops, traces=traces)


def make_watch(
    train: TrainConfig, pipe: jpipe.Pipeline, batches: data.Data, measure: Measure, reporter: Reporter | None, first: int
) -> Watch:
    """Return the watch that times the steps from `first` on. Only process 0, which has a reporter, warns about slow steps.

    Batches with several shapes are not judged, because their times differ.
    """
    judges = reporter is not None and not batches.shapes
    can_trace = train.trace_batches > 0 and train.eval_every > 2 and not batches.shapes
    return Watch(pipe, measure, reporter.say if judges and reporter is not None else None, first, can_trace)


def make_checkpoints(
    settings: RunSettings,
    pipe: jpipe.Pipeline,
    path: Path,
    folder: RunFolder | None,
    resumed: Resumed | None,
    reporter: Reporter,
    team: Team,
) -> Checkpoints:
    """Return the writer of checkpoints into the folder `path`. Only process 0 has a `folder`."""
    rows = (lambda: b"") if folder is None else folder.logged
    train, best = settings.train, stopping.find_best(settings, path, resumed, team)
    also_at = None if best is None and train.stop is None else train.eval_every
    facts = facts_of_run(settings, pipe)
    return Checkpoints(settings.checkpoint, pipe, path, train.length, team, facts, rows, reporter.say, best, also_at)


def _sizes(pipe: jpipe.Pipeline, batches: data.Data, *, alone: bool, writes: bool) -> tuple[tuple[jpipe.programs.StageCost, ...], Any]:
    """Return the costs of the stages, and the bytes of temporaries of each stage that has programs in this process.

    Each process has the programs of its own stages. To compare the run with its plan, the programs of all stages are compiled.
    """
    compares = not alone and writes and pipe.plan.predicted is not None
    sizes = pipe.costs(batches.like, compiled_for=jax.local_devices()[0] if compares else None)
    return sizes, comparison.temporary_bytes(pipe.plan, sizes, range(pipe.plan.depth) if compares or alone else local_stages(pipe))


def announce(
    pipe: jpipe.Pipeline, batches: data.Data, settings: RunSettings, folder: RunFolder | None, reporter: Reporter, *, several: bool
) -> None:
    """Print the data, the plan and the placement of the workers."""
    plan, train, source = pipe.plan, settings.train, batches.source
    meshes = f" on {mesh_words(plan)}" if has_meshes(plan) else ""
    reporter.say(
        f"data: {source}; plan: {count(plan.depth, 'stage')}{meshes}, {plan.schedule}; {count(train.length, 'step')}{epochs_words(train)}"
        + (f"; run folder: {shown(folder.path)}" if folder is not None else "")
    )
    if words := slices_words(pipe, batches.like):
        reporter.say(words)
    if words := delay_words(plan, settings.accumulate_batches):
        reporter.say(f"{words}; delay correction: {correction_words(pipe.delay_factor)}")
    if several or len(plan.workers) > plan.depth:
        for line in jpipe.runtime.placement_grid(plan, pipe.places).splitlines():
            reporter.say(line)


def report_transfers(pipe: jpipe.Pipeline, reporter: Reporter) -> None:
    """Print how the accelerators of several processes exchange messages. A probe has chosen the method."""
    if pipe.transfers is not None and pipe.devices[0].platform != "cpu":
        method = {"device_put": "jax.device_put", "collectives": "collectives of two devices each"}[pipe.transfers]
        reporter.say(f"messages between processes are sent with {method}")


def local_stages(pipe: jpipe.Pipeline) -> set[int]:
    """Return the stages with a replica in this process."""
    index = jax.process_index()
    return {s for (s, _), device in zip(pipe.plan.workers, pipe.devices, strict=True) if device.process_index == index}


def facts_of_run(settings: RunSettings, pipe: jpipe.Pipeline) -> dict[str, Any]:
    """Return the facts about the run that are stored in each of its checkpoints."""
    traced = None if pipe.stack.added else pipe.stack.traced
    return ({} if traced is None else {"model": traced.places()}) | {
        "config": settings.yaml,
        "plan": pipe.plan.to_json(),
        "devices": jax.device_count(),
        "versions": VERSIONS | numeric_settings(),
    }
