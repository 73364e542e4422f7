"""Measure what training recipes cost in a pipeline: time of global-norm clipping and skipped batches, memory of bfloat16 weights."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import optax

from benchmarks import gpt
from benchmarks.sizes import Sizes
from jpipe import LayerStack, Link, Pipeline, Plan, Precision, keep_freed_memory, lower, simulate
from jpipe.programs import StageCost
from jpipe.runtime import Event

SIZES, STAGES = Sizes(layers=4, width=128, heads=4, sequence=128, rows=8), 4  # those of `make train`
MICROBATCHES, WARM_UP = 4, 8
SCHEDULES: dict[str, dict[str, Any]] = {
    "2BW": {"schedule": "pipedream_2bw"},
    "vertical sync": {"schedule": "pipedream", "vertical_sync": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "without": {},
    "without, again": {},  # in another pipeline: how far equal ones differ
    "clip_global_norm": {"clip_global_norm": 1.0},
    "skip_nonfinite": {"skip_nonfinite": True},
}
DEPTHS, BATCHES = (2, 4, 8, 16), 6


@dataclass(frozen=True)
class Model:
    """A model to train.

    Attributes:
        stack: the model.
        loss: its loss, as `Pipeline` takes it.
        optimizer: its optimizer.
        data: `(microbatches) -> (inputs, labels)`.
    """

    stack: LayerStack
    loss: Callable[..., Any]
    optimizer: optax.GradientTransformation
    data: Callable[[int], Any]


def byte_gpt() -> Model:
    """Return a GPT of the size of that of `make train`."""
    return Model(gpt.stack(SIZES), gpt.summed_loss, gpt.optimizer(), partial(gpt.data, SIZES))


def measure(
    make: Callable[[], Model] = byte_gpt,
    stages: int = STAGES,
    rounds: int = 24,
    steps: int = 2,
    schedules: Sequence[str] = tuple(SCHEDULES),
    depths: Sequence[int] = DEPTHS,
) -> list[dict[str, Any]]:
    """Measure ratios of step times and of the bytes of weight versions, and count computations that the norm delays.

    Args:
        make: makes the model.
        stages: stages of the pipelines that run.
        rounds: how often each option is timed beside none.
        steps: steps that are timed together.
        schedules: names of those whose step time is measured.
        depths: numbers of stages of the pipelines that are simulated.
    """
    keep_freed_memory()  # as in `jpipe train`
    model = make()
    rows = [row for name in schedules for row in _step_times(name, model, stages, rounds, steps)]
    return rows + _stash(model, stages) + [_delayed(name, depths) for name in SCHEDULES]


# Step time ---------------------------------------------------------------------------------------------------------------


def _step_times(name: str, model: Model, stages: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """Compare each option with none: the median of the ratios of neighbouring measurements."""
    plan = Plan.even(model.stack.ids, stages, microbatches=MICROBATCHES, **SCHEDULES[name])
    runs = {option: _Run(model, plan, used) for option, used in OPTIONS.items()}
    plain, *recipes = runs
    times: dict[str, list[float]] = {option: [] for option in runs}
    ratios: dict[str, list[float]] = {option: [] for option in recipes}
    for n in range(rounds):
        for option in recipes:
            pair = {each: runs[each].seconds(steps) for each in ((plain, option), (option, plain))[n % 2]}
            ratios[option].append(pair[option] / pair[plain])
            for each, seconds in pair.items():
                times[each].append(seconds)
    label = f"{name}, {stages} stages"
    rows = [{"figure": f"{label}: s per step", "measured": statistics.median(times[plain])}]
    for option in recipes:
        goal = "<= 1.01" if OPTIONS[option] else "1"
        rows.append({"figure": f"{label}: step time, {option} / without", "measured": statistics.median(ratios[option]), "goal": goal})
    return rows


class _Run:
    """A warmed-up pipeline that never empties."""

    def __init__(self, model: Model, plan: Plan, options: dict[str, Any]) -> None:
        self._pipe = Pipeline(model.stack, plan, model.loss, model.optimizer, **options)
        self._batch = model.data(plan.microbatches)
        self._state = self._pipe.init(jax.random.key(0), self._batch)
        self.seconds(WARM_UP)

    def seconds(self, steps: int) -> float:
        """Measure seconds per step, from idle devices to idle devices."""
        start = time.perf_counter()
        for _ in range(steps):
            self._state, _ = self._pipe.step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return (time.perf_counter() - start) / steps


# The stash ---------------------------------------------------------------------------------------------------------------


def _stash(model: Model, stages: int) -> list[dict[str, Any]]:
    """Compare PipeDream with an update after each microbatch in float32 and in bfloat16 with float32 masters."""
    plain, masters = (_peak_weight_bytes(model, stages, precision) for precision in (Precision(), Precision(params="bfloat16")))
    label = f"PipeDream, {stages} stages, m = 1"
    return [
        {"figure": f"{label}: weight versions, bfloat16 / float32", "measured": masters[0] / plain[0], "goal": "0.5"},
        {"figure": f"{label}: and optimizer state with masters", "measured": masters[1] / plain[1]},
        {"figure": f"{label}: weight versions in float32, MB", "measured": plain[0] / 1e6},
    ]


def _peak_weight_bytes(model: Model, stages: int, precision: Precision) -> tuple[int, int]:
    """Return the bytes of all workers at their maximum: of weight versions, and of these with the optimizer state."""
    plan, batch = Plan.even(model.stack.ids, stages, "pipedream", 1), model.data(1)
    pipe = Pipeline(model.stack, plan, model.loss, model.optimizer, precision=precision)
    versions, both = [0] * stages, [0] * stages

    def observe(event: Event) -> None:
        worker, state = event.instruction.worker, event.state
        alive = _alive_bytes(state.weights)
        versions[worker] = max(versions[worker], alive)
        both[worker] = max(both[worker], alive + _alive_bytes(state.optimizer))

    state = pipe.init(jax.random.key(0), batch)
    for _ in range(WARM_UP):
        state, _ = pipe.step(state, batch, observe=observe)
    jax.block_until_ready(state)
    return sum(versions), sum(both)


def _alive_bytes(tree: Any) -> int:
    """Count the bytes of the arrays in a tree that are not deleted; an array shared by versions counts once."""
    arrays = {id(leaf): leaf for leaf in jax.tree.leaves(tree)}.values()
    return sum(array.nbytes for array in arrays if not array.is_deleted())


# Waits -------------------------------------------------------------------------------------------------------------------


def _delayed(name: str, depths: Sequence[int]) -> dict[str, Any]:
    """Count computations that start at another time with the norm than without it, in simulations of unequal stages and slow links."""
    delayed = total = 0
    for depth in depths:
        costs = [StageCost(forward=1 + 0.1 * s, backward=2 + 0.3 * (-s % 3), outputs=1, gradient=1) for s in range(depth)]
        for m in (depth, depth + 1, 2 * depth, 4 * depth):
            plan = Plan.even([str(s) for s in range(depth)], depth, microbatches=m, **SCHEDULES[name])
            plain, clipped = (
                [
                    (span.op, span.microbatch, span.version, span.start)
                    for spans in simulate(lower(plan, BATCHES, global_norm=norm), costs, Link(bandwidth=4.0, latency=0.25)).timeline
                    for span in spans
                ]
                for norm in (False, True)
            )
            total += len(plain)
            delayed += sum(one != other for one, other in zip(plain, clipped, strict=True))
    figure = f"{name}, {depths[0]} to {depths[-1]} stages: computations that the norm delays (of {total:,})"
    return {"figure": figure, "measured": delayed, "goal": "0"}
