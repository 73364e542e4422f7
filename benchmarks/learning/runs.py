"""Train a task under each schedule, and predict the time of a step."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

import jpipe
from benchmarks.learning.emulation import Emulation, merged
from benchmarks.learning.tasks import Task, accuracy

VARIANTS = ("plain", "2BW", "PipeDream", "PipeDream without stashing", "PipeDream, vertical sync")


@dataclass(frozen=True)
class Setting:
    """A task, and how it is trained.

    Attributes:
        task: "gpt" or "digits".
        stages: d.
        learning_rate: of all variants.
        steps: updates.
        every: updates between two evaluations.
    """

    task: str
    stages: int
    learning_rate: float
    steps: int
    every: int

    @property
    def name(self) -> str:
        """A label such as "digits, 4 stages, learning rate 0.02"."""
        return f"{self.task}, {self.stages} stages, learning rate {self.learning_rate:g}"


class Curve(NamedTuple):
    """The results of one run on the held-out data.

    Attributes:
        steps: updates made, for each evaluation.
        loss: mean loss.
        accuracy: share of labels that the model gets right.
    """

    steps: list[int]
    loss: list[float]
    accuracy: list[float]


def make_plan(variant: str, layers: tuple[str, ...], stages: int) -> jpipe.Plan:
    """Return a plan whose batches make one update each.

    For PipeDream a batch is one microbatch, as in its paper; for the other schedules it has as many microbatches as there are stages.
    """
    if variant in ("plain", "2BW"):
        return jpipe.Plan.even(layers, stages, "pipedream_flush" if variant == "plain" else "pipedream_2bw", stages)
    return jpipe.Plan.even(layers, stages, "pipedream", 1, vertical_sync="vertical" in variant)


def predict_step(plan: jpipe.Plan) -> float:
    """Predict the time of a step in steady state, if forward and backward of a whole batch take 1 at each stage, and links nothing.

    Without stashing the order of work is that of PipeDream, and so is the time.
    """
    unit = 1 / (3 * plan.microbatches)
    costs = [jpipe.programs.StageCost(forward=unit, backward=2 * unit)] * plan.depth
    return jpipe.programs.predict_window(plan, costs, first=20, batches=20).step_seconds


def train(setting: Setting, task: Task, variant: str, seeds: Iterable[int]) -> list[Curve]:
    """Train once per seed."""
    plan = make_plan(variant, task.stack.ids, setting.stages)
    pipe = jpipe.Pipeline(task.stack, plan, task.loss, task.optimizer(setting.learning_rate))
    emulation = Emulation(pipe, next(task.batches(0)), stashing=False) if "without" in variant else None
    score = _scorer(task)
    curves = []
    for seed in seeds:
        batches, key = itertools.islice(task.batches(seed), setting.steps), jax.random.key(seed)
        if emulation is None:
            weights = _run_pipeline(pipe, key, batches, setting.every)
        else:
            updates = itertools.islice(emulation.run(key, batches), setting.every - 1, None, setting.every)
            weights = ((updated.params, updated.state) for updated in updates)
        scores = [score(*jax.device_put(newest, jax.devices()[0])) for newest in weights]
        steps = [setting.every * (i + 1) for i in range(len(scores))]
        curves.append(Curve(steps, [float(loss) for loss, _ in scores], [float(share) for _, share in scores]))
    return curves


def _run_pipeline(pipe: jpipe.Pipeline, key: jax.Array, batches: Iterable[Any], every: int) -> Iterator[tuple[Any, Any]]:
    """Yield the newest (parameters, layer state) after each `every` updates.

    The pipeline is drained for them, which changes no number.
    """
    state = None
    for t, batch in enumerate(batches, start=1):
        state, _ = pipe.step(pipe.init(key, batch) if state is None else state, batch)
        if t % every == 0:
            state = pipe.drain(state)
            yield pipe.params(state), merged(worker.layer_state for worker in state.workers)


def _scorer(task: Task) -> Any:
    """Return a function from parameters and layer state to (loss, accuracy) on the held-out data."""
    inputs, labels = jax.device_put(task.held_out)

    @jax.jit
    def score(params: Any, state: Any) -> tuple[jax.Array, jax.Array]:
        outputs, _ = task.stack.apply(task.stack.ids, params, state, inputs, key=None, microbatch=None, train=False)
        total, weight = task.loss(outputs, labels)
        return total / weight, accuracy(outputs, labels)

    return score
