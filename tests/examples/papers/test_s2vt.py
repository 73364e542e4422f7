"""S2VT: equality with NumPy, and its number of parameters."""

import jax
import numpy as np
import pytest

from examples.papers.models.s2vt import s2vt
from tests.examples.papers.test_recurrent import plain_lstm
from tests.lm.models.running import applied, params_of


def batch():
    rng = np.random.default_rng(0)
    return {"features": rng.normal(size=(2, 4, 5)).astype(np.float32), "tokens": rng.integers(0, 9, (2, 3)).astype(np.int32)}


def test_its_layers_are_as_large_as_derived_by_hand():
    inputs = {"features": jax.ShapeDtypeStruct((2, 50, 4096), np.float32), "tokens": jax.ShapeDtypeStruct((2, 30), np.int32)}
    counts = {name: sum(leaf.size for leaf in jax.tree.leaves(spec.params)) for name, spec in s2vt().specs(inputs).items()}
    assert counts == {
        "frames": 4096 * 500 + 500,
        "lstm_0": 4000 * (500 + 1000 + 1),
        "words": 13010 * 500,
        "lstm_1": 4000 * (1000 + 500 + 1000 + 1),
        "head": 1000 * 13010 + 13010,
    }


@pytest.mark.slow
def test_it_computes_what_the_paper_says():
    stack = s2vt(vocab_size=9, width=4, hidden=6, dropout=0.0)
    params = params_of(stack, batch())

    def run(part, x):
        return plain_lstm(x, part["kernel"], part["recurrent"], part["bias"])[1]

    inputs = batch()
    frames = inputs["features"] @ np.asarray(params["frames"]["embed"]["kernel"]) + np.asarray(params["frames"]["embed"]["bias"])
    seen = run(params["lstm_0"]["lstm"], np.concatenate([frames, np.zeros((2, 3, 4))], axis=1))
    words = np.asarray(params["words"]["embedding"]["embedding"])[inputs["tokens"]]
    beside = np.concatenate([np.zeros((2, 4, 4)), words], axis=1)
    scores = run(params["lstm_1"]["lstm"], np.concatenate([seen, beside], axis=-1))[:, 4:]
    expected = scores @ np.asarray(params["head"]["kernel"]) + np.asarray(params["head"]["bias"])
    np.testing.assert_allclose(applied(stack, params, inputs), expected, atol=1e-5)
