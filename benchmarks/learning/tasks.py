"""Two models with real data: a small GPT on the source of Python's standard library, an MLP on the digits of scikit-learn."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

import jpipe
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.data.splits import read_bytes
from jpipe_lm.data.windows import Windows
from jpipe_lm.models import layers
from jpipe_train.losses import cross_entropy

Batch = tuple[np.ndarray, np.ndarray]

SEQ_LEN = 96  # bytes per sequence


@dataclass(frozen=True)
class Task:
    """A model with its data and optimizer.

    Attributes:
        stack: the model; all layers but the first and the last are equal.
        loss: as `jpipe.Pipeline` takes it; in nats per byte or per image.
        clip: the largest norm of a gradient, or None without clipping and with a constant learning rate.
        batches: the batches without end, from a seed.
        held_out: (inputs, labels), not among the batches.
    """

    stack: jpipe.LayerStack
    loss: Callable[[jax.Array, jax.Array], Any]
    clip: float | None
    batches: Callable[[int], Iterator[Batch]]
    held_out: Batch


def make_gpt(depth: int = 4, width: int = 128, rows: int = 16) -> Task:
    """Return the byte GPT of `configs/gpt-bytes.yaml` with `depth` blocks of a width, and `rows` sequences of 96 bytes per batch."""
    text = read_bytes(None, 0.05)
    train, held_out = Windows(text.train, SEQ_LEN), Windows(text.validation, SEQ_LEN)
    rng = np.random.default_rng(0)
    return Task(
        layers.layers(ModelConfig(depth=depth, width=width, heads=4, seq_len=SEQ_LEN)),
        cross_entropy.loss,
        1.0,
        partial(_shuffled, len(train), rows, lambda numbers: _stack(train, numbers)),
        _stack(held_out, rng.choice(len(held_out), 256, replace=False)),
    )


def make_digits(clip: float | None = None) -> Task:
    """Return an MLP of eight layers of width 64, 32 of 1,437 images per batch, and 360 held out.

    Args:
        clip: the largest norm of a gradient, or None without clipping and with a constant learning rate.
    """
    from sklearn import datasets  # it takes a second to import

    images, labels = datasets.load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(images))
    train, held_out = order[:-360], order[-360:]
    hidden = {f"hidden_{i}": functools.partial(Dense, 64) for i in range(1, 7)}
    return Task(
        jpipe.LayerStack({"in": partial(Dense, 64), **hidden, "out": lambda rngs: nnx.Linear(64, 10, rngs=rngs)}),
        cross_entropy.loss,
        clip,
        partial(_shuffled, len(train), 32, lambda rows: (images[train[rows]], labels[train[rows]])),
        (images[held_out], labels[held_out]),
    )


class Dense(nnx.Module):
    """A linear map of equal width and a ReLU, with He initialization."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(width, width, kernel_init=nnx.initializers.he_normal(), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.linear(x))


def accuracy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the share of the labels that have the largest logit."""
    return (logits.argmax(-1) == labels).mean()


def _shuffled(count: int, size: int, read: Callable[[np.ndarray], Batch], seed: int) -> Iterator[Batch]:
    """Yield epoch after epoch in new orders, without rows at the end that fill no batch."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(count)
        for i in range(count // size):
            yield read(order[i * size : (i + 1) * size])


def _stack(windows: Windows, rows: np.ndarray) -> Batch:
    inputs, labels = zip(*(windows[int(row)] for row in rows), strict=True)
    return np.stack(inputs), np.stack(labels)
