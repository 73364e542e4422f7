"""A whole run, top to bottom: what is built, the run folder, training, the report."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import jpipe
from jpipe.files import shown
from jpipe_train.assemble import compile_cache, model
from jpipe_train.assemble.build import build, check, prepare_devices
from jpipe_train.assemble.meshes import has_meshes, mesh_words
from jpipe_train.checkpoint.checkpoints import Checkpoints
from jpipe_train.checkpoint.resume import VERSIONS, Resume, Resumed, passed_over
from jpipe_train.checkpoint.resume import find as find_resumed
from jpipe_train.checkpoint.resume import history as find_history
from jpipe_train.checkpoint.run_folder import FolderChanged, RunFolder
from jpipe_train.config.config import AUTO, Config
from jpipe_train.config.config_file import to_yaml
from jpipe_train.console import interrupt
from jpipe_train.console.exit_codes import reported_by_system
from jpipe_train.console.preemption import Preemption
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count, first_line
from jpipe_train.data import data
from jpipe_train.launch.numeric_settings import numeric_settings
from jpipe_train.launch.together import Together, facts, joined
from jpipe_train.plan.auto import find_plan
from jpipe_train.report import comparison, logs, mfu
from jpipe_train.report.measure import Measure
from jpipe_train.report.metrics_log import MetricsLog, NonFiniteLoss, RunStopped
from jpipe_train.report.summary import Summary, print_summary, stages_of, write_report
from jpipe_train.run.delay import delay_words
from jpipe_train.run.starting import begin, check_shared, go_on, make_folder, read_checkpoint, starting_params, tell_resumed
from jpipe_train.run.training import Training

_MANY_LAYERS = 100  # checking so many takes seconds, a thousand about a minute and a half


def main(
    config: Config,
    num_processes: int = 1,
    connect_limit: float = 300.0,
    wait_limit: float = 45.0,
    resume: Resume = "auto",
    from_checkpoint: int | None = None,
) -> Summary:
    """Train as `config` says.

    Args:
        config: the same in all processes of the run.
        num_processes: how many processes there are; each calls this, once `jpipe_train.launch.distributed.start` has connected them.
        connect_limit: seconds that each waits for the others at the start.
        wait_limit: seconds without progress in any of them after which the run is given up.
        resume: whether to go on with what the run's folder holds.
        from_checkpoint: the step of the checkpoint to resume from; None: of the newest that can be restored.

    Raises:
        jpipe.InputError: something in the config does not fit; nothing was trained, and no folder was made but one that not all
            processes see.
        RunStopped: training diverged, a device failed or the disk is full; the run folder holds what came before.
        jpipe.PeerLost: another process died, hung or stopped.
        ReportedElsewhere: this process stops for a reason that another one reports.
        KeyboardInterrupt: Ctrl-C; the run folder, named in the exception if there is one, holds what came before.
    """
    with joined(num_processes, connect_limit, wait_limit) as together:
        interrupt.check()
        together.agree(lambda: facts(config) | {"--resume": resume, "--from-checkpoint": str(from_checkpoint)})
        together.run_on_all(lambda: prepare_devices(config.plan, num_processes))
        together.run_on_all(lambda: logs.check(config) if together.is_first else None)
        not_kept = together.run_on_all(lambda: compile_cache.use(config.compile_cache))
        together.start_devices(connect_limit)
        reporter = Reporter(config.train.steps, *data.portion(config), None if together.is_first else Console(quiet=True))
        if not_kept:
            reporter.say(not_kept)
        resumed = find_resumed(config, resume, together, reporter.say, step=from_checkpoint)
        if resumed is not None and resumed.step >= config.train.steps:
            return nothing_left(resumed, config, reporter)
        pipe, batches, resumed, layers = prepared(config, together, resumed, resume, reporter, from_checkpoint)
        interrupt.check()
        if resumed is not None:
            tell_resumed(resumed, config, pipe.plan, batches, reporter)
        given = starting_params(config, pipe, batches, together, resumed, reporter) or layers
        folder = together.run_on_all(lambda: make_folder(config, pipe.plan, resume, resumed, reporter) if together.is_first else None)
        try:
            with folder or contextlib.nullcontext():
                return run(config, pipe, batches, folder, reporter, together, resumed, given)
        except BaseException as error:
            logged = "" if folder is None else f"; the steps logged so far are in {shown(folder.path)}"
            if isinstance(error, KeyboardInterrupt) or interrupt.pressed():
                raise KeyboardInterrupt(f"interrupted{logged}") from None
            if isinstance(error, (jpipe.PeerLost, NonFiniteLoss)):
                raise type(error)(f"{error}{logged}") from None
            if isinstance(error, FolderChanged):
                raise RunStopped(f"{error.strerror}{newest_of(folder)}") from error
            if isinstance(error, (OSError, jax.errors.JaxRuntimeError, jpipe.runtime.CopiesDiffer)):
                raise RunStopped(f"{reason(error, folder)}{logged}") from error
            raise


def prepared(
    config: Config, together: Together, resumed: Resumed | None, resume: Resume, reporter: Reporter, wanted: int | None
) -> tuple[jpipe.Pipeline, data.Data, Resumed | None, dict[str, Any] | None]:
    """The pipeline, its data, where it resumes and the layers to restore; the checkpoint before is taken if one cannot be read.

    Args:
        config: of the run.
        together: the processes of the run, which all take the same checkpoint.
        resumed: the checkpoint to begin with.
        resume: as in `main`.
        reporter: gets a line for each checkpoint that cannot be read.
        wanted: the step of the only checkpoint that may be taken, if it is the one to begin with.

    Raises:
        jpipe.InputError: something does not fit, or no checkpoint can be read.
    """
    while True:
        pipe, batches = agreed(config, together, resumed, reporter)
        if resumed is None:
            return pipe, batches, None, None
        layers, wrong = read_checkpoint(config, pipe, batches, together, resumed)
        if layers is not None:
            return pipe, batches, resumed, layers
        if resumed.step == wanted:
            raise together.shared(jpipe.InputError(wrong))
        reporter.say(f"checkpoint: {passed_over(wrong)}")
        resumed = find_resumed(config, "must" if resume == "must" else "auto", together, reporter.say, before=resumed.step)


def agreed(config: Config, together: Together, resumed: Resumed | None, reporter: Reporter) -> tuple[jpipe.Pipeline, data.Data]:
    """The pipeline and its data, once the plan is known; they are the same in all processes."""
    plan = None
    if config.plan.file == AUTO:
        same = resumed is not None and resumed.facts.devices == jax.device_count()
        plan = resumed.plan if resumed is not None and same else find_plan(config, reporter, together)
    pipe, batches = together.run_on_all(lambda: ready(config, reporter, plan, resumed))
    together.agree(lambda: {"plan": pipe.plan.to_json(), "data": batches.digest()})
    return pipe, batches


def ready(
    config: Config, reporter: Reporter, plan: jpipe.Plan | None = None, resumed: Resumed | None = None
) -> tuple[jpipe.Pipeline, data.Data]:
    """The pipeline and its data, all that can be refused before a device works refused."""
    position = None if resumed is None else resumed.position(config.train.batch_size)
    pipe, batches = build(config, reporter, plan, lambda config: data.load(config, position))
    layers = len(pipe.stack.ids)
    with reporter.phase(f"checking {layers:,} layers") if layers >= _MANY_LAYERS else contextlib.nullcontext():
        return pipe, check(config, pipe, batches)


def nothing_left(resumed: Resumed, config: Config, reporter: Reporter) -> Summary:
    """The end of a run that was done before; a job that died over its report, and is started again, ends well by that."""
    reporter.say(
        f"nothing is left to train: the run in '{shown(resumed.folder)}' has done {count(resumed.step, 'step')} of {config.train.steps}; "
        "raise train.steps to go on, or choose another run.dir"
    )
    return Summary(resumed.step, resumed.facts.val_loss_before, None, reporter.seconds, None, None, None)


def run(
    config: Config,
    pipe: jpipe.Pipeline,
    batches: data.Data,
    folder: RunFolder | None,
    reporter: Reporter,
    together: Together,
    resumed: Resumed | None = None,
    given: dict[str, Any] | None = None,
) -> Summary:
    """Compile, train and report; only process 0 has a folder to write into."""
    with contextlib.nullcontext() if folder is None else logs.Logs(config, folder.path, reporter.say) as others:
        interrupt.check()
        path = Path(together.from_first("the run folder", lambda: "" if folder is None else str(folder.path)))
        together.run_on_all(lambda: check_shared(config, path, together))
        announce(pipe, batches.source, config.train.steps, folder, reporter, several=together.processes is not None)
        with reporter.phase(f"compiling {count(pipe.plan.depth, 'stage')}", compile_cache.Counted()):
            state = begin(config, pipe, batches, resumed, given)
            if given is not None:
                given.clear()  # whoever else holds it, the arrays need no memory any more
            sizes, temporary = _sizes(pipe, batches, alone=together.processes is None, writes=folder is not None)
            stages = [] if folder is None else stages_of(pipe, batches.like)
        tell_transfers(pipe, reporter)
        if resumed is not None:
            together.run_on_all(lambda: None if folder is None else go_on(config, folder, resumed, reporter.say))
        measure = Measure(
            pipe, sizes, config.train.steps, config.train.eval_every, config.train.trace_batches, together.processes, state.batch
        )
        history = find_history(config, pipe.plan, resumed, lambda: reporter.seconds)
        # FLOPs of a step differ from batch to batch where shapes do.
        utilization = None if folder is None or batches.shapes else mfu.find(pipe, batches.like)
        log = MetricsLog(config, folder, others, reporter, measure, together, history, utilization)
        rows = (lambda: b"") if folder is None else folder.logged
        facts = facts_of_run(config, pipe.plan)
        checkpoints = Checkpoints(config.checkpoint, pipe, path, config.train.steps, together, facts, rows, reporter.say)
        preemption = Preemption(together.processes, saves=config.checkpoint.every is not None)
        held_out = [batches.validation[i] for i in range(min(config.train.eval_batches, len(batches.validation)))]
        metrics = model.metrics(config.eval)
        training = Training(config.train, pipe, batches.train, held_out, metrics, log, measure, checkpoints, preemption, history)
        ended = False
        try:
            with reporter.training(), preemption:
                summary = training.run(state, resumed)
                ended = summary.val_loss_after is not None
        except jpipe.InputError as error:
            if reported_by_system(error) is None:
                raise
            raise RunStopped(str(error)) from error  # it could be read before, and perhaps will be again
        finally:
            if others is not None and (not ended or preemption.signal is not None):
                others.hurry()
            with interrupt.held():
                checkpoints.close()
                measure.close()
                if folder is not None and (ended or preemption.signal is None):  # time is short then
                    write_report(config, pipe, folder, measure, reporter, batches, stages, history.parts(log.through + 1), temporary)
    summary = dataclasses.replace(summary, temporary=temporary)
    summary = summary if folder is None else with_planned(summary, pipe.plan, sizes, folder)
    print_summary(summary, data.loss_unit(config), reporter)
    return summary


def _sizes(pipe: jpipe.Pipeline, batches: data.Data, *, alone: bool, writes: bool) -> tuple[tuple[jpipe.programs.StageCost, ...], Any]:
    """Return the costs of the stages, and the temporaries of those whose programs are known in this process.

    The other processes' stages are known to those only. Where the run is to be compared with its plan, they are compiled here as well.
    """
    here = not alone and writes and pipe.plan.predicted is not None
    sizes = pipe.costs(batches.like, compiled_for=jax.local_devices()[0] if here else None)
    return sizes, comparison.temporary_bytes(pipe.plan, sizes, range(pipe.plan.depth) if here or alone else own_stages(pipe))


def announce(pipe: jpipe.Pipeline, source: str, steps: int, folder: RunFolder | None, reporter: Reporter, *, several: bool) -> None:
    """Say what is going to be trained on what, by which plan, and where each worker runs."""
    plan = pipe.plan
    meshes = f" on {mesh_words(plan)}" if has_meshes(plan) else ""
    reporter.say(
        f"data: {source}; plan: {count(plan.depth, 'stage')}{meshes}, {plan.schedule}; {count(steps, 'step')}"
        + (f"; run folder: {shown(folder.path)}" if folder is not None else "")
    )
    if words := delay_words(plan):
        reporter.say(words)
    if several or len(plan.workers) > plan.depth:
        for line in jpipe.runtime.placement_grid(plan, pipe.places).splitlines():
            reporter.say(line)


def tell_transfers(pipe: jpipe.Pipeline, reporter: Reporter) -> None:
    """Say how accelerators of several processes send each other messages, which a probe has found out."""
    if pipe.transfers is not None and pipe.devices[0].platform != "cpu":
        how = {"device_put": "jax.device_put", "collectives": "collectives of two devices each"}[pipe.transfers]
        reporter.say(f"messages between processes go by {how}")


def own_stages(pipe: jpipe.Pipeline) -> set[int]:
    """The stages of which this process has a replica."""
    own = jax.process_index()
    return {s for (s, _), device in zip(pipe.plan.workers, pipe.devices, strict=True) if device.process_index == own}


def facts_of_run(config: Config, plan: jpipe.Plan) -> dict[str, Any]:
    """What each checkpoint of the run says of it."""
    return {
        "config": to_yaml(config),
        "plan": plan.to_json(),
        "devices": jax.device_count(),
        "versions": VERSIONS | numeric_settings(),
    }


def with_planned(summary: Summary, plan: jpipe.Plan, sizes: Sequence[jpipe.programs.StageCost], folder: RunFolder) -> Summary:
    """The summary with what was planned beside what was measured, which is kept in the folder as well."""
    if summary.measured is None or plan.predicted is None:
        return summary
    measured = comparison.as_predicted(plan, summary.measured, sizes)
    folder.keep_planned(plan.predicted, measured)
    return dataclasses.replace(summary, planned=tuple(comparison.compare_with_plan(plan, plan.predicted, measured)))


def newest_of(folder: RunFolder | None) -> str:
    """The end of a message: what is left of a run whose folder somebody has changed; nothing where the folder is not known."""
    from jpipe.checkpoints import files

    if folder is None:
        return ""
    try:
        whole = files.steps(folder.path)
    except (jpipe.InputError, OSError):
        whole = []
    return f"; its newest checkpoint is of step {whole[-1]}, from which it resumes" if whole else "; no checkpoint is left there"


def reason(error: Exception, folder: RunFolder | None = None) -> str:
    """What a device or the disk says, in one line."""
    if isinstance(error, OSError):
        file = error.filename if isinstance(error.filename, str) else None
        if file is not None and (folder is None or not Path(file).is_relative_to(folder.path)):
            return f"'{file}' cannot be read or written: {error.strerror or error}"
        return f"the run folder cannot be written: {error.strerror or error}"
    said = first_line(error)
    if isinstance(error, jpipe.runtime.CopiesDiffer):
        return said
    hint = "; use more stages, recomputation or smaller microbatches" if "RESOURCE_EXHAUSTED" in said else ""
    return f"a device failed: {said}{hint}"
