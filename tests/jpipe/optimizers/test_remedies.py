"""Each rule for delayed gradients against a transcription in NumPy; without delay each is the plain optimizer of optax."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import InputError
from jpipe.model import find_layerwise
from jpipe.optimizers import (
    compensated_adam,
    compensated_adamw,
    compensated_muon,
    compensated_sgd,
    per_stage,
    predict_delay,
    scale_by_compensated_adam,
    scale_by_delay,
    scale_by_torch_nadam,
    torch_nadam,
)

RATE = 1e-2
DELAYS = (0.0, 1.0, 3.0, 0.5, 7.0, 1.0, 0.25, 2.0, 3.0, 0.0, 15.0, 1.0)
SHAPES = {"matrix": (4, 3), "wide": (2, 5), "bias": (3,), "scale": ()}


def trees(steps, dtype=np.float64):
    """Yield one tree of gradients for each step, of very different sizes."""
    random = np.random.default_rng(0)
    for step in range(steps):
        yield {name: (random.normal(size=shape) * 10.0 ** (step % 3 - 1)).astype(dtype) for name, shape in SHAPES.items()}


def run(optimizer, delays=DELAYS, dtype=np.float64, **extra):
    """Return the parameters after each step, from the same ones and with the same gradients."""
    params = {name: jnp.asarray(np.linspace(0.5, 1.5, int(np.prod(shape))).reshape(shape), dtype) for name, shape in SHAPES.items()}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state, update, history = optimizer.init(params), jax.jit(optimizer.update, static_argnames="num_stages"), [params]
        for gradients, delay in zip(trees(len(delays), dtype), delays, strict=True):
            arguments = {} if delay is None else {"delay": np.float32(delay)} | extra
            updates, state = update(gradients, state, params, **arguments)
            params = optax.apply_updates(params, updates)
            history.append(params)
    return history


def reference(rule, delays=DELAYS):
    """Return the parameters after each step of a rule that yields the step of one parameter from (gradient, parameter, delay)."""
    history = [{name: np.linspace(0.5, 1.5, int(np.prod(shape))).reshape(shape) for name, shape in SHAPES.items()}]
    rules = {name: rule(shape) for name, shape in SHAPES.items()}
    for gradients, delay in zip(trees(len(delays)), delays, strict=True):
        history.append({name: p + rules[name](gradients[name], p, delay) for name, p in history[-1].items()})
    return history


def assert_close(actual, expected, tolerance=1e-10):
    for step, (a, b) in enumerate(zip(actual, expected, strict=True)):
        for name in SHAPES:
            np.testing.assert_allclose(a[name], b[name], rtol=tolerance, atol=tolerance, err_msg=f"{name} after step {step}")


def assert_equal(actual, expected):
    for step, (a, b) in enumerate(zip(actual, expected, strict=True)):
        for name in SHAPES:
            np.testing.assert_array_equal(a[name], b[name], err_msg=f"{name} after step {step}")


def momentum_rule(shape, beta=0.9):
    moving = np.zeros(shape)

    def step(g, p, delay):
        moving[...] = beta * moving + (1 - beta) * g
        return -RATE * (beta**delay * moving + (1 - beta**delay) * g) / (1 - beta)  # optax's momentum lacks the factor 1 - beta

    return step


def first_moment(shape, beta):
    """Return a function from gradient and delay to û, whose weights add up to one: each gradient's weight in it is counted."""
    weights, gradients = [], []

    def moment(g, delay):
        weights[:] = [beta * weight for weight in weights] + [1 - beta]
        gradients.append(g)
        all_weights = [beta**delay * weight for weight in weights]
        all_weights[-1] += 1 - beta**delay
        return sum(weight * gradient for weight, gradient in zip(all_weights, gradients, strict=True)) / sum(all_weights)

    return moment


def adam_rule(shape, b1=0.9, b2=0.999, eps=1e-8, decay=0.0):
    moment, second, counts = first_moment(shape, b1), np.zeros(shape), itertools.count(1)

    def step(g, p, delay):
        second[...] = b2 * second + (1 - b2) * g**2
        return -RATE * (moment(g, delay) / (np.sqrt(second / (1 - b2 ** next(counts))) + eps) + decay * p)

    return step


def muon_rule(shape):
    if len(shape) != 2:
        return adam_rule(shape)
    moment = first_moment(shape, 0.95)

    def step(g, p, delay):
        x = moment(g, delay)
        transposed = x.shape[0] > x.shape[1]
        x = x.T if transposed else x
        x = x / (np.linalg.norm(x) + 1e-8)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        x = x.T if transposed else x
        return -RATE * (max(1, x.shape[1] / x.shape[0]) ** 0.5 * x + 0.1 * p)

    return step


def torch_nadam_rule(shape, b1=0.9, b2=0.999, eps=1e-8, psi=4e-3, coupled=0.0, decoupled=0.0):
    """Transcribe the algorithm in the documentation of torch.optim.NAdam."""
    m, v, product, counts = np.zeros(shape), np.zeros(shape), [1.0], itertools.count(1)

    def step(g, p, delay):
        t = next(counts)
        before, g = p, g + coupled * p
        p = p - RATE * decoupled * p
        mu, mu_next = b1 * (1 - 0.5 * 0.96 ** (t * psi)), b1 * (1 - 0.5 * 0.96 ** ((t + 1) * psi))
        product[0] *= mu
        m[...] = b1 * m + (1 - b1) * g
        v[...] = b2 * v + (1 - b2) * g * g
        m_hat = mu_next * m / (1 - product[0] * mu_next) + (1 - mu) * g / (1 - product[0])
        return p - RATE * m_hat / (np.sqrt(v / (1 - b2**t)) + eps) - before

    return step


RULES = {
    "compensated_sgd": (compensated_sgd(RATE), momentum_rule),
    "compensated_sgd, another momentum": (compensated_sgd(RATE, 0.5), lambda shape: momentum_rule(shape, 0.5)),
    "compensated_adam": (compensated_adam(RATE, b1=0.8, b2=0.9), lambda shape: adam_rule(shape, 0.8, 0.9)),
    "compensated_adamw": (compensated_adamw(RATE, weight_decay=0.1), lambda shape: adam_rule(shape, decay=0.1)),
    "compensated_muon": (compensated_muon(RATE, weight_decay=0.1), muon_rule),
    "torch_nadam": (torch_nadam(RATE), torch_nadam_rule),
    "torch_nadam, of AsyncPP": (torch_nadam(RATE, 0.99, momentum_decay=1.0), lambda shape: torch_nadam_rule(shape, 0.99, psi=1.0)),
    "torch_nadam, L2": (torch_nadam(RATE, weight_decay=0.1), lambda shape: torch_nadam_rule(shape, coupled=0.1)),
    "torch_nadam, decoupled decay": (
        torch_nadam(RATE, weight_decay=0.1, decoupled_weight_decay=True),
        lambda shape: torch_nadam_rule(shape, decoupled=0.1),
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_equals_its_rule(name, float64):
    optimizer, rule = RULES[name]
    assert_close(run(optimizer), reference(rule))


PLAIN = {
    "sgd": (compensated_sgd(RATE, 0.95), optax.sgd(RATE, 0.95)),
    "adam": (compensated_adam(RATE, 0.8, 0.99, 1e-6, 1e-12), optax.adam(RATE, 0.8, 0.99, 1e-6, 1e-12)),
    "adamw": (compensated_adamw(optax.cosine_decay_schedule(RATE, 20)), optax.adamw(optax.cosine_decay_schedule(RATE, 20))),
    "adamw, bfloat16 moment": (compensated_adamw(RATE, mu_dtype=jnp.bfloat16), optax.adamw(RATE, mu_dtype=jnp.bfloat16)),
    "muon": (compensated_muon(RATE, weight_decay=0.1), optax.contrib.muon(RATE, weight_decay=0.1, nesterov=False)),
    "muon, its options": (
        compensated_muon(RATE, 3, 0.9, adaptive=True, adam_learning_rate=RATE / 2, consistent_rms=0.2),
        optax.contrib.muon(RATE, ns_steps=3, beta=0.9, nesterov=False, adaptive=True, adam_learning_rate=RATE / 2, consistent_rms=0.2),
    ),
    "delayed rate": (optax.chain(optax.adam(RATE), scale_by_delay(5)), optax.adam(RATE)),
}


@functools.cache
def run_plain(name, dtype):
    return run(PLAIN[name][1], [None] * 12, dtype)


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("delay", [0.0, None])
@pytest.mark.parametrize("name", PLAIN)
def test_without_delay_is_plain(name, delay, dtype):
    assert_equal(run(PLAIN[name][0], [delay] * 12, dtype), run_plain(name, dtype))


def test_state_is_that_of_plain():
    params = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}
    for optimizer, plain in PLAIN.values():
        if optimizer is not PLAIN["delayed rate"][0]:
            assert jax.tree.structure(optimizer.init(params)) == jax.tree.structure(plain.init(params))


def test_sgd_with_delay_1_is_nesterov(float64):
    assert_close(run(compensated_sgd(RATE), [1.0] * 12), run(optax.sgd(RATE, 0.9, nesterov=True), [None] * 12), 1e-14)


def test_adam_with_delay_1_becomes_optax_nesterov(float64):
    """Optax divides the gradient by 1 - b1^t and not by 1 - b1^(t+1); that is the whole difference, and it vanishes."""
    gradients = {"w": np.asarray([2.0, -1.0, 0.3])}
    nesterov, compensated = optax.scale_by_adam(nesterov=True), scale_by_compensated_adam()
    states, differences = [nesterov.init(gradients), compensated.init(gradients)], []
    with jax.numpy_dtype_promotion("standard"):
        for t in range(1, 201):
            scaled = {"w": gradients["w"] * np.cos(t)}
            expected, states[0] = jax.jit(nesterov.update)(scaled, states[0])
            actual, states[1] = jax.jit(compensated.update)(scaled, states[1], delay=1.0)
            nu = optax.tree.bias_correction(states[0].nu, 0.999, states[0].count)
            difference = 0.1 * scaled["w"] * (1 / (1 - 0.9**t) - 1 / (1 - 0.9 ** (t + 1))) / (np.sqrt(nu["w"]) + 1e-8)
            np.testing.assert_allclose(actual["w"] + difference, expected["w"], rtol=1e-12, atol=1e-12)
            differences.append(np.max(np.abs(difference)))
    assert differences[0] > 0.4
    assert max(differences[150:]) < 1e-6


@pytest.mark.parametrize("steps", [1, 4, 100])
def test_scale_by_delay(steps, float64):
    ones = {"w": np.ones(3)}
    rule = scale_by_delay(steps)
    state = rule.init(ones)
    for t, delay in enumerate(DELAYS):
        updates, state = rule.update(ones, state, delay=np.float32(delay))
        np.testing.assert_allclose(updates["w"], 1 / max(delay, 1.0) ** (1 - min(t / steps, 1)), rtol=1e-14)


def test_per_stage_is_the_optimizer_of_each_stage(float64):
    rates, b1 = [1e-3, optax.linear_schedule(1e-2, 1e-3, 10), 0.1], [0.9, 0.0, 0.5]
    optimizer = per_stage(optax.adamw, learning_rate=rates, b1=b1, weight_decay=0.1)
    for stage in range(3):
        expected = run(optax.adamw(rates[stage], b1=b1[stage], weight_decay=0.1), [None] * 12)
        assert_close(run(optimizer, [0.0] * 12, stage=np.int32(stage), num_stages=3), expected, 1e-14)


def test_per_stage_passes_the_delay_on(float64):
    optimizer = per_stage(compensated_adam, learning_rate=[1.0, RATE])
    assert_close(run(optimizer, stage=np.int32(1)), run(compensated_adam(RATE)), 1e-14)


def test_per_stage_keeps_the_dtypes_of_the_state():
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    optimizer = per_stage(
        optax.adam, learning_rate=[1e-3, optax.linear_schedule(1e-3, 1e-2, 10)], b1=[0.9, optax.linear_schedule(0.9, 0.95, 10)]
    )
    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.init(params)
        updates, after = optimizer.update(params, state, params, stage=jnp.int32(1))
        assert optax.apply_updates(params, updates)["w"].dtype == jnp.bfloat16
    assert jax.tree.map(jnp.result_type, state) == jax.tree.map(jnp.result_type, after)


def test_per_stage_passes_other_values_on_as_they_are():
    """Numbers of NumPy are numbers, and an argument that is a tuple by default may be one."""
    params = {"w": jnp.ones((2, 2))}
    optimizer = per_stage(optax.contrib.muon, learning_rate=[np.float32(0.1), 0.2], ns_coeffs=(2.0, -1.5, 0.5), weight_decay=np.zeros(()))
    expected = optax.contrib.muon(0.2, ns_coeffs=(2.0, -1.5, 0.5))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        updates, _ = optimizer.update(params, optimizer.init(params), params, stage=jnp.int32(1))
        np.testing.assert_allclose(updates["w"], expected.update(params, expected.init(params), params)[0]["w"], rtol=1e-6)


def test_per_stage_bad_arguments_refused():
    params = {"w": jnp.ones(3)}
    for value in ([], ["fast"], [0.1, float("nan")], [0.1, float("inf")], [True, 0.1], [np.True_, 0.1], [None]):
        expected = f"per_stage: learning_rate: expected a list of finite numbers or schedules, one for each stage; found {value}"
        with pytest.raises(InputError, match=re.escape(expected)):
            per_stage(optax.sgd, learning_rate=value)
    for name, value in {"learning_rate": (0.1, 0.2), "b1": np.array([0.9, 0.8])}.items():
        with pytest.raises(InputError, match=f"per_stage: {name}: expected a list, or one value for all stages; found .*; write list"):
            per_stage(optax.adam, **{"learning_rate": 0.1, name: value})
    with pytest.raises(InputError, match=r"keeps learning_rate in its state, as optax\.inject_hyperparams does"):
        per_stage(optax.inject_hyperparams(optax.sgd), learning_rate=[0.1, 0.2]).init(params)
    with pytest.raises(InputError, match="per_stage: adam: got an unexpected keyword argument 'b3'; see its signature"):
        per_stage(optax.adam, learning_rate=[0.1, 0.2], b3=0.9)
    with pytest.raises(InputError, match="per_stage: sgd: missing a required argument: 'learning_rate'"):
        per_stage(optax.sgd, momentum=[0.1, 0.2])
    optimizer = optax.chain(optax.clip(1.0), per_stage(optax.sgd, learning_rate=[0.1, 0.2]))
    with pytest.raises(InputError, match="learning_rate: expected one value for each of the 3 stages, found 2"):
        optimizer.update(params, optimizer.init(params), stage=0, num_stages=3)


LAYERWISE = {
    **{name: optimizer for name, (optimizer, _) in RULES.items() if "," not in name},
    "scale_by_delay": optax.chain(optax.adam(RATE), scale_by_delay(5)),
    "scale_by_torch_nadam": optax.chain(scale_by_torch_nadam(), optax.scale(-RATE)),
    "per_stage": per_stage(optax.adam, learning_rate=[RATE, RATE]),
}


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("name", LAYERWISE)
def test_works_layer_by_layer(name):
    specs = {layer: {"kernel": jax.ShapeDtypeStruct((4, 3), np.float32), "bias": jax.ShapeDtypeStruct((3,), np.float32)} for layer in "abc"}
    find_layerwise(LAYERWISE[name], {**specs, "act": {}})


@pytest.mark.parametrize("steps", [0, -3, True])
def test_scale_by_delay_needs_a_number_of_updates(steps):
    with pytest.raises(InputError, match="scale_by_delay: expected steps of at least 1, found"):
        scale_by_delay(steps)


@pytest.mark.parametrize("factor", [-1, float("nan"), True])
def test_predict_delay_needs_a_factor(factor):
    with pytest.raises(InputError, match=r"predict_delay: expected a factor of at least 0 such as 0\.5, found"):
        predict_delay(factor)
