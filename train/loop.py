"""A whole run, top to bottom: model, plan, data, pipeline, the training loop, the run folder."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

import jpipe
from train import data, gpt, interrupt
from train.config import MOST_MICROBATCHES, Config, PlanConfig, TrainConfig
from train.optimizer import optimizer
from train.progress import Reporter
from train.run_folder import RunFolder


class NonFiniteLoss(RuntimeError):
    """A loss became infinite or not a number, and the run stopped."""


@dataclass(frozen=True)
class Summary:
    """What a run came to: validation losses in nats a byte, the time it took, where it was written."""

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
    reporter = Reporter(config.train.steps, config.train.batch_size * config.model.seq_len)
    with plan_file_named(config.plan.file):
        stack = gpt.gpt(config.model)
        plan = make_plan(config.plan, stack.ids)
        check_microbatches(plan, config.train.batch_size)
        pipe = jpipe.Pipeline(stack, plan, gpt.loss, optimizer(config.optimizer, config.train.steps))
        with reporter.phase("reading the text"):
            batches = data.load(config)
        force_cpu_devices(devices_of(plan))
        check_memory(config, plan, devices_that_start(pipe))
        pipe.check(batches.train[0])
    interrupt.check()
    with interrupt.held():  # a folder is made whole or not at all
        folder = RunFolder(config, plan)
    try:
        with folder:
            interrupt.check()
            reporter.say(
                f"text: {batches.source}; plan: {plan.depth} stages, {plan.schedule}; {config.train.steps} steps; run folder: {folder.path}"
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
        f"{summary.val_loss_after:.3f} nats a byte; the run is in {summary.folder}"
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


def make_plan(config: PlanConfig, layer_ids: Sequence[str]) -> jpipe.Plan:
    """The plan in `config.file`, or even stages.

    Raises:
        jpipe.InputError: a file that cannot be read or is no plan; keys that make no legal plan.
    """
    if config.file is None:
        return jpipe.Plan.even(
            layer_ids,
            config.num_stages,
            config.schedule,
            config.microbatches,
            recompute=config.recompute,
            extra_in_flight=config.extra_in_flight,
            vertical_sync=config.vertical_sync,
        )
    try:
        text = Path(config.file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise jpipe.InputError(f"plan.file: cannot read '{config.file}': {error.strerror}; give a plan's JSON file, or null") from None
    except UnicodeDecodeError:
        raise jpipe.InputError(f"plan.file: expected a plan as JSON in '{config.file}', found text that is not UTF-8") from None
    return jpipe.Plan.from_json(text, where=config.file)


@contextlib.contextmanager
def plan_file_named(file: str | None) -> Iterator[None]:
    """Errors about the plan inside name the file that it comes from, if any."""
    try:
        yield
    except jpipe.InputError as error:
        if file is None or not str(error).startswith("plan: "):
            raise
        raise jpipe.InputError(str(error).replace("plan: ", f"{file}: ", 1)) from None


def check_microbatches(plan: jpipe.Plan, batch_size: int) -> None:
    """Refuse a plan (from a file, say) whose microbatches do not divide the batch, or are too many to be meant."""
    if batch_size % plan.microbatches:
        raise jpipe.InputError(
            f"plan: expected microbatches that divide train.batch_size {batch_size}, found {plan.microbatches}; change one of them"
        )
    if plan.microbatches > MOST_MICROBATCHES:
        raise jpipe.InputError(f"plan: expected at most {MOST_MICROBATCHES} microbatches, found {plan.microbatches}; use fewer")


def devices_that_start(pipe: jpipe.Pipeline) -> tuple[jax.Device, ...]:
    """The device of each stage.

    Raises:
        jpipe.InputError: JAX finds no devices of the kind it was told to use, or the plan's placement names one that is not there.
    """
    try:
        return pipe.devices
    except RuntimeError as error:
        raise jpipe.InputError(f"JAX has no devices to use: {str(error).splitlines()[0]}; see its variable JAX_PLATFORMS") from None


def check_memory(config: Config, plan: jpipe.Plan, devices: Sequence[jax.Device]) -> None:
    """Refuse a model that cannot fit in all the memory there is. One that is not refused may be too large all the same."""
    need = gpt.least_bytes(config.model, config.train.batch_size // plan.microbatches)
    have = memory_of(devices)
    if need > have:
        raise jpipe.InputError(
            f"model: expected one that fits in {have / 1e9:,.0f} GB, all the memory of the devices, found one that needs more than "
            f"{need / 1e9:,.0f} GB (weights, their gradients and one block's attention); lower model.width, depth or seq_len"
        )


def memory_of(devices: Sequence[Any]) -> float:
    """Bytes of memory of these devices together; infinite where that is not known."""
    if devices[0].platform == "cpu":
        try:
            return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        except (AttributeError, ValueError, OSError):  # not on every system
            return math.inf
    return float(sum((device.memory_stats() or {}).get("bytes_limit", math.inf) for device in set(devices)))


def devices_of(plan: jpipe.Plan) -> int:
    """How many local devices the plan asks for, within reason."""
    wanted = plan.depth if plan.placement is None else 1 + max(number for stage in plan.placement for number in stage)
    return min(wanted, 256)  # far more would take minutes and gigabytes; what is missing then, the pipeline tells


def force_cpu_devices(count: int) -> None:
    """Where CPUs are the devices, make at least `count`. It changes nothing on a GPU, nor where JAX runs already."""
    if jax.config.values["jax_num_cpu_devices"] < count:
        with contextlib.suppress(RuntimeError):  # JAX runs already (a notebook, a test): stages share what devices there are
            jax.config.update("jax_num_cpu_devices", count)
