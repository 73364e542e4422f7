"""Norms of the delay correction, and of the distance of the newest weight versions, against the weights of the state."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe import InputError
from tests.jpipe import models, running
from tests.jpipe.weights.test_delay_correction import pipeline, plan_of


def norm(trees) -> float:
    squares = [np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(trees)]
    return float(np.sqrt(sum(squares)))


def first_replicas(pipe, state):
    return [state.workers[workers[0]] for workers in pipe.plan.stage_workers]


def distance(pipe, state) -> float:
    """Return the distance of the two newest versions, over the stages that hold two; NaN if none does."""
    pairs = [[worker.weights.read(number) for number in worker.weights.versions[-2:]] for worker in first_replicas(pipe, state)]
    differences = [jax.tree.map(jnp.subtract, *pair) for pair in pairs if len(pair) == 2]
    return norm(differences) if differences else math.nan


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("name", ["2BW", "pipedream, m = d", "2-1", "flush"])
def test_the_norms_are_those_of_the_weights(name):
    pipe = pipeline(plan_of(name))
    batches = models.masked_batches(4, pipe.plan.microbatches)
    state = running.fresh(pipe, batches)
    assert [float(value) for value in pipe.delay_norms(state)] == pytest.approx([0, math.nan], nan_ok=True)
    for batch in batches:
        state, _ = pipe.step(state, batch)
        expected = distance(pipe, state)
        assert float(pipe.delay_norms(state).distance) == pytest.approx(expected, rel=1e-5, nan_ok=True)
    assert math.isnan(expected) == (name == "flush")
    state = pipe.drain(state)
    newest = {i: params for worker in first_replicas(pipe, state) for i, params in worker.weights.read(worker.weights.newest).items()}
    ahead = norm(jax.tree.map(jnp.subtract, newest, {i: pipe.params(state)[i] for i in newest}))
    norms = pipe.delay_norms(state)
    assert float(norms.correction) == pytest.approx(ahead, rel=1e-4)
    assert (ahead == 0) == (name == "flush")
    assert float(norms.distance) == pytest.approx(distance(pipe, state), rel=1e-5, nan_ok=True)  # 2BW keeps two versions
    plain = pipeline(plan_of(name), correction=None)
    assert float(plain.delay_norms(running.fresh(plain, batches)).correction) == 0


@pytest.mark.exhaustive
def test_the_norms_need_a_state_that_is_not_consumed_and_leave_it_as_it_is():
    pipe = pipeline(plan_of("2BW"))
    batches = models.masked_batches(1, pipe.plan.microbatches)
    state = running.fresh(pipe, batches)
    after, _ = pipe.step(state, batches[0])
    with pytest.raises(InputError, match="already consumed"):
        pipe.delay_norms(state)
    expected = pipe.params(after)
    pipe.delay_norms(after)
    jax.tree.map(np.testing.assert_array_equal, pipe.params(after), expected)
