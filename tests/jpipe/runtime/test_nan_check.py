"""`jax_debug_nans` and `jax_debug_infs` report NaN and infinity of any batch, with the stage and the layer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from tests.jpipe import models

GOOD = models.batches_of(1, models.ROWS * 2)[0]


def root(x):
    """Return NaN for the inputs of the bad batch only."""
    return x * jnp.sqrt(50.0 - jnp.abs(x).max(-1, keepdims=True))


@jax.custom_jvp
def steep(x):
    """Compute a function whose gradient is NaN for large inputs."""
    return x


@steep.defjvp
def _(primals, tangents):
    (x,), (t,) = primals, tangents
    return x, t * jnp.where(jnp.abs(x) > 50, jnp.nan, 1.0)


LAYERS = {"forward": root, "gradient": steep}


@functools.cache
def pipeline(kind, ids, schedule="pipedream_flush", devices=1):
    dense = {"a": models.dense(activation=lambda x: x), "b": models.dense(activation=lambda x: x)}
    stack = jpipe.LayerStack({layer_id: (dense | {"bad": LAYERS[kind]})[layer_id] for layer_id in ids})
    plan = jpipe.Plan.even(stack.ids, 2, schedule, 2, mesh={"data": devices} if devices > 1 else None)
    return jpipe.Pipeline(stack, plan, models.squares, models.momentum())


def bad():
    inputs, labels = GOOD
    return np.full_like(inputs, 1e4), labels


def second_batch(pipe):
    state = pipe.init(jax.random.key(0), GOOD)
    with jax.debug_nans(True):
        state, _ = pipe.step(state, GOOD)
        pipe.step(state, bad())


CASES = {
    "last stage": (
        "forward",
        ("a", "b", "bad"),
        r"stage 1 \(layers bad\): NaN in the results of forward_backward; .* forward of layer 'bad'",
    ),
    "first stage": (
        "forward",
        ("bad", "a", "b"),
        r"stage 0 \(layers bad, a\): NaN in the results of forward; .* forward of layer 'bad'",
    ),
    "gradient": ("gradient", ("a", "bad", "b"), r"stage 0 \(layers a, bad\): NaN in the results of backward; .* gradients is 'a'"),
}


@pytest.mark.parametrize(("kind", "ids", "message"), CASES.values(), ids=CASES)
def test_nan_of_a_later_batch_is_reported_with_stage_and_layer(kind, ids, message):
    with pytest.raises(FloatingPointError, match=f"^{message}$"):
        second_batch(pipeline(kind, ids))


def test_nan_in_the_rows_of_the_last_device_of_a_mesh_is_reported():
    pipe, (inputs, labels) = pipeline("gradient", ("a", "bad", "b"), devices=2), GOOD
    state = pipe.init(jax.random.key(0), GOOD)
    inputs = inputs.copy()
    inputs[models.ROWS - 1 :: models.ROWS] = 1e4  # the last row of each microbatch
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"NaN in the results of backward; .* gradients is 'a'$"):
        pipe.step(state, (inputs, labels))


def test_without_the_setting_no_output_is_checked():
    pipe = pipeline("forward", ("a", "b", "bad"))
    state = pipe.init(jax.random.key(0), GOOD)
    _, metrics = pipe.step(state, bad())
    assert np.isnan(metrics.losses[0])


def test_an_evaluation_is_checked_for_nan():
    pipe = pipeline("forward", ("a", "b", "bad"))
    state = pipe.init(jax.random.key(0), GOOD)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"stage 1 .*: NaN in the results of evaluate; .*'bad'"):
        pipe.evaluate(state, bad())
