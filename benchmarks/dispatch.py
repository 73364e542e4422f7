"""Measure the overhead of the runtime: microbatches through four stages that compute almost nothing, beside one jitted call.

`python -m benchmarks dispatch` measures it on CPU devices or on the GPUs that are there, `python -m benchmarks.dispatch` in this process.
"""

import argparse
import json
import pathlib
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
CALL = "dispatch: µs of one call of a jitted function, a product of 4 × 4 numbers"


def measure(steps: int = STEPS) -> list[dict[str, Any]]:
    """Measure microseconds per microbatch and per instruction for each schedule, and of one jitted call.

    Args:
        steps: batches of a measurement.
    """
    rows: list[dict[str, Any]] = [{"figure": CALL, "measured": _call_time(steps) * 1e6}]
    for name, plan in plans().items():
        micros = _microbatch_time(plan, steps) * 1e6
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


def _call_time(steps: int) -> float:
    product, x = jax.jit(jnp.matmul), jnp.full((4, 4), 0.25)
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        for _ in range(steps * MICROBATCHES):
            x = product(x, x)
        jax.block_until_ready(x)
        times.append((time.perf_counter() - start) / steps / MICROBATCHES)
    return statistics.median(times[1:])


def _microbatch_time(plan: Plan, steps: int) -> float:
    pipe = Pipeline(_stack(), plan, lambda y, labels: (((y - labels) ** 2).sum(), y.size), optax.sgd(1e-6))
    rows = np.ones((2 * MICROBATCHES, 4), np.float32)
    state = pipe.init(jax.random.key(0), (rows, rows))
    times = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        for _ in range(steps):
            state, _ = pipe.step(state, (rows, rows))
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) / steps / MICROBATCHES)
    return statistics.median(times[1:])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS, help="batches of a measurement (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, help="the file for the figures (default: none)")
    options = parser.parse_args()
    rows = measure(options.steps)
    for row in rows:
        print(f"{row['figure']:<90} {row['measured']:>10.1f}")
    if options.json:
        options.json.write_text(json.dumps({"figures": {row["figure"]: row["measured"] for row in rows}}, indent=2) + "\n")


if __name__ == "__main__":
    main()
