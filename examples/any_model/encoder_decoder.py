"""An encoder and a decoder in Flax Linen: two inputs, and every block of the decoder reads the output of the encoder."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn


class Block(nn.Module):
    """Attention to itself, attention to the memory if there is one, and an MLP, each added to what comes in."""

    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool, mask: jax.Array | None = None, memory: jax.Array | None = None) -> jax.Array:
        drop = nn.Dropout(self.dropout, deterministic=not train)
        x = x + drop(nn.MultiHeadDotProductAttention(self.heads, name="itself")(nn.LayerNorm()(x), mask=mask))
        if memory is not None:
            x = x + drop(nn.MultiHeadDotProductAttention(self.heads, name="memory")(nn.LayerNorm()(x), memory))
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + drop(nn.Dense(x.shape[-1])(y))


class EncoderDecoder(nn.Module):
    """Source tokens [b, s] and shifted target tokens [b, t] in, logits of the target tokens [b, t, vocabulary] out."""

    vocabulary: int
    width: int
    heads: int
    depth: int
    dropout: float

    def setup(self) -> None:
        self.embed = nn.Embed(self.vocabulary, self.width)
        self.source_positions = self.param("source_positions", nn.initializers.normal(0.5), (8, self.width))
        self.target_positions = self.param("target_positions", nn.initializers.normal(0.5), (8, self.width))
        self.encoder = [Block(self.heads, self.dropout) for _ in range(self.depth)]
        self.decoder = [Block(self.heads, self.dropout) for _ in range(self.depth)]
        self.norm = nn.LayerNorm()
        self.logits = nn.Dense(self.vocabulary)

    def __call__(self, source: jax.Array, target: jax.Array, train: bool = True) -> jax.Array:
        memory = self.embed(source) + self.source_positions[: source.shape[1]]
        for block in self.encoder:
            memory = block(memory, train)
        x = self.embed(target) + self.target_positions[: target.shape[1]]
        for block in self.decoder:
            x = block(x, train, nn.make_causal_mask(target), memory)
        return self.logits(self.norm(x))


def model(depth: int = 2) -> EncoderDecoder:
    """Build a small one of twice `depth` blocks."""
    return EncoderDecoder(vocabulary=12, width=16, heads=2, depth=depth, dropout=0.1)


def batch(rows: int, seed: int) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Return random tokens as source, and the same tokens backwards as target, which begins with 0 where it is an input."""
    source = np.random.default_rng(seed).integers(1, 12, (rows, 5)).astype(np.int32)
    target = source[:, ::-1]
    return (source, np.pad(target[:, :-1], ((0, 0), (1, 0)))), np.ascontiguousarray(target)


def loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the summed cross-entropy, and the number of tokens."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum(), jnp.asarray(labels.size)
