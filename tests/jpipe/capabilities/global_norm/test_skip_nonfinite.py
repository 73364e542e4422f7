"""A batch with a gradient that is not finite changes no weights and no optimizer state at any stage."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import InputError, Pipeline, Plan
from tests.jpipe import models
from tests.jpipe.running import REFERENCE_BATCHES, check_against_reference, check_equal, fresh

STACK = models.rich_stack()
BAD = {2: np.nan, 5: np.inf}  # by batch


def batches_of(plan: Plan, bad=BAD):
    """Return batches with a NaN or infinite label in some, so that losses and gradients are not finite but layer state is."""
    batches = models.masked_batches(REFERENCE_BATCHES, plan.microbatches)
    for t, value in bad.items():
        inputs, labels = jax.tree.map(np.array, batches[t])
        leaf = next(leaf for leaf in jax.tree.leaves(labels) if leaf.dtype.kind == "f")
        leaf[-1] = value
        batches[t] = inputs, labels
    return batches


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(
    ("replicas", "fields"),
    [
        ((1, 1), {"schedule": "gpipe", "microbatches": 3}),
        ((1, 1, 1), {"schedule": "pipedream_2bw", "microbatches": 3}),
        ((2, 1), {"schedule": "pipedream_2bw", "microbatches": 4}),
        ((1, 1, 1), {"schedule": "pipedream", "vertical_sync": True, "microbatches": 1}),
        ((1, 1), {"schedule": "naive", "microbatches": 2}),
        ((2,), {"schedule": "pipedream_flush", "microbatches": 2}),
    ],
    ids=lambda value: value["schedule"] if isinstance(value, dict) else "-".join(map(str, value)),
)
@pytest.mark.parametrize("clip", [None, 3.0])
def test_equals_the_sequential_reference_bit_for_bit(replicas, fields, clip):
    plan = Plan.even(STACK.ids, len(replicas), replicas=replicas, **fields)
    check_against_reference(STACK, plan, {3}, batches_of(plan), clip_global_norm=clip, skip_nonfinite=True)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [pytest.param("pipedream_flush", marks=pytest.mark.exhaustive), "pipedream_2bw"])
def test_a_bad_batch_leaves_weights_and_optimizer_as_they_are_at_all_stages(schedule):
    plan = Plan.even(STACK.ids, 3, schedule, 3)
    pipe = Pipeline(STACK, plan, models.masked_squares, models.momentum(), skip_nonfinite=True)
    batches, nonfinite, states = batches_of(plan, {2: np.nan}), {}, {}
    state = fresh(pipe, batches)
    for t, batch in enumerate(batches[:5]):
        state, metrics = pipe.step(state, batch)
        nonfinite |= metrics.nonfinite
        state, metrics = pipe.drain(state, with_metrics=True)
        nonfinite |= metrics.nonfinite
        states[t] = jax.tree.map(np.asarray, (pipe.params(state), [worker.optimizer for worker in state.workers]))
    assert [t for t, count in nonfinite.items() if count > 0] == [2]
    assert sorted(nonfinite) == list(range(5))
    check_equal(states[2], states[1])
    for before, after in itertools.pairwise(t for t in states if t != 2):
        assert any(np.any(a != b) for a, b in zip(*(jax.tree.leaves(states[t][0]) for t in (before, after)), strict=True))


def test_without_skipping_the_weights_become_nan():
    plan = Plan.even(STACK.ids, 2, "pipedream_2bw", 2)
    pipe = Pipeline(STACK, plan, models.masked_squares, optax.sgd(0.1))
    batches = batches_of(plan, {0: np.nan})
    state = fresh(pipe, batches)
    for batch in batches[:3]:
        state, metrics = pipe.step(state, batch)
    assert not metrics.norms
    assert not metrics.nonfinite
    assert all(bool(jnp.isnan(leaf).any()) for leaf in jax.tree.leaves(pipe.params(pipe.drain(state)))[:1])


def test_large_finite_gradients_are_no_reason_to_skip():
    """The gradients are finite, but their squares overflow, so that the norm is infinite."""
    plan = Plan.even(STACK.ids, 2, "gpipe", 2)
    pipe = Pipeline(STACK, plan, lambda y, labels: (1e25 * y.sum(), jnp.float32(1)), optax.sgd(1e-30), skip_nonfinite=True)
    batches = models.masked_batches(1, 2)
    _, metrics = pipe.step(fresh(pipe, batches), batches[0])
    assert np.isinf(metrics.norms[0])
    assert metrics.nonfinite[0] == 0


def test_a_state_of_a_pipeline_without_the_norm_is_refused():
    plan = Plan.even(STACK.ids, 2, "pipedream_2bw", 2)
    batches = models.masked_batches(2, 2)
    plain, skipping = (Pipeline(STACK, plan, models.masked_squares, optax.sgd(0.1), skip_nonfinite=skip) for skip in (False, True))
    state = fresh(plain, batches)
    fresh(skipping, batches)
    with pytest.raises(InputError, match="global norm is absent there and used here"):
        skipping.step(state, batches[0])
