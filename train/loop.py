"""A whole run, top to bottom: what is built, the run folder, the training loop."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

import jpipe
from train import data, interrupt
from train.build import build
from train.config import Config, TrainConfig
from train.progress import Reporter
from train.run_folder import RunFolder


class NonFiniteLoss(RuntimeError):
    """A loss became infinite or not a number, and the run stopped."""


@dataclass(frozen=True)
class Summary:
    """What a run came to: validation losses, the time it took, where it was written."""

    steps: int
    val_loss_before: float
    val_loss_after: float
    seconds: float
    folder: Path


def main(config: Config) -> Summary:
    """Train as `config` says.

    Raises:
        jpipe.InputError: something in the config does not fit; nothing ran on a device and no folder was made.
        NonFiniteLoss: training diverged; the run folder holds what came before.
        KeyboardInterrupt: Ctrl-C; the run folder, named in the exception if there is one, holds what came before.
    """
    interrupt.check()
    reporter = Reporter(config.train.steps, *data.portion(config))
    pipe, batches = build(config, reporter)
    plan = pipe.plan
    interrupt.check()
    with interrupt.held():  # a folder is made whole or not at all
        folder = RunFolder(config, plan)
    try:
        with folder:
            interrupt.check()
            reporter.say(
                f"data: {batches.source}; plan: {plan.depth} stages, {plan.schedule}; {config.train.steps} steps; run folder: {folder.path}"
            )
            with reporter.phase(f"compiling {plan.depth} stages"):
                state = pipe.init(jax.random.key(config.seed), batches.train[0])
            with reporter.training():
                summary = train(config, pipe, state, batches, folder, reporter)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) or interrupt.pressed():
            raise KeyboardInterrupt(f"interrupted; the steps logged so far are in {folder.path}") from None
        raise
    reporter.say(
        f"{summary.steps} steps in {summary.seconds:.0f} s: validation loss {summary.val_loss_before:.3f} → "
        f"{summary.val_loss_after:.3f}{data.loss_unit(config)}; the run is in {summary.folder}"
    )
    return summary


def train(config: Config, pipe: jpipe.Pipeline, state: jpipe.State, batches: data.Data, folder: RunFolder, reporter: Reporter) -> Summary:
    """Feed `train.steps` batches, evaluate in between, log each batch's loss when the next one is on its way.

    In `metrics.jsonl` the `loss` of step t is that of batch t. Its `val_loss` is of the newest weights that all stages hold when
    batch t is about to enter: with the flushing schedules those after t updates; with 2BW, which is one update behind, those after
    t - 1; with weight stashing those of a copy that is drained first, after t updates. The last row has the `val_loss` of the final
    weights, drained; in a run of one step it is the only row, and the loss before training is in the summary only.
    """
    steps, every = config.train.steps, config.train.eval_every
    held_out = [batches.validation[i] for i in range(min(config.train.eval_batches, len(batches.validation)))]
    interrupt.check()
    log = MetricsLog(config.train, folder, reporter)
    before = [pipe.evaluate(state, batch) for batch in held_out]
    log.validation(0, before)
    finished: Mapping[int, jax.Array] = {}
    for step in range(steps):
        interrupt.check()
        if step > 0 and step % every == 0:
            log.validation(step, [pipe.evaluate(state, batch) for batch in held_out])
        state, metrics = pipe.step(state, batches.train[step])
        log.losses(finished)  # of the step before: reading a loss waits for it, and the devices have this step's work meanwhile
        finished = metrics.losses
    interrupt.check()
    state = pipe.drain(state)
    after = [pipe.evaluate(state, batch) for batch in held_out]
    log.validation(steps - 1, after)
    log.losses(finished)
    interrupt.check()
    return Summary(steps, mean_loss(before), mean_loss(after), reporter.seconds, folder.path)


class MetricsLog:
    """Turns losses, as they come in, into rows of `metrics.jsonl` and words on the screen."""

    def __init__(self, config: TrainConfig, folder: RunFolder, reporter: Reporter) -> None:
        self._config = config
        self._folder = folder
        self._reporter = reporter
        self._validation: dict[int, Sequence[jpipe.Evaluation]] = {}

    def validation(self, step: int, evaluations: Sequence[jpipe.Evaluation]) -> None:
        """These go into the row of `step`; nothing waits for them yet."""
        self._validation[step] = evaluations

    def losses(self, losses: Mapping[int, jax.Array]) -> None:
        """Wait for the losses of these batches and write their rows."""
        for step, loss in losses.items():
            row = {"step": step, "loss": self._finite(step, "loss", float(loss))}
            if step in self._validation:
                row["val_loss"] = self._finite(step, "validation loss", mean_loss(self._validation.pop(step)))
            if step % self._config.log_every == 0 or step == self._config.steps - 1 or "val_loss" in row:
                self._folder.log(row)
            self._reporter.step(step, row["loss"], row.get("val_loss"))

    def _finite(self, step: int, name: str, value: float) -> float:
        if not math.isfinite(value):
            raise NonFiniteLoss(
                f"step {step}: the {name} is {value}; lower optimizer.learning_rate or lengthen optimizer.warmup_steps; "
                f"the steps before are in {self._folder.path}"
            )
        return value


def mean_loss(evaluations: Sequence[jpipe.Evaluation]) -> float:
    """The loss over all the batches, each counting for its weight."""
    weights = [float(evaluation.weight) for evaluation in evaluations]
    return sum(float(e.loss) * weight for e, weight in zip(evaluations, weights, strict=True)) / sum(weights)
