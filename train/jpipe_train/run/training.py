"""The training loop."""

import functools
import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

import jpipe
from jpipe_train.checkpoint.checkpoints import Checkpoints
from jpipe_train.checkpoint.history import History
from jpipe_train.checkpoint.resume import Resumed
from jpipe_train.config.config import TrainConfig
from jpipe_train.console import interrupt
from jpipe_train.console.preemption import Decision, Preemption
from jpipe_train.data.data import Batches, HeldOut
from jpipe_train.data.position import Ordered
from jpipe_train.report.metrics_log import Evaluated, MetricsLog, RunStopped, Validation, mean_loss
from jpipe_train.report.performance.measure import Measure
from jpipe_train.report.performance.watch import Watch
from jpipe_train.report.performance.xprof import Profiler
from jpipe_train.report.summary import Summary, name_of
from jpipe_train.run.callbacks import Callbacks
from jpipe_train.run.stopping import Stopping

_MOST_NORMS = 200  # how often a run computes the norms of the delay; each computation reads all weights


@dataclass(frozen=True)
class Training:
    """Train on at most `config.steps` batches, evaluate in between, and log the loss of each batch while the next batch runs.

    In `metrics.jsonl` the row of step t has the `loss` of batch t. Its `val_loss` is for the newest weights that all stages have just
    before batch t enters. Under schedules that flush, these weights have t updates. Under 2BW they have t - 1 updates, if all replicas hold
    them. Otherwise, for example under `pipedream`, a copy of the state is drained first, and its weights have t updates. The last row
    has the `val_loss` of the final, drained weights. In a run of one step this is the only row, and only the summary has the loss before
    training. With `ema_decay` the rows also have `val_loss_ema` and the metrics of the averaged weights after t updates, from a drained
    copy. Without held-out batches nothing is evaluated. If a callback stops a run, it ends like a run with fewer steps.
    """

    config: TrainConfig  # the number of steps, and when to evaluate
    pipe: jpipe.Pipeline  # the compiled pipeline
    batches: Batches  # the training batches; the index is the step
    held_out: Sequence[HeldOut]  # the batches of each evaluation
    metrics: Mapping[str, Any]  # the metrics of an evaluation in addition to the loss
    log: MetricsLog  # records losses
    measure: Measure  # traces some batches
    checkpoints: Checkpoints  # writes checkpoints
    preemption: Preemption  # decides before each step whether the run ends
    history: History  # the earlier parts of a resumed run
    stopping: Stopping  # decides whether the run stops early
    profiler: Profiler  # profiles some steps
    watch: Watch  # times the steps, and reports when they are slow
    callbacks: Callbacks = field(default_factory=Callbacks)  # in process 0, the callbacks to which complete checkpoints are reported

    def run(self, state: jpipe.State, resumed: Resumed | None) -> Summary:
        """Train, beginning with `state`.

        Raises:
            RunStopped: rows are missing at the end of the run, or its checkpoint could not be written.
            NonFiniteLoss: training diverged.
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        log, checkpoints, steps = self.log, self.checkpoints, self.config.length
        first = state.batch
        interrupt.check()
        before = self._validation_before(state, resumed)
        facts_of = functools.partial(self._facts, before, 0 if resumed is None else resumed.facts.val_since)
        finished: jpipe.Metrics | None = None
        for step in range(first, steps):
            interrupt.check()
            decision = self.preemption.decide(step, lambda: checkpoints.last_is_done)
            if decision == "leave":
                return self._stopped(state, mean_loss(before))
            if validates := bool(self.held_out) and step % self.config.eval_every == 0 and log.validated(step) is None:
                log.validation(step, self._evaluate(state))
            if self._stops(step) and step > first:
                steps = step
                checkpoints.end_at(step)
                break
            self._schedule(step, decision)
            self.profiler.before(step, state)
            observe = checkpoints.observing(self.measure.observer(step))
            state, metrics = self.pipe.step(state, self.watch.load(self.batches, step), observe=observe)
            if self._measures_delay(step):
                log.delay_norms(step, self.pipe.delay_norms(state))
            log.finished(finished)  # the previous step: this waits for its loss, and the devices already have the work of this step
            checkpoints.flush_finished(log.last_step, facts_of)
            self._report_saved()
            self.watch.finished(step, paused=validates or checkpoints.has_snapshots)
            finished = metrics
            if decision == "last":
                steps = log.steps = step + 1
                self.measure.ends_at(steps)
                break
        interrupt.check()
        self.measure.finish()
        self.profiler.after(steps, state)
        state, drained = self.pipe.drain(state, observe=checkpoints.observing(), with_metrics=True)
        after, earlier = self._evaluate(state), log.validated(steps - 1)
        if after:
            log.validation(steps - 1, after)
        log.finished(finished)
        log.finished(drained)
        checkpoints.flush_finished(log.last_step, functools.partial(facts_of, end=steps, earlier=earlier))
        checkpoints.finish()
        self._report_saved()
        log.close()
        self._check_complete(steps)
        interrupt.check()
        windows = self.measure.predicted, self.measure.measured
        stopped_by = self.preemption.signal if self.preemption.returns else None
        return Summary(steps, mean_loss(before), mean_loss(after), log.seconds, log.folder, *windows, stopped_by=stopped_by, state=state)

    def _schedule(self, step: int, decision: Decision) -> None:
        """Schedule the snapshot after `step` and the trace that begins with `step`, if they are due."""
        if decision in ("save", "last"):
            self.checkpoints.schedule_last(step)
        else:
            self.checkpoints.schedule_snapshot(step)
        if decision == "trace":
            self.measure.request(step)

    def _report_saved(self) -> None:
        """In process 0, report newly complete checkpoints to the callbacks."""
        if self.log.folder is not None:
            self.callbacks.saved(self.checkpoints.written, self.log.folder)

    def _stops(self, step: int) -> bool:
        """Return whether the run stops early before `step`. If a signal ends the run with a checkpoint, the resumed run decides."""
        cut = self.preemption.cut
        if not self.stopping.is_active or step % self.config.eval_every or (cut is not None and cut < step):
            return False
        return self.stopping.record(step, self.log.validated(step) or {})

    def _measures_delay(self, step: int) -> bool:
        """Return whether to compute the norms of the delay after `step`: only with a delay, and in at most `_MOST_NORMS` rows."""
        every = self.config.log_every * math.ceil(self.config.length / self.config.log_every / _MOST_NORMS)
        return step % every == 0 and any(self.pipe.plan.delays)

    def _evaluate(self, state: jpipe.State) -> list[Evaluated]:
        evaluations = [self.pipe.evaluate(state, each.batch, self.metrics) for each in self.held_out]
        if self.pipe.ema_decay is not None:
            averaged = [self.pipe.evaluate(state, each.batch, self.metrics, weights="ema") for each in self.held_out]
            evaluations = [_with_averaged(newest, ema) for newest, ema in zip(evaluations, averaged, strict=True)]
        return [Evaluated(evaluation, held_out.source) for evaluation, held_out in zip(evaluations, self.held_out, strict=True)]

    def _validation_before(self, state: jpipe.State, resumed: Resumed | None) -> Validation:
        """Evaluate and log before training, and return the results. A resumed run reads them from its checkpoint."""
        if resumed is None:
            before = self._evaluate(state)
            if before:
                self.log.validation(state.batch, before)
            return before
        if resumed.facts.val_loss is not None:
            self.log.validation(resumed.step, {"val_loss": resumed.facts.val_loss} | resumed.facts.val_metrics)
        return {} if resumed.facts.val_loss_before is None else {"val_loss": resumed.facts.val_loss_before}

    def _facts(
        self, before: Validation, since: int, step: int, end: int | None = None, earlier: dict[str, float] | None = None
    ) -> dict[str, Any]:
        """Return the facts about the run that are stored in the checkpoint at `step`.

        Validations up to step `since` used other data. If the run has ended at `end`, the last row has the validation of the final weights,
        and no longer the `earlier` one before the last step, if there was one.
        """
        known = dict((earlier if step + 1 == end else self.log.validated(step)) or {})
        loss = known.pop("val_loss", None)
        assert isinstance(self.batches, Ordered)
        positions = {"order": self.batches.first_position, "position": self.batches.position(step)}
        return {
            "val_loss": loss,
            "val_metrics": known,
            "val_final": self.log.validated(step - 1) if step == end else None,
            "stop": self.stopping.facts(step),
            "val_loss_before": mean_loss(before),
            "val_since": since,
            "history": self.history.facts(step),
            "data": {"batch_size": self.config.batch_size}
            | {name: position.model_dump(mode="json") for name, position in positions.items()},
        }

    def _check_complete(self, step: int, why: str = "") -> None:
        """Check that the rows of all steps before `step` are written, and the checkpoint, if one is due.

        Raise RunStopped if some are missing, and OSError if the rows cannot be read, or another program has changed them.
        """
        self.log.check_complete(step)
        problem = self.checkpoints.missing(step)
        if problem is not None:
            raise RunStopped(f"{why}{problem}")

    def _stopped(self, state: jpipe.State, before: float | None) -> Summary:
        """End a run that a signal has stopped, once its checkpoint is written. Raise RunStopped if the checkpoint could not be written."""
        number, cut = self.preemption.signal or signal.SIGTERM, self.preemption.cut
        self.checkpoints.finish()
        self._report_saved()
        self.log.close()
        state = jax.block_until_ready(self.pipe.drain(state))  # so that no message between processes is in flight at the end
        assert cut is not None
        self._check_complete(cut, f"stopped by {name_of(number)}; ")
        return Summary(cut, before, None, self.log.seconds, self.log.folder, None, None, stopped_by=number, state=state)


def _with_averaged(newest: jpipe.Evaluation, averaged: jpipe.Evaluation) -> jpipe.Evaluation:
    """Add the loss and metrics of the averaged weights to an evaluation; the suffix `_ema` marks them, as in `loss_ema`."""
    averages = {"loss": jpipe.Mean(averaged.loss, averaged.weight), **averaged.metrics}
    metrics = {f"{name}_ema": mean for name, mean in averages.items()} | dict(newest.metrics)
    microbatches = {f"{name}_ema": pairs for name, pairs in averaged.microbatches.items()} | dict(newest.microbatches)
    return newest._replace(metrics=metrics, microbatches=microbatches)
