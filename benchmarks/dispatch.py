"""Measure the overhead of the runtime: microbatches through four stages that compute almost nothing."""

import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jpipe import Layer, LayerStack, Pipeline, Plan, lower
from jpipe.schedules import SCHEDULES

STAGES, MICROBATCHES, STEPS, REPEATS = 4, 8, 50, 9


def measure() -> list[dict[str, Any]]:
    """Measure microseconds per microbatch and per instruction for each schedule."""
    rows = []
    for name, plan in plans().items():
        micros = _microbatch_time(plan) * 1e6
        instructions = len(lower(plan, 40).instructions) / 40 / MICROBATCHES
        rows.append({"figure": f"dispatch, {name}: µs per microbatch, {STAGES} stages", "measured": micros, "goal": "<= 500"})
        rows.append(
            {
                "figure": f"dispatch, {name}: µs per instruction ({instructions:.1f} per microbatch)",
                "measured": micros / instructions,
                "goal": "<= 30",
            }
        )
    return rows


def plans() -> dict[str, Plan]:
    """Return a plan of each schedule that computes its own order."""
    names = [name for name, rules in SCHEDULES.items() if "order" not in rules.options]
    return {name: Plan.even(_stack().ids, STAGES, name, MICROBATCHES) for name in names}


def _stack() -> LayerStack:
    layer = Layer(lambda key, x: ({"w": jnp.ones((4, 4))}, {}), lambda params, state, x, key, train: (x @ params["w"], state))
    return LayerStack({f"layer{i}": layer for i in range(STAGES)})


def _microbatch_time(plan: Plan) -> float:
    pipe = Pipeline(_stack(), plan, lambda y, labels: (((y - labels) ** 2).sum(), y.size), optax.sgd(1e-6))
    rows = np.ones((2 * MICROBATCHES, 4), np.float32)
    state = pipe.init(jax.random.key(0), (rows, rows))
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        for _ in range(STEPS):
            state, _ = pipe.step(state, (rows, rows))
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / STEPS / MICROBATCHES)
    return statistics.median(times[1:])
