"""Checkpoints of format 1, which has an Orbax item for each process, are still read.

`tests/written_in_format_1/` holds the one of two processes after 4 batches of `pipeline` below, and the losses of the batches after it.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe
from jpipe import checkpoints

WRITTEN = Path(__file__).parent / "written_in_format_1"
X = np.arange(8, dtype=np.float32).reshape(4, 2) / 8
BATCH, KEY = (X, X.sum(axis=1, keepdims=True)), 3


def pipeline(schedule: str = "pipedream_2bw") -> jpipe.Pipeline:
    stack = jpipe.LayerStack(
        {"in.0": lambda rngs: nnx.Linear(2, 3, rngs=rngs), "act": jnp.tanh, "out": lambda rngs: nnx.Linear(3, 1, rngs=rngs)}
    )
    plan = jpipe.Plan.even(stack.ids, num_stages=2, schedule=schedule, microbatches=2)
    return jpipe.Pipeline(stack, plan, lambda y, labels: (((y - labels) ** 2).sum(), labels.size), optax.sgd(0.1, momentum=0.9))


def continued(pipe: jpipe.Pipeline, state: object) -> list[float]:
    """Return the losses of batches 4 and 5."""
    losses: dict = {}
    for _ in range(4):
        state, metrics = pipe.step(state, BATCH)
        losses |= metrics.losses
    return [float(losses[t]) for t in (4, 5)]


def test_a_checkpoint_written_by_two_processes_is_read():
    assert checkpoints.steps(WRITTEN) == [4]
    pipe = pipeline()
    state = checkpoints.load(pipe, WRITTEN, jax.random.key(KEY), BATCH)
    losses = json.loads((WRITTEN / "losses.json").read_text())
    np.testing.assert_allclose(continued(pipe, state), losses, rtol=1e-6)  # XLA may be told to optimize more or less
