"""BERT: both losses, the visible inputs, and training in a pipeline."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jpipe
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_train.assemble.metrics import metrics
from jpipe_train.config.config import EvalConfig
from jpipe_train.losses.cross_entropy import Unprojected, correct, loss
from tests.lm.models.running import applied, params_of, trained

CONFIG = ModelConfig(preset="bert-tiny", width=8, heads=2, depth=1)


def batch(rows: int = 4, masked: int = 3):
    """Return two sentences and padding in each row, with labels for `masked` tokens."""
    rng = np.random.default_rng(0)
    tokens, types, segments = rng.integers(0, 256, (rows, 16)), np.arange(16) // 8 * np.ones((rows, 1)), np.ones((rows, 16))
    segments[:, 14:] = 0
    labels = np.full((rows, 16), -1)
    labels[:, 2 : 2 + masked] = rng.integers(0, 256, (rows, masked))
    arrays = {"tokens": tokens, "types": types, "segments": segments}, {"tokens": labels, "next": rng.integers(0, 2, rows)}
    return jax.tree.map(lambda leaf: leaf.astype(np.int32), arrays)


@pytest.mark.exhaustive
@pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.exhaustive), 7])
def test_the_loss_is_the_mean_of_masked_tokens_plus_that_of_pairs(chunk):
    inputs, labels = jax.tree.map(jnp.asarray, batch())
    stack = layers(CONFIG, chunk)
    outputs = applied(stack, params_of(stack, inputs), inputs)
    assert isinstance(outputs["tokens"], Unprojected) == (chunk is not None)
    logits = outputs["tokens"].logits() if chunk else outputs["tokens"]
    masked = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.maximum(np.asarray(labels["tokens"]), 0)[..., None], -1)[..., 0]
    following = np.take_along_axis(np.asarray(jax.nn.log_softmax(outputs["next"])), np.asarray(labels["next"])[:, None], -1)
    total, weight = loss(outputs, labels)
    assert weight == 12
    np.testing.assert_allclose(total / weight, -masked[np.asarray(labels["tokens"]) >= 0].mean() - following.mean(), rtol=1e-6)
    hits, count = correct(outputs, labels)
    assert (int(hits), int(count)) == (int((np.asarray(logits).argmax(-1) == np.asarray(labels["tokens"])).sum()), 12)


def test_accuracy_counts_masked_tokens_only():
    """Neither tokens without a label nor the labels of pairs count; all pairs are predicted correctly here."""
    guessed = jnp.asarray([[3, 1, 5, 7], [2, 2, 0, 4]])
    labels = {"tokens": jnp.asarray([[-1, 1, 6, -1], [-1, -1, 0, -1]]), "next": jnp.asarray([0, 1])}
    outputs = {"tokens": jax.nn.one_hot(guessed, 8), "next": jax.nn.one_hot(labels["next"], 2)}
    accuracy = metrics(EvalConfig(metrics={"accuracy": "accuracy"}))["accuracy"]
    assert tuple(map(int, accuracy(outputs, labels))) == (2, 3)


@pytest.mark.slow
def test_it_reads_what_comes_before_and_after_which_sentence_it_is_and_no_padding():
    inputs, _ = batch()
    stack = layers(CONFIG)
    params = params_of(stack, inputs)

    def logits(**changes):
        return np.asarray(applied(stack, params, jax.tree.map(jnp.asarray, {**inputs, **changes}))["tokens"][:, 4])

    before = logits()
    for name, position in (("tokens", 9), ("tokens", 0), ("types", 4)):
        changed = inputs[name].copy()
        changed[:, position] = 1 - changed[:, position] if name == "types" else (changed[:, position] + 1) % 256
        assert (logits(**{name: changed}) != before).any(axis=-1).all()
    padding = inputs["tokens"].copy()
    padding[:, 15] = (padding[:, 15] + 1) % 256
    np.testing.assert_array_equal(logits(tokens=padding), before)


@pytest.mark.exhaustive
def test_a_pipeline_trains_the_module():
    one = batch()
    stack = layers(CONFIG, chunk=7)
    losses, params = trained(stack, jpipe.Plan.even(stack.ids, 2, "zb_h1", 2), [one] * 2)
    assert losses[-1] < losses[0]

    def mean(entries):
        total, weight = loss(applied(stack, entries, jax.tree.map(jnp.asarray, one[0])), jax.tree.map(jnp.asarray, one[1]))
        return total / weight

    step = jax.jit(jax.value_and_grad(mean))
    expected, entries = [], params_of(stack, one[0])
    for _ in range(2):
        value, gradients = step(entries)
        expected.append(float(value))
        entries = jax.tree.map(lambda p, g: p - 0.5 * g, entries, gradients)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    whole = {layer_id: stack.ties.whole(layer_id, entries) for layer_id in stack.ids}
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5), params, whole)
