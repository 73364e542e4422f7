"""The rule of weight prediction as an optax transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe.optimizers import predict_delay
from tests.optimizers import lenient


def gradients(steps, seed=0):
    rng = np.random.default_rng(seed)
    return [{"w": jnp.asarray(rng.normal(size=(3, 2))), "b": jnp.asarray(rng.normal(size=2))} for _ in range(steps)]


def run(optimizer, grads, **extra):
    """Return the parameters after each step, with extra arguments given as a list of one value for each step."""
    params = jax.tree.map(jnp.ones_like, grads[0])
    state, states = optimizer.init(params), []
    for t, gradient in enumerate(grads):
        updates, state = optimizer.update(gradient, state, params, **{name: values[t] for name, values in extra.items()})
        params = optax.apply_updates(params, updates)
        states.append((params, state))
    return states


INNER = {
    "momentum": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 8), momentum=0.9),
    "adam": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 0.1, 3, 8)),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.thinned
@pytest.mark.parametrize("name", INNER)
@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("delays", [[0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 3, 0.75, 0, 0], [2] * 8])
def test_the_weights_are_the_ordinary_ones_moved_ahead_by_the_last_update(name, factor, delays):
    grads = gradients(len(delays))
    inner = lenient(INNER[name]())
    ordinary = [params for params, _ in run(inner, grads)]
    results = run(optax.chain(inner, predict_delay(factor)), grads, delay=[jnp.float32(delay) for delay in delays])
    before = jax.tree.map(jnp.ones_like, grads[0])
    for t, (x, state) in enumerate(results):
        expected = jax.tree.map(lambda y, last, t=t: y + factor * delays[t] * (y - last), ordinary[t], before)
        np.testing.assert_allclose(x["w"], expected["w"], rtol=1e-12, atol=1e-14)
        y = jax.tree.map(jnp.subtract, x, state[-1].ahead)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), y, ordinary[t])
        before = ordinary[t]


def test_a_constant_delay_is_error_feedback():
    """Compare with U + λ (U − the U before), the published form."""
    rule = predict_delay()
    state, before = rule.init(jnp.zeros(3)), jnp.zeros(3)
    for t in range(4):
        u = jnp.asarray(np.random.default_rng(t).normal(size=3), jnp.float32)
        out, state = rule.update(u, state, delay=jnp.float32(1))
        np.testing.assert_allclose(out, u + (u - before), rtol=1e-6)
        before = u


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("factor", "delay"), [(1.0, 0.0), (0.0, 3.0)])
def test_no_prediction_changes_no_bit(dtype, factor, delay):
    u = jnp.asarray([0.0, -0.0, 1.5, -3e-39, jnp.inf, -jnp.inf, jnp.nan, 1e30], dtype)
    rule = predict_delay(factor)
    state = rule.init(u)
    for update in (rule.update, jax.jit(rule.update)):
        for _ in range(2):
            out, state = update(u, state, delay=jnp.float32(delay))
            assert np.asarray(out).tobytes() == np.asarray(u).tobytes()
            np.testing.assert_array_equal(state.ahead, 0)


def test_masked_and_missing_parameters_have_no_buffer():
    rule = predict_delay()
    params = {"a": jnp.ones(2), "b": optax.MaskedNode(), "c": None}
    out, state = rule.update(params, rule.init(params), params, delay=1.0, value=3.0)
    assert jax.tree.structure(out) == jax.tree.structure(params)
    np.testing.assert_array_equal(out["a"], 2)
    assert len(jax.tree.leaves(state)) == 1
