"""The moving average of the weights equals that of a plain run, in every schedule, in flight, restored, and under another cut."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe import InputError, Pipeline, Plan
from jpipe.model import LayerwiseOptimizer
from tests.jpipe import models, running

DECAY = 0.75
STACK = models.plain_stack()
PLANS = {
    "2BW": {"schedule": "pipedream_2bw", "num_stages": 2, "microbatches": 2},
    "pipedream": {"schedule": "pipedream", "num_stages": 3, "microbatches": 1},
    "flush": {"schedule": "pipedream_flush", "num_stages": 2, "microbatches": 2},
    "2-1": {"schedule": "pipedream", "num_stages": 2, "microbatches": 2, "replicas": [2, 1]},
}


def pipeline(name):
    plan = Plan.even(STACK.ids, **PLANS[name])
    devices = [jax.devices()[s] for s, _ in plan.workers]  # replicas share what is compiled
    return Pipeline(STACK, plan, models.masked_squares, models.momentum(), devices, ema_decay=DECAY)


def plain_averages(pipe, batches):
    """Compute the averages before and after each batch, from the weights of a run that is drained after each batch."""
    state = running.fresh(pipe, batches)
    averages = [jax.tree.map(np.asarray, pipe.params(state))]
    for batch in batches:
        state, _ = pipe.step(state, batch)
        state = pipe.drain(state)
        new = jax.tree.map(np.asarray, pipe.params(state))
        averages.append(jax.tree.map(lambda mean, leaf: DECAY * mean + (1 - DECAY) * leaf, averages[-1], new))
    return averages


def loss_of(params, batch):
    """Return the loss of the whole model."""
    y, _ = STACK.apply(STACK.ids, params, {i: {} for i in STACK.ids}, batch[0], key=None, microbatch=None, train=False)
    total, weight = models.masked_squares(y, batch[1])
    return total / weight


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("name", PLANS)
def test_the_average_equals_that_of_a_plain_run_and_survives_a_restore(name):
    pipe = pipeline(name)
    batches = models.masked_batches(5, pipe.plan.microbatches, dtype=np.float64)
    averages = plain_averages(pipe, batches)
    state, cut = running.fresh(pipe, batches), None
    running.check_equal(pipe.params(state, weights="ema"), pipe.params(state))  # it begins at the weights, in memory of its own
    for t, batch in enumerate(batches):
        if t == 2:
            cut = pipe.snapshot(3)
        state, _ = pipe.step(state, batch, observe=cut)
        if t in (1, 3):  # in flight, if the schedule is asynchronous
            running.check_close(pipe.params(state, weights="ema"), averages[t + 1])
            evaluation = pipe.evaluate(state, batches[0], weights="ema")
            assert evaluation.version == t + 1
            np.testing.assert_allclose(float(evaluation.loss), loss_of(averages[t + 1], batches[0]), rtol=1e-12)
    state = pipe.drain(state)
    running.check_close(pipe.params(state, weights="ema"), averages[-1])
    assert float(pipe.evaluate(state, batches[0]).loss) != float(pipe.evaluate(state, batches[0], weights="ema").loss)
    restored = pipe.restore(jax.random.key(running.KEY), batches[0], cut.layers(), 3)
    for batch in batches[3:]:
        restored, _ = pipe.step(restored, batch)
    running.check_equal(pipe.params(restored, weights="ema"), pipe.params(state, weights="ema"))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_another_cut_restores_the_average_and_fresh_optimizer_state_resets_it():
    first, second = pipeline("2BW"), pipeline("pipedream")
    batches = models.masked_batches(4, 2, dtype=np.float64)
    averages = plain_averages(first, batches)
    state, cut = running.fresh(first, batches), first.snapshot(4)
    for batch in batches:
        state, _ = first.step(state, batch, observe=cut)
    first.drain(state, observe=cut)
    key, small = jax.random.key(running.KEY), models.masked_batches(1, 1, dtype=np.float64)[0]
    running.check_close(second.params(second.restore(key, small, cut.layers(), 4), weights="ema"), averages[-1])
    anew = second.restore(key, small, cut.layers(), 4, fresh_optimizer=True)
    running.check_equal(second.params(anew, weights="ema"), second.params(anew))
    anew, _ = second.step(anew, small)  # the weights and their average are in memory of their own
    with pytest.raises(
        InputError, match=r"checkpoint: layer 'layer0', optimizer state: .* is it of another optimizer or precision\? .With ema_decay"
    ):
        Pipeline(STACK, second.plan, models.masked_squares, models.momentum()).check_layers(small, cut.layers(), 4)


def test_a_skipped_batch_leaves_the_average_unchanged():
    plan = Plan.even(STACK.ids, **PLANS["2BW"])
    pipe = Pipeline(STACK, plan, models.masked_squares, models.momentum(), ema_decay=DECAY, skip_nonfinite=True)
    batches = models.masked_batches(3, plan.microbatches)
    state = running.fresh(pipe, batches)
    for batch in batches:
        state, _ = pipe.step(state, batch)
    before = jax.tree.map(np.asarray, pipe.params(state, weights="ema"))
    state, _ = pipe.step(state, (np.full_like(batches[0][0], np.nan), batches[0][1]))
    running.check_equal(pipe.params(state, weights="ema"), before)


def test_an_average_starts_with_the_given_weights():
    pipe = pipeline("flush")
    batch = models.masked_batches(1, 2)[0]
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.5, leaf.dtype), pipe.params(running.fresh(pipe, [batch])))
    running.check_equal(pipe.params(pipe.init(jax.random.key(0), batch, params), weights="ema"), params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_average_is_stored_in_float32(dtype):
    """In bfloat16, steps of a thousandth of the weights would be lost."""
    rule = LayerwiseOptimizer(optax.sgd(0.5), ema_decay=0.999)
    params = {"w": jnp.ones(3, dtype)}
    state = rule.init("a", params)
    new, state = rule.update("a", {"w": jnp.ones(3, dtype)}, state, params)
    np.testing.assert_allclose(new["w"].astype(np.float32), 0.5)
    assert state.weights_ema["w"].dtype == jnp.float32
    np.testing.assert_allclose(state.weights_ema["w"], 0.999 + 0.001 * 0.5, rtol=1e-6)
    assert rule.average(state)["w"].dtype == jnp.float32


@pytest.mark.parametrize("decay", [-0.1, 1.0, 1, float("nan"), False])
def test_an_invalid_decay_is_refused(decay):
    plan = Plan.even(STACK.ids, **PLANS["flush"])
    with pytest.raises(InputError, match=rf"ema_decay: expected a number of at least 0 and below 1, such as 0.999, found {decay!r}"):
        Pipeline(STACK, plan, models.masked_squares, models.momentum(), ema_decay=decay)


def test_a_missing_average_cannot_be_evaluated():
    pipe = Pipeline(STACK, Plan.even(STACK.ids, **PLANS["flush"]), models.masked_squares, models.momentum())
    assert "ema_decay" not in repr(pipe)
    assert "ema_decay=0.75, not compiled yet" in repr(pipeline("flush"))
    for call in (pipe.params, lambda state, weights: pipe.evaluate(state, ((), ()), weights=weights)):
        with pytest.raises(InputError, match="weights: this pipeline keeps no average of the weights; give ema_decay to Pipeline"):
            call(jpipe.State((), 0, 0), weights="ema")
    with pytest.raises(InputError, match="weights: expected 'newest' or 'ema', found 'oldest'"):
        jpipe._arguments.check_weights("oldest", None)
