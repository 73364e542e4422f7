"""A vision transformer in Flax NNX: patches, a token for the class, and dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Block(nnx.Module):
    """Attention and an MLP, each added to what comes in."""

    def __init__(self, width: int, heads: int, dropout: float, *, rngs: nnx.Rngs):
        self.attend = nnx.Sequential(nnx.LayerNorm(width, rngs=rngs), nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs))
        self.think = nnx.Sequential(
            nnx.LayerNorm(width, rngs=rngs),
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.gelu,
            nnx.Dropout(dropout, rngs=rngs),
            nnx.Linear(4 * width, width, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attend(x)
        return x + self.think(x)


class ViT(nnx.Module):
    """Images [b, h, w, 3] in, logits [b, classes] out."""

    def __init__(self, side: int, patch: int, width: int, heads: int, depth: int, classes: int, dropout: float, *, rngs: nnx.Rngs):
        patches = (side // patch) ** 2
        self.patches = nnx.Conv(3, width, (patch, patch), (patch, patch), rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, width)))
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (1, 1 + patches, width)))
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.blocks = nnx.Sequential(*[Block(width, heads, dropout, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(len(x), -1, x.shape[-1])
        token = jnp.broadcast_to(self.token[...], (len(x), 1, x.shape[-1]))
        x = self.dropout(jnp.concatenate([token, x], axis=1) + self.positions[...])
        return self.head(self.norm(self.blocks(x)[:, 0]))


def model(depth: int = 4, *, rngs: nnx.Rngs) -> ViT:
    """Build a small one of `depth` blocks."""
    return ViT(side=8, patch=4, width=16, heads=2, depth=depth, classes=4, dropout=0.1, rngs=rngs)


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
