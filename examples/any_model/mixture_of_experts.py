"""A mixture of experts in Flax NNX: each router's auxiliary loss is returned with the logits, and a part of the loss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Experts(nnx.Module):
    """MLPs of which each token uses one."""

    def __init__(self, width: int, count: int, *, rngs: nnx.Rngs):
        self.router = nnx.Linear(width, count, use_bias=False, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (count, width, 2 * width)) / width**0.5)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (count, 2 * width, width)) / (2 * width) ** 0.5)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        shares = nnx.softmax(self.router(x))
        chosen = nnx.one_hot(shares.argmax(-1), shares.shape[-1], dtype=x.dtype)
        y = nnx.relu(jnp.einsum("bsd,edf->bsef", x, self.up[...]))
        y = jnp.einsum("bsef,efd,bse->bsd", y, self.down[...], chosen * shares)
        balance = shares.shape[-1] * jnp.sum(chosen.mean((0, 1)) * shares.mean((0, 1)))
        return y, balance


class Block(nnx.Module):
    """Attention and experts, each added to what comes in."""

    def __init__(self, width: int, experts: int, *, rngs: nnx.Rngs):
        self.norm_1, self.norm_2 = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, width, decode=False, rngs=rngs)
        self.experts = Experts(width, experts, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + self.attention(self.norm_1(x), mask=nnx.make_causal_mask(x[..., 0]))
        y, balance = self.experts(self.norm_2(x))
        return x + y, balance


class Mixture(nnx.Module):
    """Tokens [b, s] in; logits of the next token [b, s, vocabulary] and the routers' losses [depth] out."""

    def __init__(self, vocabulary: int, width: int, experts: int, depth: int, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, experts, rngs=rngs) for _ in range(depth)])
        self.logits = nnx.Linear(width, vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, balances = self.embed(tokens), []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.logits(x), jnp.stack(balances)


def model(depth: int = 4, *, rngs: nnx.Rngs) -> Mixture:
    """Build a small one of `depth` blocks."""
    return Mixture(vocabulary=16, width=16, experts=4, depth=depth, rngs=rngs)


def batch(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences that count up in steps of one to three, and their next tokens."""
    rng = np.random.default_rng(seed)
    tokens = (rng.integers(0, 16, (rows, 1)) + rng.integers(1, 4, (rows, 1)) * np.arange(9)) % 16
    return tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)


def loss(outputs: tuple[jax.Array, jax.Array], labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the summed cross-entropy with one hundredth of the routers' losses for each token, and the number of tokens."""
    logits, balances = outputs
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.sum() + 0.01 * labels.size * balances.sum(), jnp.asarray(labels.size)
