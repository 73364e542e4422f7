"""A model that compiles quickly and has everything that a checkpoint keeps: batch statistics, dropout, momentum."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jpipe

Batch = tuple[np.ndarray, np.ndarray]
WIDTH, BATCHES = 8, 32


class Block(nnx.Module):
    """A linear layer, batch normalization and dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the block to rows."""
        return self.dropout(jnp.tanh(self.norm(self.linear(x))))


def layers() -> jpipe.LayerStack:
    """Return four layers."""
    blocks = {f"block_{number}": lambda rngs: Block(rngs) for number in range(3)}
    return jpipe.LayerStack({**blocks, "head": lambda rngs: nnx.Linear(WIDTH, 1, rngs=rngs)})


def data(seed: int, batch_size: int) -> tuple[list[Batch], list[Batch]]:
    """Return random rows, labelled with their first column."""
    rows = np.random.default_rng(seed).normal(size=(BATCHES + 1, batch_size, WIDTH)).astype(np.float32)
    batches = [(x, x[:, :1]) for x in rows]
    return batches[:BATCHES], batches[BATCHES:]


def loss(outputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, int]:
    """Compute the squared error.

    Returns:
        The sum of the errors, and their number.
    """
    return ((outputs - labels) ** 2).sum(), labels.size
