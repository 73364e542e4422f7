"""The GPT: what its layers are, that it cannot look ahead, and that it counts its loss right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from train.assemble import gpt
from train.config.config import ModelConfig


def logits_of(config: ModelConfig, tokens: jax.Array) -> jax.Array:
    rngs = nnx.Rngs(0)
    x = gpt.Embed(config, rngs=rngs)(tokens)
    for _ in range(config.depth):
        x = gpt.Block(config, rngs=rngs)(x)
    return gpt.Head(config, rngs=rngs)(x)


def test_layers_in_order():
    assert gpt.gpt(ModelConfig(depth=2)).ids == ("embed", "block_0", "block_1", "head")


@pytest.mark.slow
@pytest.mark.parametrize(("compute_dtype", "promotion"), [("float32", "strict"), ("bfloat16", "standard")])
def test_a_byte_changes_no_logits_before_it(compute_dtype, promotion):
    config = ModelConfig(depth=2, width=16, heads=2, seq_len=8, compute_dtype=compute_dtype)
    tokens = jnp.arange(8, dtype=jnp.int32)[None]
    with jax.numpy_dtype_promotion(promotion):  # JAX's own attention promotes bfloat16 to float32 inside
        before, after = logits_of(config, tokens), logits_of(config, tokens.at[0, 5].set(99))
    assert before.dtype == compute_dtype
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    for position in (5, 6, 7):
        assert not np.array_equal(before[:, position], after[:, position])


def test_parameters_are_float32_whatever_computes():
    config = ModelConfig(depth=1, width=16, heads=2, seq_len=8, compute_dtype="bfloat16")
    for layer in (gpt.Embed, gpt.Block, gpt.Head):
        assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(layer(config, rngs=nnx.Rngs(0)), nnx.Param))} == {jnp.dtype("float32")}


def test_equal_bytes_at_different_positions_differ():
    logits = logits_of(ModelConfig(depth=1, width=16, heads=2, seq_len=8), jnp.zeros((1, 8), jnp.int32))
    assert not np.allclose(logits[0, 0], logits[0, 1])


def test_dropout_acts_where_it_is_asked_for():
    x = jax.random.normal(jax.random.key(0), (1, 8, 16))
    for rate in (0.0, 0.5):
        block = gpt.Block(ModelConfig(width=16, heads=2, seq_len=8, dropout=rate), rngs=nnx.Rngs(0))
        assert np.array_equal(block(x), block(x)) == (rate == 0)


def test_loss_is_a_sum_of_nats_and_a_count():
    logits = jnp.zeros((2, 3, 256)).at[0, 0, 7].set(100.0)
    total, weight = gpt.loss(logits, jnp.full((2, 3), 7, jnp.int32))
    assert weight == 6
    np.testing.assert_allclose(total, 5 * np.log(256), rtol=1e-6)
