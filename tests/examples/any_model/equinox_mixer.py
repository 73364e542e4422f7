"""An MLP-Mixer in Equinox, with dropout."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Block(eqx.Module):
    """An MLP over the positions and one over the channels of an image, each added to what comes in."""

    norm_1: eqx.nn.LayerNorm
    norm_2: eqx.nn.LayerNorm
    over_positions: eqx.nn.MLP
    over_channels: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, positions: int, width: int, dropout: float, key: jax.Array):
        key_1, key_2 = jax.random.split(key)
        self.norm_1, self.norm_2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.over_positions = eqx.nn.MLP(positions, positions, 2 * positions, 1, jax.nn.gelu, key=key_1)
        self.over_channels = eqx.nn.MLP(width, width, 2 * width, 1, jax.nn.gelu, key=key_2)
        self.dropout = eqx.nn.Dropout(dropout)

    def __call__(self, x: jax.Array, key: jax.Array | None, inference: bool) -> jax.Array:
        x = x + jax.vmap(self.over_positions, 1, 1)(jax.vmap(self.norm_1)(x))
        return x + self.dropout(jax.vmap(self.over_channels)(jax.vmap(self.norm_2)(x)), key=key, inference=inference)


class Mixer(eqx.Module):
    """Images [b, h, w, 3] in, logits [b, classes] out."""

    patches: eqx.nn.Linear
    blocks: list[Block]
    head: eqx.nn.Linear
    patch: int = eqx.field(static=True)

    def __init__(self, side: int, patch: int, width: int, depth: int, classes: int, dropout: float, key: jax.Array):
        key_1, key_2, *keys = jax.random.split(key, 2 + depth)
        self.patch = patch
        self.patches = eqx.nn.Linear(3 * patch**2, width, key=key_1)
        self.blocks = [Block((side // patch) ** 2, width, dropout, k) for k in keys]
        self.head = eqx.nn.Linear(width, classes, key=key_2)

    def __call__(self, images: jax.Array, key: jax.Array | None = None, train: bool = False) -> jax.Array:
        b, h, w, channels = images.shape
        x = images.reshape(b, h // self.patch, self.patch, w // self.patch, self.patch, channels).swapaxes(2, 3)
        x = jax.vmap(jax.vmap(self.patches))(x.reshape(b, -1, channels * self.patch**2))
        for i, block in enumerate(self.blocks):
            keys = None if key is None else jax.random.split(jax.random.fold_in(key, i), b)
            x = jax.vmap(lambda x, key, block=block: block(x, key, not train), (0, None if key is None else 0))(x, keys)
        return jax.vmap(self.head)(x.mean(1))


def model(depth: int) -> Mixer:
    return Mixer(side=8, patch=4, width=16, depth=depth, classes=4, dropout=0.1, key=jax.random.key(0))


def batch(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return noisy stripes of four orientations, and which."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 4, rows).astype(np.int32)
    y, x = np.mgrid[:8, :8]
    patterns = np.stack([np.sin(2.0 * wave) for wave in (x, y, x + y, x - y)])
    images = patterns[labels][..., None] + rng.normal(size=(rows, 8, 8, 3))
    return images.astype(np.float32), labels


def loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum(), jnp.asarray(labels.size)
