"""A whole run, top to bottom: what is built, the run folder, the training loop, its end."""

import contextlib
import dataclasses
import signal
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

import jpipe
from jpipe.files import shown
from train.assemble import compile_cache, data, model
from train.assemble.build import build, check, prepare_devices
from train.checkpoint.checkpoints import Checkpoints
from train.checkpoint.history import History
from train.checkpoint.resume import VERSIONS, Resume, Resumed
from train.checkpoint.resume import find as find_resumed
from train.checkpoint.resume import history as find_history
from train.checkpoint.run_folder import RunFolder
from train.config.config import AUTO, Config
from train.config.config_file import to_yaml
from train.console import interrupt
from train.console.preemption import Preemption
from train.console.progress import Reporter
from train.console.terminal import count, first_line
from train.launch.numeric_settings import numeric_settings
from train.launch.together import Together, facts, joined
from train.plan.auto import find_plan
from train.report import report
from train.report.measure import Measure
from train.report.metrics_log import MetricsLog, NonFiniteLoss, RunStopped, Validation, mean_loss
from train.report.summary import Summary, name_of, stages_of, tell, write_report
from train.report.tensorboard import TensorBoard
from train.run.starting import begin, check_shared, go_on, make_folder, starting_params, tell_resumed

_MANY_LAYERS = 100  # checking so many takes seconds, a thousand about a minute and a half


def main(
    config: Config, num_processes: int = 1, connect_limit: float = 300.0, wait_limit: float = 45.0, resume: Resume = "auto"
) -> Summary:
    """Train as `config` says.

    Args:
        config: the same in all processes of the run.
        num_processes: how many processes there are; each calls this, once `train.launch.distributed.start` has connected them.
        connect_limit: seconds that each waits for the others at the start.
        wait_limit: seconds without progress in any of them after which the run is given up.
        resume: whether to go on with what the run's folder holds.

    Raises:
        jpipe.InputError: something in the config does not fit; nothing was trained, and no folder was made but one that not all
            processes see.
        RunStopped: training diverged, a device failed or the disk is full; the run folder holds what came before.
        jpipe.PeerLost: another process died, hung or stopped.
        ReportedElsewhere: this process stops for a reason that another one tells.
        KeyboardInterrupt: Ctrl-C; the run folder, named in the exception if there is one, holds what came before.
    """
    with joined(num_processes, connect_limit, wait_limit) as together:
        interrupt.check()
        together.agree(lambda: facts(config) | {"--resume": resume})
        together.alike(lambda: prepare_devices(config.plan, num_processes))
        not_kept = together.alike(lambda: compile_cache.use(config.compile_cache))
        together.start_devices(connect_limit)
        reporter = Reporter(config.train.steps, *data.portion(config), None if together.is_first else Console(quiet=True))
        if not_kept:
            reporter.say(not_kept)
        resumed = find_resumed(config, resume, together, reporter.say)
        if resumed is not None and resumed.step >= config.train.steps:
            return nothing_left(resumed, config, reporter)
        plan = None
        if config.plan.file == AUTO:
            same = resumed is not None and resumed.facts.devices == jax.device_count()
            plan = resumed.plan if resumed is not None and same else find_plan(config, reporter, together)
        pipe, batches = together.alike(lambda: ready(config, reporter, plan))
        together.agree(lambda: {"plan": pipe.plan.to_json(), "data": batches.digest()})
        interrupt.check()
        if resumed is not None:
            tell_resumed(resumed, config, reporter)
        given = starting_params(config, pipe, batches, together, resumed, reporter)
        folder = together.alike(lambda: make_folder(config, pipe.plan, resume, resumed, reporter) if together.is_first else None)
        try:
            with folder or contextlib.nullcontext():
                return run(config, pipe, batches, folder, reporter, together, resumed, given)
        except BaseException as error:
            logged = "" if folder is None else f"; the steps logged so far are in {shown(folder.path)}"
            if isinstance(error, KeyboardInterrupt) or interrupt.pressed():
                raise KeyboardInterrupt(f"interrupted{logged}") from None
            if isinstance(error, (jpipe.PeerLost, NonFiniteLoss)):
                raise type(error)(f"{error}{logged}") from None
            if isinstance(error, (OSError, jax.errors.JaxRuntimeError)):
                raise RunStopped(f"{_reason(error)}{logged}") from error
            raise


def ready(config: Config, reporter: Reporter, plan: jpipe.Plan | None = None) -> tuple[jpipe.Pipeline, data.Data]:
    """The pipeline and its data, all that can be refused before a device works refused."""
    pipe, batches = build(config, reporter, plan)
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
    plan, several = pipe.plan, together.processes is not None
    with contextlib.nullcontext() if folder is None else TensorBoard(folder.path / "tensorboard", reporter.say) as tensorboard:
        interrupt.check()
        path = Path(together.from_first("the run folder", lambda: "" if folder is None else str(folder.path)))
        together.alike(lambda: check_shared(config, path, together))
        reporter.say(
            f"data: {batches.source}; plan: {count(plan.depth, 'stage')}, {plan.schedule}; {count(config.train.steps, 'step')}"
            + (f"; run folder: {shown(folder.path)}" if folder is not None else "")
        )
        if several or len(plan.workers) > plan.depth:
            for line in jpipe.runtime.placement_grid(plan, pipe.devices).splitlines():
                reporter.say(line)
        with reporter.phase(f"compiling {count(plan.depth, 'stage')}", compile_cache.Counted()):
            state = begin(config, pipe, batches, together, resumed, given)
            # The scratch memory of other processes' stages is known to those only, unless they are compiled here as well.
            here = jax.local_devices()[0] if several and folder is not None and plan.predicted is not None else None
            sizes = pipe.costs(batches.train[0], compiled_for=here)
            stages = [] if folder is None else stages_of(pipe, batches.train[0])
        if resumed is not None:
            together.alike(lambda: None if folder is None else go_on(config, folder, resumed))
        every, traced = config.train.eval_every, config.train.trace_batches
        measure = Measure(pipe, sizes, config.train.steps, every, traced, together.processes, state.batch)
        history = find_history(config, plan, resumed, lambda: reporter.seconds)
        log = MetricsLog(config, folder, tensorboard, reporter, measure, together, history)
        known = {
            "config": to_yaml(config),
            "plan": plan.to_json(),
            "devices": jax.device_count(),
            "versions": VERSIONS | numeric_settings(),
        }
        rows = (lambda: b"") if folder is None else folder.logged
        checkpoints = Checkpoints(config.checkpoint, pipe, path, config.train.steps, together, known, rows, reporter.say)
        preemption = Preemption(together.processes, saves=config.checkpoint.every is not None)
        ended = False
        try:
            with reporter.training(), preemption:
                summary = train(config, pipe, state, batches, log, measure, checkpoints, preemption, history, resumed)
                ended = summary.val_loss_after is not None
        finally:
            with interrupt.held():
                checkpoints.close()
                measure.close()
                if folder is not None and (ended or preemption.signal is None):  # time is short then
                    write_report(config, pipe, folder, measure, reporter, batches, stages, history.parts(log.through + 1))
    if folder is not None and summary.measured is not None and plan.predicted is not None:
        measured = report.as_predicted(plan, summary.measured, sizes)
        folder.keep_planned(plan.predicted, measured)
        summary = dataclasses.replace(summary, planned=tuple(report.compare_with_plan(plan.predicted, measured)))
    tell(summary, data.loss_unit(config), reporter)
    return summary


def train(
    config: Config,
    pipe: jpipe.Pipeline,
    state: jpipe.State,
    batches: data.Data,
    log: MetricsLog,
    measure: Measure,
    checkpoints: Checkpoints,
    preemption: Preemption,
    history: History,
    resumed: Resumed | None = None,
) -> Summary:
    """Feed `train.steps` batches, evaluate in between, log each batch's loss when the next one is on its way.

    In `metrics.jsonl` the `loss` of step t is that of batch t. Its `val_loss` is of the newest weights that all stages hold when
    batch t is about to enter: with the flushing schedules those after t updates; with 2BW, which is one update behind, those after
    t - 1; with weight stashing those of a copy that is drained first, after t updates. The last row has the `val_loss` of the final
    weights, drained; in a run of one step it is the only row, and the loss before training is in the summary only.
    """
    steps, every = config.train.steps, config.train.eval_every
    held_out = [batches.validation[i] for i in range(min(config.train.eval_batches, len(batches.validation)))]
    of_validation = model.metrics(config.eval)

    def evaluate() -> list[jpipe.Evaluation]:
        return [pipe.evaluate(state, batch, of_validation) for batch in held_out]

    interrupt.check()
    before: Validation
    if resumed is None:
        before = evaluate()
        log.validation(0, before)
    else:
        before = {"val_loss": resumed.facts.val_loss_before}
        if resumed.facts.val_loss is not None:
            log.validation(resumed.step, {"val_loss": resumed.facts.val_loss} | resumed.facts.val_metrics)
    finished: jpipe.Metrics | None = None

    def facts_of(step: int) -> dict[str, Any]:
        known = log.validated(step) or {}
        loss = known.pop("val_loss", None)
        return {"val_loss": loss, "val_metrics": known, "val_loss_before": mean_loss(before), "history": history.facts(step)}

    for step in range(state.batch, steps):
        interrupt.check()
        order = preemption.order(step, lambda: checkpoints.last_is_over)
        if order == "leave":
            return stopped(pipe, state, preemption, checkpoints, mean_loss(before), log)
        if step % every == 0 and log.validated(step) is None:
            log.validation(step, evaluate())
        if order == "save":
            checkpoints.arm_last(step)
        else:
            checkpoints.arm(step)
        state, metrics = pipe.step(state, batches.train[step], observe=checkpoints.observing(measure.observer(step)))
        log.finished(finished)  # in the step before: reading a loss waits for it, and the devices have this step's work meanwhile
        checkpoints.proceed(log.through, facts_of)
        finished = metrics
    interrupt.check()
    measure.finish()
    state = pipe.drain(state, observe=checkpoints.observing())
    after = evaluate()
    log.validation(steps - 1, after)
    log.finished(finished)
    checkpoints.proceed(log.through, facts_of)
    checkpoints.finish()
    log.close()
    interrupt.check()
    return Summary(steps, mean_loss(before), mean_loss(after), log.seconds, log.folder, measure.predicted, measure.measured)


def stopped(
    pipe: jpipe.Pipeline, state: jpipe.State, preemption: Preemption, checkpoints: Checkpoints, before: float, log: MetricsLog
) -> Summary:
    """The end of a run that a signal ends, and whose checkpoint is written.

    Raises:
        RunStopped: it could not be written.
    """
    number = preemption.signal or signal.SIGTERM
    checkpoints.finish()
    log.close()
    jax.block_until_ready(pipe.drain(state))  # only so that processes part with nothing under way between them
    if log.folder is not None and checkpoints.written != preemption.cut:
        raise RunStopped(f"stopped by {name_of(number)}; the checkpoint of step {preemption.cut} could not be written")
    assert preemption.cut is not None
    return Summary(preemption.cut, before, None, log.seconds, log.folder, None, None, stopped_by=number)


def _reason(error: Exception) -> str:
    """What a device or the disk says, in one line."""
    if isinstance(error, OSError):
        return f"the run folder cannot be written: {error.strerror or error}"
    said = first_line(error)
    hint = "; use more stages, recomputation or smaller microbatches" if "RESOURCE_EXHAUSTED" in said else ""
    return f"a device failed: {said}{hint}"
