"""Train an MLP to tell which of three spirals a point lies on.

With a config: `jpipe train examples/mlp.yaml --allow-code`. From Python, as in `main` below: `python examples/mlp.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe


class Hidden(nnx.Module):
    """One hidden layer."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(inputs, outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.linear(x))


def model(width: int = 64, depth: int = 4) -> jpipe.LayerStack:
    """Return an MLP as layers that can be cut anywhere: points in the plane in, logits of three classes out."""
    hidden = {f"hidden_{i}": lambda rngs: Hidden(width, width, rngs=rngs) for i in range(depth - 1)}
    return jpipe.LayerStack(
        {
            "first": lambda rngs: Hidden(2, width, rngs=rngs),
            **hidden,
            "logits": lambda rngs: nnx.Linear(width, 3, rngs=rngs),
        }
    )


class Spirals:
    """`batches[t]`: points on three spirals, and the number of each point's spiral. A function of (seed, t) only."""

    def __init__(self, seed: int, batch_size: int, noise: float, length: int = 0):
        self.seed, self.batch_size, self.noise, self.length = seed, batch_size, noise, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng((self.seed, t))
        spiral = random.integers(3, size=self.batch_size)
        radius = random.uniform(0.1, 1, self.batch_size)
        angle = 2 * np.pi * (radius + spiral / 3)
        points = radius * np.stack([np.cos(angle), np.sin(angle)]) + self.noise * random.normal(size=(2, self.batch_size))
        return points.T.astype(np.float32), spiral.astype(np.int32)


def data(seed: int, batch_size: int, noise: float = 0.02) -> tuple[Spirals, Spirals]:
    """Return (train, validation); the validation data never depends on the seed."""
    return Spirals(seed + 1, batch_size, noise), Spirals(0, batch_size, noise, length=4)


def main(steps: int = 300) -> None:
    """Train without a config."""
    stack = model()
    plan = jpipe.Plan.even(stack.ids, num_stages=3, schedule="pipedream_2bw", microbatches=4)

    def loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum(), jnp.asarray(labels.size)

    pipe = jpipe.Pipeline(stack, plan, loss, optax.adam(3e-3))
    train, validation = data(seed=0, batch_size=64)
    state = pipe.init(jax.random.key(0), train[0])
    for t in range(steps):
        state, _ = pipe.step(state, train[t])
    state = pipe.drain(state)
    print("validation loss", float(pipe.evaluate(state, validation[0]).loss))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 3)  # a laptop has one; before JAX is used
    main()
