"""A causal transformer in Flax NNX: padded sequences, dropout, and one table for the tokens and for the logits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

PAD = 0


class Block(nnx.Module):
    """Attention and an MLP, each added to what comes in."""

    def __init__(self, width: int, heads: int, dropout: float, *, rngs: nnx.Rngs):
        self.norm_1, self.norm_2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, dropout_rate=dropout, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.norm_1(x), mask=mask))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm_2(x)))))


class Transformer(nnx.Module):
    """Tokens [b, s] in, logits of the next token [b, s, vocabulary] out."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int, dropout: float, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, width)))
        self.blocks = nnx.List([Block(width, heads, dropout, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        mask = nnx.combine_masks(nnx.make_causal_mask(tokens), nnx.make_attention_mask(tokens != PAD, tokens != PAD))
        x = self.embed(tokens) + self.positions[...]
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(self.norm(x))


def model(depth: int = 4, *, rngs: nnx.Rngs) -> Transformer:
    """Build a small one of `depth` blocks."""
    return Transformer(vocabulary=16, length=8, width=16, heads=2, depth=depth, dropout=0.1, rngs=rngs)


def batch(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences that count up in steps of one to three, padded at the end, and their next tokens."""
    rng = np.random.default_rng(seed)
    start, stride, length = rng.integers(0, 15, (rows, 1)), rng.integers(1, 4, (rows, 1)), rng.integers(5, 10, (rows, 1))
    tokens = np.where(np.arange(9) < length, 1 + (start + stride * np.arange(9)) % 15, PAD).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the summed cross-entropy of the tokens that are no padding, and their number."""
    is_token = labels != PAD
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.where(is_token, losses, 0).sum(), is_token.sum()
