"""Layers that the models of images share, in Flax NNX.

The letters in the shapes: b rows, h and w pixels, c channels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from examples.papers.arguments import MODEL, MOST_PIXELS, MOST_SYMBOLS, check_integers, check_positive, described
from jpipe import InputError

HE = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")
"""Of convolutions before a relu. He et al. 2015, "Delving Deep into Rectifiers"."""


@dataclass(frozen=True)
class MaxPool:
    """The maximum of `size` × `size` pixels."""

    size: int
    stride: int
    padding: int = 0

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c"]:
        return nnx.max_pool(x, (self.size,) * 2, (self.stride,) * 2, ((self.padding,) * 2,) * 2)


@dataclass(frozen=True)
class Conv:
    """The settings of a convolution.

    Attributes:
        outputs: channels.
        kernel: height and width.
        stride: of both.
        padding: pixels above and below, left and right; None: as many as keep the size, with a stride of 1.
    """

    outputs: int
    kernel: tuple[int, int]
    stride: int = 1
    padding: tuple[int, int] | None = None

    def scaled(self, width: float) -> "Conv":
        """Return the same convolution with its channels scaled by `width`, at least one."""
        return replace(self, outputs=channels(self.outputs, width))

    def module(self, inputs: int, *, rngs: nnx.Rngs, **options: Any) -> nnx.Conv:
        """Create the module for this number of input channels."""
        height, width = (size // 2 for size in self.kernel) if self.padding is None else self.padding
        padding = ((height, height), (width, width))
        return nnx.Conv(inputs, self.outputs, self.kernel, self.stride, padding=padding, rngs=rngs, **options)


def check_images(size: int, least: int, classes: int, width: float) -> None:
    """Check the arguments that all models of images have.

    Args:
        size: pixels per side.
        least: the size that leaves one pixel behind the last pooling or stride.
        classes: of the images.
        width: channels relative to the published ones.

    Raises:
        InputError: one is out of range; it is named.
    """
    check_integers(MODEL, 2, MOST_SYMBOLS, classes=classes)
    check_positive(MODEL, 16, width=width)
    check_integers(MODEL, 1, MOST_PIXELS, image_size=size)
    if size < least:
        raise InputError(f"model.arguments.image_size: expected at least {least} pixels per side, found {size}; change it")


def check_batch(images: Any, size: int | None) -> None:
    """Check that the inputs of a model are images of the size in its arguments.

    Args:
        images: the inputs.
        size: pixels per side; None, of layers that do not come first: anything.

    Raises:
        InputError: they are of another size, or no images.
    """
    if size is None:
        return
    shape: tuple[int, ...] = getattr(images, "shape", ())
    if len(shape) != 4 or shape[-1] != 3:
        raise InputError(
            f"data.target: expected images, an array (rows, {size}, {size}, 3), which the model reads, found {described(images)}; "
            "change data.target or model.target"
        )
    if shape[1:3] != (size, size):
        actual = f"{shape[1]} × {shape[2]}"
        raise InputError(
            f"data.arguments.image_size: expected images of {size} × {size} pixels, model.arguments.image_size, found {actual}; "
            "change one of them"
        )


def check_blocks(blocks: Sequence[int], most: Sequence[int]) -> None:
    """Check the number of blocks of each group.

    Args:
        blocks: of each group.
        most: that each may have.

    Raises:
        InputError: no list of integers, another number of groups, or a group without blocks or with too many.
    """
    are_integers = isinstance(blocks, list | tuple) and all(type(count) is int for count in blocks)
    if not are_integers or len(blocks) != len(most) or not all(1 <= count <= limit for count, limit in zip(blocks, most, strict=True)):
        expected = ", ".join(f"1 to {limit}" for limit in most)
        shown = list(blocks) if isinstance(blocks, tuple) else blocks
        raise InputError(f"model.arguments.blocks: expected {len(most)} numbers of blocks: {expected}, found {shown}; change it")


def channels(count: int, width: float) -> int:
    """Scale a number of channels, to at least one."""
    return max(round(count * width), 1)


class Convolution(nnx.Module):
    """A convolution, a ReLU, and optional pooling; a first layer checks the `image_size` of the batch."""

    def __init__(self, inputs: int, conv: Conv, pool: MaxPool | None = None, image_size: int | None = None, *, rngs: nnx.Rngs):
        self.conv = conv.module(inputs, kernel_init=HE, rngs=rngs)
        self.pool, self.image_size = pool, image_size

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c2"]:
        check_batch(x, self.image_size)
        x = nnx.relu(self.conv(x))
        return x if self.pool is None else self.pool(x)


class NormedConvolution(nnx.Module):
    """A convolution without bias, a batch norm, a ReLU unless `activate` is false, and optional pooling.

    A first layer checks the `image_size` of the batch.
    """

    def __init__(
        self,
        inputs: int,
        conv: Conv,
        *,
        init: Any = HE,
        scale_init: Any = nnx.initializers.ones,
        epsilon: float = 1e-5,
        activate: bool = True,
        pool: MaxPool | None = None,
        image_size: int | None = None,
        rngs: nnx.Rngs,
    ):
        self.conv = conv.module(inputs, use_bias=False, kernel_init=init, rngs=rngs)
        self.norm = nnx.BatchNorm(conv.outputs, momentum=0.9, epsilon=epsilon, scale_init=scale_init, rngs=rngs)
        self.activate, self.pool, self.image_size = activate, pool, image_size

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c2"]:
        check_batch(x, self.image_size)
        x = self.norm(self.conv(x))
        x = nnx.relu(x) if self.activate else x
        return x if self.pool is None else self.pool(x)


class Dense(nnx.Module):
    """All pixels of a row as one vector, a linear layer, a ReLU and dropout."""

    def __init__(self, inputs: int, outputs: int, dropout: float, *, rngs: nnx.Rngs):
        he = nnx.initializers.variance_scaling(2.0, "fan_in", "normal")
        self.linear = nnx.Linear(inputs, outputs, kernel_init=he, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs if dropout else None)

    def __call__(self, x: Float[Array, "b ..."]) -> Float[Array, "b c"]:
        return self.dropout(nnx.relu(self.linear(x.reshape(x.shape[0], -1))))


class Classifier(nnx.Module):
    """The mean over pixels, if there are any, dropout, and a linear layer to the logits of the classes, which are near 0 at first."""

    def __init__(self, inputs: int, classes: int, dropout: float = 0.0, *, rngs: nnx.Rngs):
        self.linear = nnx.Linear(inputs, classes, kernel_init=nnx.initializers.normal(0.01), rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs if dropout else None)

    def __call__(self, x: Float[Array, "b ..."]) -> Float[Array, "b v"]:
        x = x.mean(axis=tuple(range(1, x.ndim - 1)))
        return self.linear(self.dropout(x))


def average_pool(x: Float[Array, "b h w c"]) -> Float[Array, "b h w c"]:
    """Return the mean of the 3 × 3 pixels around each pixel, with zeros beyond the edge."""
    with jax.numpy_dtype_promotion("standard"):  # Flax divides by an integer
        return nnx.avg_pool(x, (3, 3), (1, 1), ((1, 1),) * 2)
