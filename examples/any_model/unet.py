"""A U-Net in Flax NNX: several resolutions, batch norm, and a skip connection at each but the lowest."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Block(nnx.Module):
    """Two convolutions with batch norm."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        self.conv_1 = nnx.Conv(inputs, outputs, (3, 3), use_bias=False, rngs=rngs)
        self.conv_2 = nnx.Conv(outputs, outputs, (3, 3), use_bias=False, rngs=rngs)
        self.norm_1 = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        self.norm_2 = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.norm_2(self.conv_2(nnx.relu(self.norm_1(self.conv_1(x))))))


class UNet(nnx.Module):
    """Images [b, h, w, channels] in, one logit a pixel out, [b, h, w]."""

    def __init__(self, inputs: int, channels: tuple[int, ...], *, rngs: nnx.Rngs):
        pairs = list(itertools.pairwise(channels))
        self.first = Block(inputs, channels[0], rngs=rngs)
        self.down = nnx.List([Block(high, low, rngs=rngs) for high, low in pairs])
        self.grow = nnx.List([nnx.ConvTranspose(low, high, (2, 2), (2, 2), rngs=rngs) for high, low in reversed(pairs)])
        self.up = nnx.List([Block(2 * high, high, rngs=rngs) for high, _ in reversed(pairs)])
        self.last = nnx.Conv(channels[0], 1, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        skips = [self.first(x)]
        for block in self.down:
            skips.append(block(nnx.max_pool(skips[-1], (2, 2), (2, 2))))
        x = skips.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(jnp.concatenate([skips.pop(), grow(x)], axis=-1))
        return self.last(x)[..., 0]


def model(depth: int = 3) -> UNet:
    """Build a small one of `depth` resolutions."""
    return UNet(inputs=1, channels=tuple(4 * 2**i for i in range(depth)), rngs=nnx.Rngs(0))


def batch(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy images of a disc, and which pixels it covers."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:8, :8]
    row, column = rng.uniform(1, 7, (2, rows, 1, 1))
    covered = (y - row) ** 2 + (x - column) ** 2 < rng.uniform(1.5, 3, (rows, 1, 1)) ** 2
    images = covered[..., None] + 0.5 * rng.normal(size=(rows, 8, 8, 1))
    return images.astype(np.float32), covered.astype(np.float32)


def loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the summed cross-entropy, and the number of pixels."""
    return optax.sigmoid_binary_cross_entropy(logits, labels).sum(), jnp.asarray(labels.size)
