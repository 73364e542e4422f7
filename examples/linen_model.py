"""Train a residual network of Linen modules, with dropout, to fit a function of two numbers.

With a config: `jpipe train examples/linen_model.yaml --allow-code`. From Python, as in `main` below: `python examples/linen_model.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jpipe


class Block(nn.Module):
    """x + mlp(norm(x)). jpipe sets the parameter `train`."""

    width: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dropout(self.dropout, deterministic=not train)(nn.Dense(self.width)(y))


def model(width: int = 32, depth: int = 3, dropout: float = 0.02) -> jpipe.LayerStack:
    """Return the network as layers: points [b, 2] in, values [b, 1] out."""
    blocks = {f"block_{i}": Block(width, dropout) for i in range(depth)}
    return jpipe.LayerStack({"in": nn.Dense(width), **blocks, "norm": nn.LayerNorm(), "out": nn.Dense(1)})


def loss(outputs: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the squared error.

    Returns:
        The sum over the values, and their number.
    """
    return jnp.square(outputs - labels).sum(), jnp.asarray(labels.size)


class Waves:
    """`batches[t]`: points in a square, and the height of a wave at each. A function of (seed, t) only."""

    def __init__(self, seed: int, batch_size: int, length: int = 0):
        self.seed, self.batch_size, self.length = seed, batch_size, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        points = np.random.default_rng((self.seed, t)).uniform(-1, 1, (self.batch_size, 2)).astype(np.float32)
        return points, np.sin(4 * points[:, :1]) * np.cos(3 * points[:, 1:])


def data(seed: int, batch_size: int) -> tuple[Waves, Waves]:
    """Return (train, validation); the validation data never depends on the seed."""
    return Waves(seed + 1, batch_size), Waves(0, batch_size, length=4)


def main(steps: int = 400) -> None:
    """Train without a config."""
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
