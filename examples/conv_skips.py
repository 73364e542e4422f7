"""Train a small U-Net that finds discs in noisy images; its skip connections cross stages, because layers pass pytrees.

With a config: `jpipe train examples/conv_skips.yaml --allow-code`. From Python, as in `main` below: `python examples/conv_skips.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe

Flow = tuple[jax.Array, tuple[jax.Array, ...]]  # the features, and what is kept for the way up


class Conv(nnx.Module):
    """Convolution, batch norm, relu."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        self.conv = nnx.Conv(inputs, outputs, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(outputs, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.norm(self.conv(x)))


class Down(nnx.Module):
    """Halve the input, and keep it for the way up."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        self.conv = Conv(inputs, outputs, rngs=rngs)

    def __call__(self, flow: Flow) -> Flow:
        x, skips = flow
        return self.conv(nnx.max_pool(x, (2, 2), (2, 2))), (*skips, x)


class Up(nnx.Module):
    """Double the input, and join it with the input kept last on the way down."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        self.conv = Conv(inputs + outputs, outputs, rngs=rngs)

    def __call__(self, flow: Flow) -> Flow:
        x, (*skips, last) = flow
        doubled = x.repeat(2, axis=1).repeat(2, axis=2)
        return self.conv(jnp.concatenate([doubled, last], axis=-1)), tuple(skips)


def model(width: int = 8) -> jpipe.LayerStack:
    """Return a U-Net as layers: images [b, 16, 16, 1] in, a logit for each pixel out, [b, 16, 16, 1]."""
    return jpipe.LayerStack(
        {
            "stem": lambda rngs: Conv(1, width, rngs=rngs),
            "begin": lambda x: (x, ()),
            "down_0": lambda rngs: Down(width, 2 * width, rngs=rngs),
            "down_1": lambda rngs: Down(2 * width, 4 * width, rngs=rngs),
            "up_1": lambda rngs: Up(4 * width, 2 * width, rngs=rngs),
            "up_0": lambda rngs: Up(2 * width, width, rngs=rngs),
            "end": lambda flow: flow[0],
            "logit": lambda rngs: nnx.Conv(width, 1, (1, 1), rngs=rngs),
        }
    )


def loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the cross-entropy of "is this pixel part of a disc?".

    Returns:
        The sum over the pixels, and their number.
    """
    return optax.sigmoid_binary_cross_entropy(logits, labels).sum(), jnp.asarray(labels.size)


class Discs:
    """`batches[t]`: noisy images of one disc each, and the pixels of that disc. A function of (seed, t) only."""

    def __init__(self, seed: int, batch_size: int, noise: float, length: int = 0):
        self.seed, self.batch_size, self.noise, self.length = seed, batch_size, noise, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, t: int) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng((self.seed, t))
        center = random.uniform(4, 12, (self.batch_size, 1, 1, 2))
        radius = random.uniform(2, 5, (self.batch_size, 1, 1))
        pixels = np.stack(np.mgrid[:16, :16], axis=-1)
        discs = (np.linalg.norm(pixels - center, axis=-1) < radius)[..., None].astype(np.float32)
        return discs + self.noise * random.normal(size=discs.shape).astype(np.float32), discs


def data(seed: int, batch_size: int, noise: float = 0.5) -> tuple[Discs, Discs]:
    """Return (train, validation); the validation data never depends on the seed."""
    return Discs(seed + 1, batch_size, noise), Discs(0, batch_size, noise, length=4)


def main(steps: int = 100) -> None:
    """Train without a config."""
    stack = model()
    plan = jpipe.Plan.even(stack.ids, num_stages=4, schedule="pipedream_flush", microbatches=4)
    pipe = jpipe.Pipeline(stack, plan, loss, optax.adam(1e-2))
    train, validation = data(seed=0, batch_size=32)
    state = pipe.init(jax.random.key(0), train[0])
    for t in range(steps):
        state, _ = pipe.step(state, train[t])
    print("validation loss", float(pipe.evaluate(state, validation[0]).loss))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # a laptop has one; before JAX is used
    main()
