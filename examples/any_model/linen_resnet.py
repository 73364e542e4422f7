"""A residual net with batch norm in Flax Linen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn


class Block(nn.Module):
    """Two convolutions, added to what comes in, which is projected where its shape changes."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.Conv(self.channels, (3, 3), self.stride, use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(y))
        y = nn.Conv(self.channels, (3, 3), use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9, scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.channels, (1, 1), self.stride, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """Images [b, h, w, 3] in, logits [b, classes] out."""

    classes: int
    channels: int
    blocks: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = nn.Conv(self.channels, (3, 3), use_bias=False)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        for i, count in enumerate(self.blocks):
            for j in range(count):
                x = Block(self.channels * 2**i, stride=2 if i > 0 and j == 0 else 1)(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)))


def model(depth: int = 2) -> ResNet:
    """Build a small one of twice `depth` blocks."""
    return ResNet(classes=4, channels=8, blocks=(depth, depth))


def batch(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy stripes of four orientations, and which."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, rows).astype(np.int32)
    y, x = np.mgrid[:8, :8]
    patterns = np.stack([np.sin(2.0 * wave) for wave in (x, y, x + y, x - y)])
    images = patterns[labels][..., None] + rng.normal(size=(rows, 8, 8, 3))
    return images.astype(np.float32), labels


def loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the summed cross-entropy, and the number of images."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum(), jnp.asarray(labels.size)
