"""The training loop."""

import functools
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

import jpipe
from jpipe_train.checkpoint.checkpoints import Checkpoints
from jpipe_train.checkpoint.history import History
from jpipe_train.checkpoint.resume import Resumed
from jpipe_train.config.config import TrainConfig
from jpipe_train.console import interrupt
from jpipe_train.console.preemption import Preemption
from jpipe_train.data.data import Batches
from jpipe_train.data.position import Ordered
from jpipe_train.report.measure import Measure
from jpipe_train.report.metrics_log import MetricsLog, RunStopped, Validation, mean_loss
from jpipe_train.report.summary import Summary, name_of


@dataclass(frozen=True)
class Training:
    """Feeds `config.steps` batches, evaluates in between, and logs each batch's loss when the next one is under way.

    In `metrics.jsonl` the `loss` of step t is that of batch t. Its `val_loss` is of the newest weights that all stages hold when
    batch t is about to enter: with the flushing schedules those after t updates; with 2BW, which is one update behind, those after
    t - 1; with weight stashing those of a copy that is drained first, after t updates. The last row has the `val_loss` of the final
    weights, drained; in a run of one step it is the only row, and the loss before training is in the summary only. With `ema_decay`
    there is `val_loss_ema` as well, and a metric of the averaged weights for each metric: after t updates, of a copy that is drained.

    Attributes:
        config: how many steps, and when to evaluate.
        pipe: the compiled pipeline.
        batches: to train on, by step.
        held_out: the batches of each evaluation.
        metrics: of an evaluation, besides the loss.
        log: where losses go.
        measure: traces some batches.
        checkpoints: writes some.
        preemption: knows of signals that end the run.
        history: of the run before it was resumed.
    """

    config: TrainConfig
    pipe: jpipe.Pipeline
    batches: Batches
    held_out: Sequence[Any]
    metrics: Mapping[str, Any]
    log: MetricsLog
    measure: Measure
    checkpoints: Checkpoints
    preemption: Preemption
    history: History

    def run(self, state: jpipe.State, resumed: Resumed | None) -> Summary:
        """Train from `state` on.

        Raises:
            RunStopped: rows are missing at the end of the run, or its checkpoint could not be written.
            NonFiniteLoss: training diverged.
            KeyboardInterrupt: Ctrl-C.
        """
        log, checkpoints, steps = self.log, self.checkpoints, self.config.steps
        interrupt.check()
        before = self._validation_before(state, resumed)
        facts_of = functools.partial(self._facts, before)
        finished: jpipe.Metrics | None = None
        for step in range(state.batch, steps):
            interrupt.check()
            order = self.preemption.order(step, lambda: checkpoints.last_is_over)
            if order == "leave":
                return self._stopped(state, mean_loss(before))
            if step % self.config.eval_every == 0 and log.validated(step) is None:
                log.validation(step, self._evaluate(state))
            if order == "save":
                checkpoints.arm_last(step)
            else:
                checkpoints.arm(step)
            state, metrics = self.pipe.step(state, self.batches[step], observe=checkpoints.observing(self.measure.observer(step)))
            log.finished(finished)  # in the step before: reading a loss waits for it, and the devices have this step's work meanwhile
            checkpoints.proceed(log.through, facts_of)
            finished = metrics
        interrupt.check()
        self.measure.finish()
        state, drained = self.pipe.drain(state, observe=checkpoints.observing(), with_metrics=True)
        after = self._evaluate(state)
        log.validation(steps - 1, after)
        log.finished(finished)
        log.finished(drained)
        checkpoints.proceed(log.through, facts_of)
        checkpoints.finish()
        log.close()
        self._check_complete(steps)
        interrupt.check()
        return Summary(steps, mean_loss(before), mean_loss(after), log.seconds, log.folder, self.measure.predicted, self.measure.measured)

    def _evaluate(self, state: jpipe.State) -> list[jpipe.Evaluation]:
        found = [self.pipe.evaluate(state, batch, self.metrics) for batch in self.held_out]
        if self.pipe.ema_decay is None:
            return found
        averaged = [self.pipe.evaluate(state, batch, self.metrics, weights="ema") for batch in self.held_out]
        return [_beside(newest, ema) for newest, ema in zip(found, averaged, strict=True)]

    def _validation_before(self, state: jpipe.State, resumed: Resumed | None) -> Validation:
        """The validation before training, logged; a run that is resumed has it in its checkpoint."""
        if resumed is None:
            before = self._evaluate(state)
            self.log.validation(0, before)
            return before
        if resumed.facts.val_loss is not None:
            self.log.validation(resumed.step, {"val_loss": resumed.facts.val_loss} | resumed.facts.val_metrics)
        return {"val_loss": resumed.facts.val_loss_before}

    def _facts(self, before: Validation, step: int) -> dict[str, Any]:
        """What a checkpoint of this step says of the run so far; `before` is the validation before training."""
        known = self.log.validated(step) or {}
        loss = known.pop("val_loss", None)
        assert isinstance(self.batches, Ordered)
        places = {"order": self.batches.first_position, "position": self.batches.position(step)}
        return {
            "val_loss": loss,
            "val_metrics": known,
            "val_loss_before": mean_loss(before),
            "history": self.history.facts(step),
            "data": {"batch_size": self.config.batch_size} | {name: place.model_dump(mode="json") for name, place in places.items()},
        }

    def _check_complete(self, step: int, why: str = "") -> None:
        """Check that the rows of all steps before this one are written, and the checkpoint, if there is to be one.

        Args:
            step: at which the run ends.
            why: the run ends, for messages.

        Raises:
            RunStopped: they are not.
            OSError: they cannot be read, or somebody has changed them.
        """
        self.log.check_complete(step)
        problem = self.checkpoints.missing(step)
        if problem is not None:
            raise RunStopped(f"{why}{problem}")

    def _stopped(self, state: jpipe.State, before: float) -> Summary:
        """The end of a run that a signal ends, and whose checkpoint is written.

        Raises:
            RunStopped: it could not be written.
        """
        number, cut = self.preemption.signal or signal.SIGTERM, self.preemption.cut
        self.checkpoints.finish()
        self.log.close()
        jax.block_until_ready(self.pipe.drain(state))  # so that processes leave with nothing under way between them
        assert cut is not None
        self._check_complete(cut, f"stopped by {name_of(number)}; ")
        return Summary(cut, before, None, self.log.seconds, self.log.folder, None, None, stopped_by=number)


def _beside(newest: jpipe.Evaluation, averaged: jpipe.Evaluation) -> jpipe.Evaluation:
    """An evaluation with the loss and the metrics of the averaged weights among its metrics, as `loss_ema` and so on."""
    of_average = {"loss": jpipe.Mean(averaged.loss, averaged.weight), **averaged.metrics}
    return newest._replace(metrics={f"{name}_ema": mean for name, mean in of_average.items()} | dict(newest.metrics))
