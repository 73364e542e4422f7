"""Whole models cut by `LayerStack.from_model` train in a pipeline as they do without one."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jpipe import Pipeline, Plan
from tests.examples.any_model import wholes
from tests.jpipe import running

UPDATES = 10

# Flax and the models mix ranks, as their users' code may.
pytestmark = pytest.mark.usefixtures("lenient")


@pytest.fixture
def lenient():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def adam() -> optax.GradientTransformation:
    return optax.adam(0.01)


@functools.cache
def model(name: str, dtype: Any) -> wholes.Whole:
    return wholes.whole(name, dtype)


def plan_of(name: str, dtype: Any, schedule: str, stages: int) -> Plan:
    return Plan.even(model(name, dtype).stack.ids, stages, schedule, wholes.MICROBATCHES)


@pytest.mark.thinned
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("schedule", ["pipedream_flush", "pipedream_2bw"])
@pytest.mark.parametrize("name", wholes.DEPTH)
def test_training_equals_that_of_the_whole_model(name, schedule, stages):
    with jax.enable_x64(True):
        whole = model(name, np.float64)
        batches = wholes.batches(name, UPDATES + 1, np.float64)
        pipe = Pipeline(whole.stack, plan_of(name, np.float64, schedule, stages), wholes.module(name).loss, adam())
        state, losses = pipe.init(jax.random.key(wholes.KEY), batches[0]), []
        for batch in batches[:UPDATES]:
            state, metrics = pipe.step(state, batch)
            losses += metrics.losses.values()
        state, metrics = pipe.drain(state, with_metrics=True)
        losses += metrics.losses.values()
        expected = wholes.train(name, whole, adam(), schedule == "pipedream_2bw", UPDATES)
        np.testing.assert_allclose(np.asarray(losses), expected.losses, rtol=1e-10)
        running.check_close(whole.params_of(pipe.model(state)), expected.params, 1e-10)
        evaluated = wholes.evaluate(name, whole, expected.params, expected.state, batches[-1])
        np.testing.assert_allclose(float(pipe.evaluate(state, batches[-1]).loss), evaluated, rtol=1e-10)
