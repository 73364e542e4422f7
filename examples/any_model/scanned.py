"""A transformer in Flax Linen whose blocks are one block scanned over stacked parameters, and computed again in the backward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn


class Block(nn.Module):
    """Attention and an MLP, each added to what comes in."""

    heads: int
    dropout: float
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        drop = nn.Dropout(self.dropout, deterministic=not self.train)
        x = x + drop(nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask))
        y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + drop(nn.Dense(x.shape[-1])(y)), None


class Scanned(nn.Module):
    """Tokens [b, s] in, logits of the next token [b, s, vocabulary] out."""

    vocabulary: int
    length: int
    width: int
    heads: int
    depth: int
    dropout: float

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = True) -> jax.Array:
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (self.length, self.width))
        stack = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.depth,
        )
        x, _ = stack(self.heads, self.dropout, train, name="blocks")(x, nn.make_causal_mask(tokens))
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


def model(depth: int = 4) -> Scanned:
    """Build a small one of `depth` blocks."""
    return Scanned(vocabulary=16, length=8, width=16, heads=2, depth=depth, dropout=0.1)


def batch(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences that count up in steps of one to three, and their next tokens."""
    rng = np.random.default_rng(seed)
    tokens = (rng.integers(0, 16, (rows, 1)) + rng.integers(1, 4, (rows, 1)) * np.arange(9)) % 16
    return tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)


def loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the summed cross-entropy, and the number of tokens."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum(), jnp.asarray(labels.size)
