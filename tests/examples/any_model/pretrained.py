"""An encoder as a pure function of parameters, tokens and their mask, with the names of Hugging Face's Flax models."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

WIDTH, HEADS, VOCABULARY, LENGTH, CLASSES, DROPOUT = 16, 2, 16, 8, 4, 0.1


def _dense(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["kernel"] + params["bias"]


def _norm(params: Any, x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=1e-12) * params["scale"] + params["bias"]


def _drop(x: jax.Array, key: jax.Array | None) -> jax.Array:
    return x if key is None else jnp.where(jax.random.bernoulli(key, 1 - DROPOUT, x.shape), x / (1 - DROPOUT), 0)


def _attention(params: Any, x: jax.Array, bias: jax.Array) -> jax.Array:
    query, key, value = (_dense(params[name], x).reshape(*x.shape[:-1], HEADS, -1) for name in ("query", "key", "value"))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (WIDTH // HEADS) ** 0.5 + bias
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value).reshape(x.shape)


def apply(
    params: Any, input_ids: jax.Array, attention_mask: jax.Array, dropout_rng: jax.Array | None = None, train: bool = False
) -> dict[str, Any]:
    """Return the logits of the class of each row, and the last hidden state."""
    layers = params["encoder"]["layer"]
    keys = iter(jax.random.split(dropout_rng, 1 + 2 * len(layers)) if train else [None] * (1 + 2 * len(layers)))
    table, positions = (params["embeddings"][name]["embedding"] for name in ("word_embeddings", "position_embeddings"))
    x = _drop(_norm(params["embeddings"]["LayerNorm"], table[input_ids] + positions[: input_ids.shape[1]]), next(keys))
    bias = jnp.where(attention_mask[:, None, None, :] > 0, 0.0, jnp.finfo(x.dtype).min).astype(x.dtype)
    for layer in (layers[str(i)] for i in range(len(layers))):
        y = _dense(layer["attention"]["output"]["dense"], _attention(layer["attention"]["self"], x, bias))
        x = _norm(layer["attention"]["output"]["LayerNorm"], x + _drop(y, next(keys)))
        y = _dense(layer["output"]["dense"], jax.nn.gelu(_dense(layer["intermediate"]["dense"], x)))
        x = _norm(layer["output"]["LayerNorm"], x + _drop(y, next(keys)))
    pooled = jnp.tanh(_dense(params["pooler"]["dense"], x[:, 0]))
    return {"logits": _dense(params["classifier"], pooled), "last_hidden_state": x}


def model(depth: int) -> Any:
    """Return the parameters."""
    rng = np.random.default_rng(0)

    def dense(inputs: int, outputs: int) -> Any:
        return {"kernel": jnp.asarray(rng.normal(0, inputs**-0.5, (inputs, outputs)), jnp.float32), "bias": jnp.zeros(outputs, jnp.float32)}

    def norm() -> Any:
        return {"scale": jnp.ones(WIDTH, jnp.float32), "bias": jnp.zeros(WIDTH, jnp.float32)}

    def embedding(count: int) -> Any:
        return {"embedding": jnp.asarray(rng.normal(0, 1, (count, WIDTH)), jnp.float32)}

    def layer() -> Any:
        attention = {name: dense(WIDTH, WIDTH) for name in ("query", "key", "value")}
        return {
            "attention": {"self": attention, "output": {"dense": dense(WIDTH, WIDTH), "LayerNorm": norm()}},
            "intermediate": {"dense": dense(WIDTH, 4 * WIDTH)},
            "output": {"dense": dense(4 * WIDTH, WIDTH), "LayerNorm": norm()},
        }

    return {
        "embeddings": {"word_embeddings": embedding(VOCABULARY), "position_embeddings": embedding(LENGTH), "LayerNorm": norm()},
        "encoder": {"layer": {str(i): layer() for i in range(depth)}},
        "pooler": {"dense": dense(WIDTH, WIDTH)},
        "classifier": dense(WIDTH, CLASSES),
    }


def batch(rows: int, seed: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Return random tokens and which of them are no padding, and as class a quarter of the vocabulary: that of the first token."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCABULARY, (rows, LENGTH)).astype(np.int32)
    mask = (np.arange(LENGTH) < rng.integers(3, LENGTH + 1, (rows, 1))).astype(np.int32)
    return (tokens, mask), tokens[:, 0] // (VOCABULARY // CLASSES)


def loss(outputs: Any, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return optax.softmax_cross_entropy_with_integer_labels(outputs["logits"], labels).sum(), jnp.asarray(labels.size)
