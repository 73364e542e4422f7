"""A residual network of Linen modules, with dropout, fits a function of two numbers.

With a config: `jpipe train examples/linen_model.yaml --allow-code`. From Python, as in `main` below: `python examples/linen_model.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jpipe


class Block(nn.Module):
    """x + mlp(norm(x)). A parameter `train` tells training from evaluation: jpipe sets it."""

    width: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dropout(self.dropout, deterministic=not train)(nn.Dense(self.width)(y))


def model(width: int = 32, depth: int = 3, dropout: float = 0.02) -> jpipe.LayerStack:
    """From points [b, 2] to values [b, 1]."""
    blocks = {f"block_{i}": Block(width, dropout) for i in range(depth)}
    return jpipe.LayerStack({"in": nn.Dense(width), **blocks, "norm": nn.LayerNorm(), "out": nn.Dense(1)})


def loss(outputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The squared error, summed, and over how many."""
    return jnp.square(outputs - labels).sum(), jnp.asarray(labels.size)


class Waves:
    """`batches[t]`: points of a square, with the height of a wave there. A function of (seed, t) only."""

    def __init__(self, seed: int, batch_size: int, length: int = 0):
        self.seed, self.batch_size, self.length = seed, batch_size, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        points = np.random.default_rng((self.seed, t)).uniform(-1, 1, (self.batch_size, 2)).astype(np.float32)
        return points, np.sin(4 * points[:, :1]) * np.cos(3 * points[:, 1:])


def data(seed: int, batch_size: int) -> tuple[Waves, Waves]:
    """(train, validation). What is for validation never depends on the seed."""
    return Waves(seed + 1, batch_size), Waves(0, batch_size, length=4)


def main(steps: int = 400) -> None:
    """The same without a config."""
    stack = model()
    plan = jpipe.Plan.even(stack.ids, num_stages=3, schedule="pipedream", microbatches=2)
    pipe = jpipe.Pipeline(stack, plan, loss, optax.lion(1e-3))
    train, validation = data(seed=0, batch_size=64)
    state = pipe.init(jax.random.key(0), train[0])
    for t in range(steps):
        state, _ = pipe.step(state, train[t])
    state = pipe.drain(state)
    print("validation loss", float(pipe.evaluate(state, validation[0]).loss))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 3)  # a laptop has one; before JAX is used
    main()
