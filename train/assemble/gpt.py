"""A byte-level GPT as a `jpipe.LayerStack`: pre-norm, causal attention, learned positions, written in Flax NNX.

The letters in the shapes: b sequences, s positions, w width, v symbols (the 256 bytes).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

import jpipe
from train.config.config import ModelConfig

SYMBOLS = 256


def gpt(config: ModelConfig) -> jpipe.LayerStack:
    """The layers `embed`, `block_0` … `block_{depth-1}`, `head`, as constructors: nothing is allocated here."""
    block = partial(Block, config)  # one object, so that jpipe traces it once
    blocks = {f"block_{i}": block for i in range(config.depth)}
    return jpipe.LayerStack({"embed": partial(Embed, config), **blocks, "head": partial(Head, config)})


def loss(logits: Float[Array, "*b v"], labels: Int[Array, "*b"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The summed cross-entropy in nats and the number of labels (bytes) it is summed over."""
    nats = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return nats.sum(), jnp.asarray(labels.size, jnp.float32)


class Embed(nnx.Module):
    """Bytes to vectors: one vector a byte value plus one a position."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.compute_dtype)
        # Of order one, as are the blocks' outputs: much smaller ones make gradients that a delayed update (2BW, PipeDream) overshoots with.
        self.token = nnx.Embed(SYMBOLS, config.width, dtype=dtype, embedding_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.position = nnx.Embed(config.seq_len, config.width, dtype=dtype, embedding_init=_waves, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)

    def __call__(self, tokens: Int[Array, "b s"] | UInt8[Array, "b s"]) -> Float[Array, "b s w"]:
        positions = jnp.arange(tokens.shape[1])[None]
        return self.dropout(self.token(tokens) + self.position(positions))


class Block(nnx.Module):
    """One transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.heads = config.heads
        width, dtype = config.width, jnp.dtype(config.compute_dtype)
        into = partial(nnx.Linear, dtype=dtype, rngs=rngs)
        # The two projections back into the residual stream start smaller, so that its variance does not grow with depth (GPT-2).
        smaller = nnx.initializers.variance_scaling(0.5 / config.depth, "fan_in", "normal")
        back = partial(nnx.Linear, dtype=dtype, kernel_init=smaller, rngs=rngs)
        self.attention_norm = nnx.LayerNorm(width, dtype=jnp.float32, rngs=rngs)
        self.qkv = into(width, 3 * width)
        self.project = back(width, width)
        self.mlp_norm = nnx.LayerNorm(width, dtype=jnp.float32, rngs=rngs)
        self.expand = into(width, 4 * width)
        self.contract = back(4 * width, width)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)

    def __call__(self, x: Float[Array, "b s w"]) -> Float[Array, "b s w"]:
        x = x + self.dropout(self._attention(self.attention_norm(x)))
        return x + self.dropout(self.contract(nnx.gelu(self.expand(self.mlp_norm(x)))))

    def _attention(self, x: Float[Array, "b s w"]) -> Float[Array, "b s w"]:
        b, s, w = x.shape
        q, k, v = jnp.split(self.qkv(x).reshape(b, s, 3 * self.heads, w // self.heads), 3, axis=2)
        return self.project(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(b, s, w))


class Head(nnx.Module):
    """The last norm and the projection to logits."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.compute_dtype)
        self.norm = nnx.LayerNorm(config.width, dtype=jnp.float32, rngs=rngs)
        self.logits = nnx.Linear(config.width, SYMBOLS, use_bias=False, dtype=dtype, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)

    def __call__(self, x: Float[Array, "b s w"]) -> Float[Array, "b s v"]:
        return self.logits(self.norm(x))


def _waves(key: Array, shape: tuple[int, int], dtype: DTypeLike, out_sharding: object = None) -> Float[Array, "s w"]:
    """Positions start as half-size sines and cosines (the transformer's first encoding): "the byte before" is then soon learned."""
    positions, width = shape
    angles = np.arange(positions)[:, None] / 10_000 ** (np.arange(0, width, 2)[None] / width)
    return jnp.asarray(0.5 * np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :width], dtype)
