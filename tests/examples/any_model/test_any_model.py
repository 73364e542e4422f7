"""Whole models cut by `LayerStack.from_model` train in a pipeline as they do without one."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from examples.any_model import table
from jpipe import Pipeline, Plan
from tests.examples.any_model import wholes
from tests.jpipe import models, running

UPDATES = 10
PLANS = ("pipedream_flush", 4), ("pipedream_2bw", 2), ("pipedream_flush", 2), ("pipedream_2bw", 4)
CASES = [(name, *plan) for name, plan in itertools.product(wholes.DEPTH, PLANS)]
"""Model, schedule and stages. Only `make test-all` has them: two
stages compile in five to ten seconds, four in ten to twenty. The skip connections of the U-Net pass through all stages."""


@pytest.fixture(autouse=True)
def lenient():
    """Mix ranks and dtypes, as users' code may."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def adam() -> optax.GradientTransformation:
    return optax.adam(0.01)


@functools.cache
def model(name: str, dtype: Any) -> wholes.Whole:
    return wholes.whole(name, dtype)


def trained(name: str, dtype: Any, schedule: str, stages: int) -> tuple[Pipeline, Any, list[float]]:
    """Train a model; return the pipeline, its state, and the losses."""
    whole, batches = model(name, dtype), wholes.batches(name, UPDATES, dtype)
    plan = Plan.even(whole.stack.ids, stages, schedule, wholes.MICROBATCHES)
    pipe = Pipeline(whole.stack, plan, wholes.module(name).loss, adam())
    state, losses = pipe.init(jax.random.key(wholes.KEY), batches[0]), []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        losses += metrics.losses.values()
    state, metrics = pipe.drain(state, with_metrics=True)
    return pipe, state, [float(loss) for loss in (*losses, *metrics.losses.values())]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "schedule", "stages"), CASES)
def test_training_equals_that_of_the_whole_model(name, schedule, stages):
    """The losses of ten updates, the weights after them, and an evaluation."""
    with jax.enable_x64(True):
        pipe, state, losses = trained(name, np.float64, schedule, stages)
        whole = model(name, np.float64)
        expected = wholes.train(name, whole, adam(), schedule == "pipedream_2bw", UPDATES)
        np.testing.assert_allclose(losses, expected.losses, rtol=1e-10)
        running.check_close(whole.params_of(pipe.model(state)), expected.params, 1e-10)
        batch = wholes.batches(name, UPDATES + 1, np.float64)[-1]
        evaluated = wholes.evaluate(name, whole, expected.params, expected.state, batch)
        np.testing.assert_allclose(float(pipe.evaluate(state, batch).loss), evaluated, rtol=1e-10)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "schedule", "stages"), CASES)
def test_float32_equals_the_layers_in_sequence_bit_for_bit(name, schedule, stages):
    """One microbatch after another, by the rule of the schedule; with and without a drain in the middle."""
    stack, batches = model(name, np.float32).stack, wholes.batches(name, running.REFERENCE_BATCHES, np.float32)
    plan = Plan.even(stack.ids, stages, schedule, wholes.MICROBATCHES)
    running.check_against_reference(stack, plan, {4}, batches, models.momentum(), wholes.module(name).loss)


@pytest.mark.parametrize("name", ["unet", "scanned"])
def test_a_row_of_the_table(name):
    row = table.row_of(name)
    assert row["lines changed"] == 0
    assert row["layers"] >= 4
    assert row["equations"] > row["layers"]
    example = wholes.module(name)
    assert "jpipe" not in vars(example)
