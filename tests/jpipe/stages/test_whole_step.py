"""The programs of stages with their calls in a step, and the whole train step as one program, which tools compare."""

import chex
import jax
import numpy as np
import pytest

from jpipe import Pipeline, Plan
from tests.jpipe import models
from tests.jpipe.running import KEY, fresh, layer_state

MICROBATCHES = 4


@pytest.mark.parametrize("stack", [models.plain_stack, models.rich_stack])
def test_the_whole_step_computes_a_step_of_the_pipeline(stack):
    stack, device = stack(), jax.devices()[0]
    plan = Plan.even(stack.ids, 1, "gpipe", MICROBATCHES)
    pipe = Pipeline(stack, plan, models.masked_squares, models.momentum(), [device])
    (batch,) = models.masked_batches(1, MICROBATCHES)
    state = fresh(pipe, [batch])
    x, labels = jax.tree.map(lambda rows: rows.reshape(MICROBATCHES, -1, *rows.shape[1:]), batch)
    params, worker = models.copied(pipe.params(state)), state.workers[0]
    layers, optimizer = models.copied(layer_state(state)), models.copied(worker.optimizer)
    is_random = stack.is_stochastic(stack.ids, train=True)
    numbers, key = (np.arange(MICROBATCHES, dtype=np.uint32), jax.random.key(KEY)) if is_random else (None, None)
    step = pipe.lower_whole_step(batch, device).compile()
    params, layers, _, (loss, _) = step(params, layers, optimizer, (x, labels, numbers), key, None, [{}])
    state, metrics = pipe.step(state, batch)
    chex.assert_trees_all_close(params, pipe.params(state), rtol=1e-5)
    chex.assert_trees_all_close(layers, layer_state(state), rtol=1e-5)
    assert float(loss) == pytest.approx(float(metrics.losses[0]))


@pytest.mark.parametrize(
    ("fields", "first", "last"),
    [
        ({"schedule": "gpipe"}, {"forward": 4, "backward": 4, "in_place": 1}, {"forward": 4, "backward": 4, "in_place": 1}),
        (
            {"schedule": "pipedream_2bw"},
            {"forward": 4, "backward": 4, "into_retired": 1},
            {"forward_backward": 4, "into_retired": 1},
        ),
        (
            {"schedule": "pipedream", "update_every": "replicas"},
            {"forward": 4, "backward": 4, "into_retired": 4},
            {"forward_backward": 4, "in_place": 4},
        ),
        (
            {"schedule": "pipedream_flush", "replicas": 2},
            {"forward": 4, "backward": 4, "add": 2, "finish": 2, "zero_accumulators": 2, "in_place": 2},
            {"forward_backward": 4, "add": 2, "finish": 2, "zero_accumulators": 2, "mean_loss": 2, "in_place": 2},
        ),
    ],
)
def test_programs_come_with_their_calls_in_a_step(fields, first, last):
    stack = models.plain_stack()
    plan = Plan.even(stack.ids, 2, microbatches=MICROBATCHES, **fields)
    pipe = Pipeline(stack, plan, models.masked_squares, models.momentum())
    (batch,) = models.masked_batches(1, MICROBATCHES)
    stages = pipe.compiled_calls(batch, jax.devices()[0])
    assert [{name: calls for name, (_, calls) in stage.items()} for stage in stages] == [first, last]
    assert all(f"HloModule jit_{name}" in program.as_text() for stage in stages for name, (program, _) in stage.items())
