"""The LSTM: equality with a plain loop in NumPy, masks and dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.papers.models.recurrent import LSTM, Embedding, below, lstm


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def plain_lstm(x, kernel, recurrent, bias, mask=None, carry=None, reverse=False):
    """Apply an LSTM to one row and one position at a time, in float64."""
    x, kernel, recurrent, bias = (np.asarray(each, np.float64) for each in (x, kernel, recurrent, bias))
    rows, positions, hidden = x.shape[0], x.shape[1], recurrent.shape[0]
    y = np.zeros((rows, positions, hidden))
    last = np.zeros((2, rows, hidden))
    for row in range(rows):
        c, h = np.zeros((2, hidden)) if carry is None else np.asarray(carry, np.float64)[:, row]
        for t in reversed(range(positions)) if reverse else range(positions):
            if mask is None or mask[row, t]:
                i, f, g, o = np.split(x[row, t] @ kernel + h @ recurrent + bias, 4)
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                h = sigmoid(o) * np.tanh(c)
            y[row, t] = h
        last[:, row] = c, h
    return last, y


def weights(seed=0, rows=3, positions=5, width=4, hidden=6):
    rng = np.random.default_rng(seed)
    shapes = (rows, positions, width), (width, 4 * hidden), (hidden, 4 * hidden), (4 * hidden,)
    drawn = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    return drawn, jnp.asarray(rng.normal(size=(2, rows, hidden)), jnp.float32)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("carried", [False, True])
def test_it_is_an_lstm(reverse, masked, carried):
    arguments, carry = weights()
    mask = below(jnp.asarray([5, 2, 1]), 5) if masked else None
    carry = carry if carried else None
    after, y = lstm(*arguments, mask, None if carry is None else tuple(carry), reverse=reverse)
    last, expected = plain_lstm(*arguments, mask, carry, reverse)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(np.asarray(after), last, atol=1e-5)


def test_masked_positions_change_nothing():
    (x, *parameters), _ = weights()
    mask = below(jnp.asarray([5, 2, 1]), 5)
    assert mask.sum(1).tolist() == [5, 2, 1]
    other = jnp.where(mask[..., None], x, jnp.float32(7))
    for reverse in (False, True):
        one, two = (np.asarray(lstm(each, *parameters, mask, reverse=reverse)[1]) for each in (x, other))
        np.testing.assert_array_equal(one[np.asarray(mask)], two[np.asarray(mask)])


def dropped(module, x, name, **options):
    """Return a module's output in training, the output of one of its dropouts and its parameters."""
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x, train=True)
    capture = {"capture_intermediates": lambda part, _: type(part).__name__ == "Dropout", "mutable": ["intermediates"]}
    y, captured = module.apply(variables, x, train=True, rngs={"dropout": jax.random.key(2)}, **capture, **options)
    return y, np.asarray(captured["intermediates"][name]["__call__"][0]), variables["params"]


def test_recurrent_weights_are_dropped_once_for_all_positions():
    x = weights(positions=7)[0][0]
    module = LSTM(16, dropout_weights=0.25)
    (_, y), recurrent, params = dropped(module, x, "Dropout_0")
    whole = np.asarray(params["recurrent"])
    zeroed = recurrent == 0
    assert 0.15 < zeroed.mean() < 0.35
    np.testing.assert_allclose(recurrent[~zeroed], whole[~zeroed] / 0.75, rtol=1e-6)
    np.testing.assert_allclose(y, plain_lstm(x, params["kernel"], recurrent, params["bias"])[1], atol=1e-5)
    evaluated = module.apply({"params": params}, x)[1]
    np.testing.assert_allclose(evaluated, plain_lstm(x, params["kernel"], whole, params["bias"])[1], atol=1e-5)


def test_words_are_dropped_equally_in_all_rows():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 40, (4, 30)), jnp.int32)
    y, table, params = dropped(Embedding(40, 8, dropout=0.5), tokens, "Dropout_0")
    zeroed = (table == 0).all(axis=1)
    assert 8 < zeroed.sum() < 32
    np.testing.assert_allclose(table[~zeroed], np.asarray(params["embedding"])[~zeroed] * 2, rtol=1e-6)
    np.testing.assert_array_equal(y, table[np.asarray(tokens)])


def test_it_begins_as_flax_begins():
    params = jax.tree.map(np.asarray, LSTM(32).init(jax.random.key(0), jnp.zeros((1, 1, 64)))["params"])
    np.testing.assert_allclose(params["kernel"].std(), 1 / 8, rtol=0.05)
    np.testing.assert_allclose(params["recurrent"] @ params["recurrent"].T, np.eye(32), atol=1e-5)
    assert not params["bias"].any()
