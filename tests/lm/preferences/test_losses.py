"""The losses of preferences and their updates are those of the papers' formulas, in float64, under every schedule and padding."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe import InputError
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import transformer
from jpipe_lm.preferences.losses import DPO, ORPO, SimPO, pairs_of
from jpipe_lm.preferences.pairs import Answer, PairRows
from jpipe_train.assemble import model
from jpipe_train.assemble.metrics import metrics
from jpipe_train.config.config import Config, EvalConfig
from tests.lm.models.running import LLAMA, SMALL
from tests.lm.models.test_heads import wide

CONFIG = ModelConfig(**SMALL | LLAMA | {"depth": 1, "vocab_size": 20, "seq_len": 30}).model_copy(update={"compute_dtype": "float64"})
RNG = np.random.default_rng(0)


def answer(prompt: int, size: int) -> Answer:
    return Answer(RNG.integers(0, 20, prompt + size).astype(np.uint32), prompt, prompt + size)


PAIRS = [(answer(3, 4), answer(3, 2)), (answer(1, 5), answer(1, 8)), (answer(6, 1), answer(6, 3))]
REFERENCE = np.asarray([[-11, -7], [-14, -23], [-2.5, -9]], np.float32)


def batch(seq_len: int, reference=REFERENCE) -> tuple[dict, dict]:
    """Return the three pairs and a pair of padding."""
    rows = PairRows(PAIRS, seq_len, 0, reference)
    pairs = [rows[i] for i in range(3)]
    inputs, labels = jax.tree.map(lambda *leaves: np.stack(leaves), *pairs)
    padded = jax.tree.map(lambda leaf: np.concatenate([leaf, np.zeros_like(leaf[:1])]), inputs)
    return padded, jax.tree.map(lambda leaf: np.concatenate([leaf, np.full_like(leaf[:1], -1)]), labels)


@cache
def stack_of(chunk: int | None) -> jpipe.LayerStack:
    made = {"embed": partial(transformer.Embed, CONFIG), "block_0": partial(transformer.Block, CONFIG)}
    made["head"] = partial(transformer.Head, CONFIG, chunk)
    return jpipe.LayerStack({name: wide(constructor) for name, constructor in made.items()})


@partial(jax.jit, static_argnums=0)
@partial(jax.value_and_grad, argnums=1)
def log_prob(stack, params, tokens, start, stop) -> jax.Array:
    """Return the log-probability of the tokens from `start` to before `stop`, from the logits of this text alone, without padding."""
    logits, _ = stack.apply(
        stack.ids, params, {layer_id: {} for layer_id in stack.ids}, tokens[None, :-1], key=None, microbatch=None, train=False
    )
    probs = jnp.exp(logits[0]) / jnp.exp(logits[0]).sum(-1, keepdims=True)
    t = jnp.arange(1, len(tokens))
    return jnp.where((start <= t) & (t < stop), jnp.log(probs[t - 1, tokens[1:]]), 0).sum()


@partial(jax.jit, static_argnums=1)
@partial(jax.value_and_grad, has_aux=True)
def formula(log_probs, loss) -> tuple[jax.Array, jax.Array]:
    """Return the mean loss and the rewards (3, 2) by the papers."""
    losses, rewards = [], []
    for pair, (chosen, rejected), reference in zip(PAIRS, log_probs, REFERENCE, strict=True):
        means = [chosen / (pair[0].stop - pair[0].start), rejected / (pair[1].stop - pair[1].start)]
        if isinstance(loss, DPO):
            both = [loss.beta * (chosen - float(reference[0])), loss.beta * (rejected - float(reference[1]))]
            right = 1 / (1 + jnp.exp(both[1] - both[0]))
            losses.append(-(1 - loss.label_smoothing) * jnp.log(right) - loss.label_smoothing * jnp.log(1 - right))
        elif isinstance(loss, SimPO):
            both = [loss.beta * mean for mean in means]
            losses.append(-jnp.log(1 / (1 + jnp.exp(both[1] - both[0] + loss.gamma))))
        else:
            both = [loss.beta * mean for mean in means]
            odds = [jnp.exp(mean) / (1 - jnp.exp(mean)) for mean in means]
            losses.append(-means[0] - loss.beta * jnp.log(1 / (1 + odds[1] / odds[0])))
        rewards.append(both)
    return sum(losses) / 3, jnp.asarray(rewards)


def by_the_papers(params, loss):
    """Return the mean loss, the rewards and the gradient."""
    texts = [log_prob(stack_of(None), params, np.asarray(tokens, np.int32), start, stop) for pair in PAIRS for tokens, start, stop in pair]
    (value, rewards), weights = formula([[one[0], other[0]] for one, other in zip(texts[::2], texts[1::2], strict=True)], loss)
    gradient = jax.tree.map(
        lambda *g: sum(w * np.asarray(each) for w, each in zip(np.ravel(weights), g, strict=True)), *(g for _, g in texts)
    )
    return value, rewards, gradient


@pytest.mark.parametrize(
    ("loss", "schedule", "microbatches", "seq_len", "chunk"),
    [
        (DPO(0.3, 0.1), "gpipe", 1, 9, None),
        (DPO(0.3, 0.1), "pipedream_flush", 4, 13, 5),
        (SimPO(2.0, 0.7), "zb_h1", 2, 20, 7),
        (ORPO(0.4), "pipedream_flush", 2, 9, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, DPO | SimPO | ORPO) else str(value),
)
def test_two_updates_are_those_of_the_formulas(loss, schedule, microbatches, seq_len, chunk):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        stack = stack_of(chunk)
        data = batch(seq_len, REFERENCE if isinstance(loss, DPO) else None)
        pipe = jpipe.Pipeline(stack, jpipe.Plan.even(stack.ids, 2, schedule, microbatches), loss, optax.sgd(0.5))
        state = pipe.init(jax.random.key(0), data)
        params, functions = jax.tree.map(np.asarray, pipe.params(state)), metrics(EvalConfig(), loss=loss)
        for exact in (1e-12, 1e-9):  # the second step has the rounding of the first update
            value, rewards, gradient = by_the_papers(params, loss)
            evaluation = pipe.evaluate(state, data, functions)
            assert {float(mean.weight) for mean in evaluation.metrics.values()} == {3}
            found = [float(evaluation.metrics[name].mean) for name in ("chosen_reward", "rejected_reward", "margin", "accuracy")]
            chosen, rejected = np.asarray(rewards).T
            np.testing.assert_allclose(
                found, [chosen.mean(), rejected.mean(), (chosen - rejected).mean(), (chosen > rejected).mean()], exact
            )
            state, found = pipe.step(state, data)
            params = jax.tree.map(lambda leaf, change: leaf - 0.5 * np.asarray(change), params, gradient)
            np.testing.assert_allclose(float(next(iter(found.losses.values()))), value, rtol=exact)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10), pipe.params(state), params)


def test_accuracy_counts_pairs_whose_chosen_answer_has_the_larger_reward():
    labels = {"tokens": jnp.asarray([[[0, -1], [1, -1]], [[1, -1], [0, -1]], [[-1, -1], [-1, -1]]])}
    logits = np.zeros((6, 2, 2), np.float32)
    logits[:, 0, 0] = 1
    total, number = jax.jit(SimPO().metrics["accuracy"][0])(logits, labels)
    assert (float(total), float(number)) == (1, 2)


def test_a_certain_answer_has_finite_odds_and_gradients():
    labels = {"tokens": jnp.asarray([[[0], [1]]])}
    value, gradient = jax.jit(jax.value_and_grad(lambda logits: ORPO()(logits, labels)[0]))(np.float32([[[100, -100]]] * 2))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("labels", [jnp.zeros((4, 3), jnp.int32), {"tokens": jnp.zeros((2, 1, 3), jnp.int32)}], ids=["rows", "one"])
def test_labels_that_are_not_pairs_are_an_error(labels):
    with pytest.raises(InputError, match=r"loss\.name: expected labels of pairs; use data\.format preferences"):
        pairs_of(jnp.zeros((4, 3, 5)), labels)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"beta": 0}, r"loss\.arguments: beta: expected a number above 0, found 0\.0"),
        ({"beta": "much"}, r"loss\.arguments: 'beta' of 'dpo': expected a number, found 'much'"),
        ({"label_smoothing": 0.5}, r"loss\.arguments: label_smoothing: expected a number from 0 to below 0\.5, found 0\.5"),
        ({"gamma": 1}, r"loss\.arguments: 'dpo' has no argument 'gamma'; its arguments, the most similar first: beta"),
    ],
)
def test_wrong_arguments_are_errors(arguments, message):
    with pytest.raises(InputError, match=message):
        model.loss(Config(data={"target": "a:b"}, model={"target": "a:b"}, loss={"name": "dpo", "arguments": arguments}))
