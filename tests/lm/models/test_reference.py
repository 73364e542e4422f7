"""Blocks equal NumPy implementations, position by position: RoPE, norms, windows, soft caps, gates and segments, GPT-2 and BERT."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jpipe import InputError
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.transformer import Block

SEGMENTS = np.asarray([[1, 1, 1, 2, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3, 3, 3]], np.int32)
BASE = 100.0


@pytest.mark.parametrize("keys", [
    {"positions": "rope", "rope_base": BASE, "norm": "rms", "activation": "silu", "gated_mlp": True, "bias": False, "kv_heads": 2,
     "head_size": 6, "mlp_width": 20},
    {"activation": "gelu"},
    {"kind": "bert", "activation": "gelu_exact"},
    {"positions": "rope", "rope_base": BASE, "norm": "rms_plus_one", "post_norms": True, "qk_norm": "head", "gated_mlp": True,
     "bias": False, "window": 3, "attention_scale": 0.7, "attention_soft_cap": 1.5, "kv_heads": 2},
    {"positions": "rope", "rope_base": BASE, "rope_share": 0.5, "norm": "rms", "qk_norm": "all", "bias": "qkv", "window": 2,
     "head_size": 8},
    {"positions": "none", "bias": "attention", "qk_norm": "head", "attention_scale": 0.1},
], ids=["llama", "gpt", "bert", "gemma", "partial", "none"])  # fmt: skip
def test_a_block_equals_a_numpy_implementation(keys):
    config = ModelConfig(width=16, heads=4, seq_len=8, norm_epsilon=1e-2, **keys)
    block = Block(config, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    graph, params = nnx.split(block)
    params = jax.tree.map(lambda leaf: leaf + 0.3 * rng.normal(size=leaf.shape).astype(np.float32), params)  # norms and biases that count
    x = rng.normal(size=(2, 8, 16)).astype(np.float32)
    actual = jax.jit(lambda params, stream: nnx.merge(graph, params)(stream))(params, {"x": x, "segments": SEGMENTS})
    arrays = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(params))
    np.testing.assert_array_equal(actual["segments"], SEGMENTS)
    for row in range(2):
        np.testing.assert_allclose(actual["x"][row], by_hand(arrays, x[row].astype(np.float64), SEGMENTS[row], config), atol=3e-5)


def by_hand(params, x, segments, config):
    """Apply a block to one row (s, w)."""

    def linear(name, x):
        return x @ params[name]["kernel"] + params[name].get("bias", 0)

    def norm(name, x):
        if config.norm != "layer":
            scale = params[name]["scale"] + (config.norm == "rms_plus_one")
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon) * scale
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm_epsilon) * params[name]["scale"] + params[name]["bias"]

    def mlp(x):
        return linear("contract", ACTIVATIONS[config.activation](linear("gate" if config.gated_mlp else "expand", x)) * (
            linear("expand", x) if config.gated_mlp else 1))  # fmt: skip

    def attention(x):
        return linear("project", heads_of(linear("qkv", x), segments, config, norm))

    if config.kind == "bert":
        x = norm("attention_norm", x + attention(x))
        return norm("mlp_norm", x + mlp(x))

    def after(name, x):
        return norm(name, x) if config.post_norms else x

    x = x + after("attention_post_norm", attention(norm("attention_norm", x)))
    return x + after("mlp_post_norm", mlp(norm("mlp_norm", x)))


def heads_of(qkv, segments, config, norm):
    """Return the attention output (s, heads · head size): for each position and head, the softmax-weighted mean of the visible values."""
    heads, kv_heads, size = config.heads, config.kv_heads_used, config.head_size_used
    parts = [part.reshape(len(qkv), -1, size) for part in np.split(qkv, [heads * size, (heads + kv_heads) * size], axis=-1)]
    for i, name in enumerate(("query_norm", "key_norm")):
        if config.qk_norm == "head":
            parts[i] = norm(name, parts[i])
        if config.qk_norm == "all":
            parts[i] = norm(name, parts[i].reshape(len(qkv), -1)).reshape(parts[i].shape)
    vectors = np.concatenate(parts, axis=1)
    place = [int((segments[:i] == segments[i]).sum()) for i in range(len(qkv))]
    result = np.zeros((len(qkv), heads, size))
    for i in range(len(qkv)):
        seen = [j for j in range(len(qkv)) if segments[j] == segments[i] and (config.kind == "bert" or i - (config.window or 99) < j <= i)]
        for head in range(heads):
            group = head // (heads // kv_heads)
            query, keys = vectors[i, head], [vectors[j, heads + group] for j in seen]
            if config.positions == "rope":
                turns = config.rotary_size
                query, *keys = [
                    np.concatenate([turned(vector[:turns], place[j]), vector[turns:]])
                    for vector, j in zip([query, *keys], [i, *seen], strict=True)
                ]
            scores = np.asarray([query @ key * (config.attention_scale or 1 / math.sqrt(size)) for key in keys])
            cap = config.attention_soft_cap
            weights = np.exp(scores if cap is None else cap * np.tanh(scores / cap))
            values = [vectors[j, heads + kv_heads + group] for j in seen]
            result[i, head] = sum(weight * value for weight, value in zip(weights / weights.sum(), values, strict=True))
    return result.reshape(len(qkv), -1)


def turned(vector, position):
    """Rotate the pairs of a vector, each of one number from either half."""
    half = len(vector) // 2
    result = np.empty_like(vector)
    for i in range(half):
        angle = position * BASE ** (-2 * i / len(vector))
        result[i] = vector[i] * math.cos(angle) - vector[half + i] * math.sin(angle)
        result[half + i] = vector[half + i] * math.cos(angle) + vector[i] * math.sin(angle)
    return result


ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
}


def test_cudnn_is_refused_where_there_is_none(monkeypatch):
    block = Block(ModelConfig(width=16, heads=2, attention="cudnn", compute_dtype="bfloat16"), rngs=nnx.Rngs(0))
    x = jnp.zeros((1, 8, 16), jnp.bfloat16)
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(InputError, match=r"needs an NVIDIA GPU with cuDNN, found CPUs; set model\.attention to xla"),
    ):
        block(x)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with (
        jax.numpy_dtype_promotion("standard"),
        pytest.raises(InputError, match=r"JAX reports: cuDNN is not detected\.; set model\.attention to xla"),
    ):
        block(x)
