"""Attention in blocks equals attention at once, and its memory grows with the length of a row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import attention, blockwise
from jpipe_lm.models.blockwise import Masked, attend_in_blocks
from jpipe_lm.models.layers import layers
from tests.lm.models.running import SMALL, applied, forward_of, params_of

core = partial(jax.nn.dot_product_attention, implementation="xla")


def attend(q, k, v, mask):
    return core(q, k, v, mask=mask)


def at_once(q, k, v, segments, masked):
    distance = np.subtract.outer(np.arange(q.shape[1]), np.arange(q.shape[1]))
    mask = distance >= 0 if masked.is_causal else np.ones(distance.shape, bool)
    mask = mask & (distance <= masked.window - 1) if masked.window else mask
    same = True if segments is None else segments[:, None, :, None] == segments[:, None, None, :]
    return attend(q, k, v, mask[None, None] & same)


@pytest.mark.parametrize(
    ("masked", "has_segments", "size"),
    [
        (Masked(True), True, 5),  # 21 positions are filled up to 25
        (Masked(True, 6), True, 4),
        (Masked(True, 1), False, 3),
        (Masked(False), True, 8),
        pytest.param(Masked(True, 100), False, 4, marks=pytest.mark.exhaustive),
        pytest.param(Masked(True), False, 64, marks=pytest.mark.exhaustive),
    ],
)
def test_equals_attention_at_once(masked, has_segments, size):
    random = np.random.default_rng(0)
    q, *kv = (jnp.asarray(random.normal(size=(2, 21, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    segments = jnp.asarray(np.sort(random.integers(0, 3, (2, 21)), 1), jnp.int32) if has_segments else None
    target = jnp.asarray(random.normal(size=q.shape), jnp.float32)

    def with_gradients(function):
        return jax.value_and_grad(lambda *x: (function(*x) * target).sum(), argnums=(0, 1, 2))

    expected = with_gradients(lambda q, k, v: at_once(q, k, v, segments, masked))(q, *kv)  # each operation is compiled once for all cases
    found = jax.jit(with_gradients(lambda q, k, v: attend_in_blocks(attend, q, k, v, segments, masked, size)))(q, *kv)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), found, expected)


def test_memory_grows_with_the_length():
    def scratch(length):
        def in_blocks(q, k, v):
            return attend_in_blocks(attend, q, k, v, None, Masked(True), 2**18 // length).sum()

        q = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        return jax.jit(jax.grad(in_blocks, argnums=(0, 1, 2))).lower(q, q, q).compile().memory_analysis().temp_size_in_bytes

    of_long = scratch(8192)
    assert of_long < 4.5 * scratch(2048)
    assert of_long < 2 * 4 * 8192**2 / 20  # of the scores at once


@pytest.mark.parametrize(("rows", "heads", "size"), [(1, 4, 1024), (2, 32, 64), (64, 32, 16)])
def test_blocks_have_a_bounded_number_of_pairs_in_all_rows_and_heads(monkeypatch, rows, heads, size):
    sizes = []
    monkeypatch.setattr(blockwise, "_in_blocks", lambda blocks, q, *_: sizes.append(blocks.size) or q)
    q = jax.ShapeDtypeStruct((rows, 8192, heads, 8), jnp.float32)
    jax.eval_shape(lambda q: attend_in_blocks(attend, q, q, q, None, Masked(True)), q)
    assert sizes == [size]


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("keys", [{}, {"window": 3, "attention_soft_cap": 2.0}, {"sinks": True}, {"kind": "bert"}])
def test_a_model_with_attention_in_blocks(monkeypatch, keys):
    calls = []
    monkeypatch.setattr(attention, "attend_in_blocks", lambda *inputs: calls.append(1) or attend_in_blocks(*inputs, size=3))
    tokens = {"tokens": np.arange(16, dtype=np.int32).reshape(2, 8), "segments": np.asarray([[1, 1, 1, 1, 1, 2, 2, 0]] * 2, np.int32)}

    def model(**more):
        calls.clear()
        return layers(ModelConfig.model_validate({**SMALL, "depth": 1, **keys, **more}))

    params = params_of(whole := model(), tokens)
    at_once = applied(whole, params, tokens)
    assert not calls
    in_blocks = applied(model(attention="blockwise"), params, tokens)
    assert calls
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), in_blocks, at_once)
    monkeypatch.setattr(attention, "LONG", 8)  # a row has eight positions
    jax.eval_shape(forward_of(model()), params, tokens)
    assert calls
