"""AWD-LM: its size, the state carried between batches, its dropout, and training in a pipeline."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from examples.papers.models.awd_lm import Embed, awd_lm, variational
from jpipe_train.losses.cross_entropy import loss
from tests.lm.models.running import params_of

DROPS = ("words", "input", "hidden", "output", "weights")
DRY = {"vocab_size": 11, "depth": 2, "width": 6, "hidden": 8, **{f"dropout_{name}": 0.0 for name in DROPS}}


def numbers(**arguments):
    inputs = {"tokens": jax.ShapeDtypeStruct((2, 5), np.int32), "continues": jax.ShapeDtypeStruct((2,), np.int32)}
    specs = awd_lm(2, **arguments).specs(inputs)
    return {name: sum(leaf.size for leaf in jax.tree.leaves(spec.params)) for name, spec in specs.items()}


def lstm(inputs, hidden):
    return 4 * hidden * (inputs + hidden + 1)


def test_it_has_as_many_numbers_as_the_papers_say():
    counts = numbers()
    assert counts["head"] - counts["embed"] == 10000  # tied, so that only the bias is its own
    untied = sum(counts.values()) - counts["embed"]
    assert untied == 10000 * 401 + lstm(400, 1600) + 4 * lstm(1600, 1600) + lstm(1600, 400)
    assert round(4 * untied / 1e9, 2) == 0.41  # PipeDream, section 5.2: "0.41GB"
    merity = numbers(depth=3, hidden=1150)
    assert round((sum(merity.values()) - merity["embed"]) / 1e6) == 24  # Merity et al. 2017, table 1


def test_untied_words_have_their_own_matrix():
    stack = awd_lm(2, **DRY | {"tied": False})
    assert not stack.ties.first
    assert numbers(**DRY | {"tied": False})["head"] == (8 + 1) * 11


def text(rows=4, length=15, seed=0):
    return np.random.default_rng(seed).integers(0, 11, (rows, length + 1)).astype(np.int32)


def piece(words, start, stop, continues):
    tokens = words[:, start : stop + 1]
    return {"tokens": tokens[:, :-1], "continues": np.full(len(words), continues, np.int32)}, tokens[:, 1:]


@pytest.fixture(scope="module")
def dry():
    stack = awd_lm(4, **DRY)
    example = piece(text(), 0, 5, 0)[0]
    params = params_of(stack, example)
    whole = {layer_id: stack.ties.whole(layer_id, params) for layer_id in stack.ids}
    key = jax.random.key(0)

    @jax.jit
    def train(state, inputs):
        return stack.apply(stack.ids, whole, state, inputs, key=key, microbatch=jnp.int32(0), train=True)

    @jax.jit
    def evaluate(state, inputs):
        return stack.apply(stack.ids, whole, state, inputs, key=None, microbatch=None, train=False)

    def begin(inputs):
        return {i: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec.state) for i, spec in stack.specs(inputs).items()}

    return begin, train, evaluate


@pytest.mark.slow
def test_rows_begin_with_zeros_where_nothing_is_carried(dry):
    begin, train, _ = dry
    first, second = (piece(text(), start, start + 5, int(start > 0))[0] for start in (0, 5))
    expected, _ = train(begin(second), {**second, "continues": np.zeros(4, np.int32)})
    stack = awd_lm(4, **DRY | {"carries": False})
    params = params_of(stack, first)
    whole = {layer_id: stack.ties.whole(layer_id, params) for layer_id in stack.ids}
    state = {layer_id: spec.state for layer_id, spec in stack.specs(first).items()}
    assert not jax.tree.leaves(state)
    for inputs in (first, second):
        logits, state = stack.apply(stack.ids, whole, state, inputs, key=jax.random.key(0), microbatch=jnp.int32(0), train=True)
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_rows_continue_where_they_ended(dry):
    begin, train, _ = dry
    words = text()
    logits, _ = train(begin(piece(words, 0, 15, 0)[0]), piece(words, 0, 15, 0)[0])
    state, parts = begin(piece(words, 0, 5, 0)[0]), []
    for start in (0, 5, 10):
        outputs, state = train(state, piece(words, start, start + 5, int(start > 0))[0])
        parts.append(np.asarray(outputs))
    np.testing.assert_allclose(np.concatenate(parts, axis=1), logits, atol=1e-6)


def test_each_microbatch_has_its_own_state(dry):
    begin, train, _ = dry
    words = text()
    whole, _ = train(begin(piece(words, 0, 10, 0)[0]), piece(words, 0, 10, 0)[0])
    state = begin(piece(words[:2], 0, 5, 0)[0])
    assert jax.tree.leaves(state["lstm_0"])[0].shape == (2, 2, 8)  # two microbatches of two of the four rows
    outputs = {}
    for start in (0, 5):
        for first in (0, 2):
            outputs[first, start], state = train(state, piece(words[first : first + 2], start, start + 5, int(start > 0))[0])
    for first in (0, 2):
        parts = [np.asarray(outputs[first, start]) for start in (0, 5)]
        np.testing.assert_allclose(np.concatenate(parts, axis=1), whole[first : first + 2], atol=1e-6)


def test_a_row_restarts_its_state_where_the_data_say_so(dry):
    begin, train, evaluate = dry
    first, second = piece(text(), 0, 5, 0)[0], piece(text(), 5, 10, 1)[0]
    fresh, _ = train(begin(first), second)
    _, state = train(begin(first), first)
    going_on, _ = train(state, second)
    assert (np.asarray(going_on) != np.asarray(fresh)).any()
    continued, _ = train(state, second | {"continues": np.array([0, 1, 0, 1], np.int32)})
    np.testing.assert_array_equal(continued[::2], fresh[::2])
    np.testing.assert_array_equal(continued[1::2], going_on[1::2])
    evaluated, after = evaluate(state, second)
    np.testing.assert_allclose(evaluated, fresh, atol=1e-6)  # from zeros
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_the_same_numbers_are_dropped_at_all_positions():
    x = jnp.ones((3, 7, 40), jnp.float32)
    y = np.asarray(variational(0.5, True).apply({}, x, rngs={"dropout": jax.random.key(0)}))
    assert set(np.unique(y)) == {0.0, 2.0}
    np.testing.assert_array_equal(y, np.repeat(y[:, :1], 7, axis=1))
    assert (y[0] != y[1]).any()
    np.testing.assert_array_equal(variational(0.5, False).apply({}, x), x)


def test_some_words_are_dropped_as_a_whole():
    inputs = {"tokens": jnp.arange(30, dtype=jnp.int32).reshape(2, 15), "continues": jnp.zeros(2, jnp.int32)}
    module = Embed(vocab_size=30, width=8, dropout_words=0.5, dropout_input=0.0)
    params = module.init({"params": jax.random.key(0), "dropout": jax.random.key(0)}, inputs, train=True)
    x = np.asarray(module.apply(params, inputs, train=True, rngs={"dropout": jax.random.key(1)})["x"])
    dropped = (x == 0).all(axis=-1)
    assert 5 < dropped.sum() < 25
    assert (x[~dropped] != 0).all()


def plain(stack, batches, microbatches):
    """Train by SGD without a pipeline, with the mean gradient of the microbatches of each batch."""
    rows = len(batches[0][1]) // microbatches

    def part(batch, k):
        return jax.tree.map(lambda leaf: jnp.asarray(leaf[k * rows : (k + 1) * rows]), batch)

    params = params_of(stack, part(batches[0], 0)[0])
    state = {
        i: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), s.state) for i, s in stack.specs(part(batches[0], 0)[0]).items()
    }

    @jax.jit
    def gradient(params, state, batch):
        def value(params):
            whole = {layer_id: stack.ties.whole(layer_id, params) for layer_id in stack.ids}
            outputs, after = stack.apply(stack.ids, whole, state, batch[0], key=jax.random.key(0), microbatch=jnp.int32(0), train=True)
            total, weight = loss(outputs, batch[1])
            return total / weight, after

        return jax.value_and_grad(value, has_aux=True)(params)

    losses = []
    for batch in batches:
        results = []
        for k in range(microbatches):
            (value, state), gradients = gradient(params, state, part(batch, k))
            results.append((value, gradients))
        losses.append(float(np.mean([value for value, _ in results])))
        params = jax.tree.map(lambda p, *g: p - 0.5 * sum(g) / len(g), params, *(gradients for _, gradients in results))
    return losses


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        ("pipedream_flush", "full"),
        *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("zb_h1", "none"), ("gpipe", "none"), ("gpipe", "full"))),
    ],
)
def test_a_pipeline_carries_the_same_state(schedule, recompute):
    words = text(rows=4, length=20)
    batches = [piece(words, 5 * t, 5 * t + 5, int(t > 0)) for t in range(4)]
    stack = awd_lm(4, **DRY)
    plan = jpipe.Plan.even(stack.ids, 2, schedule, 2, recompute=recompute)
    pipe = jpipe.Pipeline(stack, plan, loss, optax.sgd(0.5))
    state, losses = pipe.init(jax.random.key(0), batches[0]), []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        losses += metrics.losses.values()
    expected = plain(stack, batches, 2)
    np.testing.assert_allclose([float(value) for value in losses], expected, rtol=1e-5)
    other = plain(stack, [piece(words, 5 * t, 5 * t + 5, 0) for t in range(4)], 2)
    assert abs(expected[-1] - other[-1]) > 1e-4  # the state matters
