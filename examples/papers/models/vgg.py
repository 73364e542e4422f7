"""AlexNet and VGG-16 as layers of a pipeline: convolutions, with the pooling that follows them, then dense layers.

Both are the variants of torchvision, with as many parameters: AlexNet is that of 2014, in one piece and without normalization.
"""

from functools import partial
from typing import Any

import jpipe
from examples.papers.arguments import MODEL, check_choice, check_fractions
from examples.papers.models.convolutions import Classifier, Conv, Convolution, Dense, MaxPool, NormedConvolution, channels, check_images

Convolutions = tuple[tuple[str, Conv, MaxPool | None], ...]
"""The id of each layer, what it is like, and how it is pooled."""

ALEXNET: Convolutions = (
    ("conv1", Conv(64, (11, 11), 4, (2, 2)), MaxPool(3, 2)),
    ("conv2", Conv(192, (5, 5)), MaxPool(3, 2)),
    ("conv3", Conv(384, (3, 3)), None),
    ("conv4", Conv(256, (3, 3)), None),
    ("conv5", Conv(256, (3, 3)), MaxPool(3, 2)),
)
"""Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks"."""

VGG_16: Convolutions = tuple(
    (f"conv{block}_{i + 1}", Conv(outputs, (3, 3)), MaxPool(2, 2) if i == count - 1 else None)
    for block, (count, outputs) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)], 1)
    for i in range(count)
)
"""Simonyan and Zisserman 2014, "Very Deep Convolutional Networks for Large-Scale Image Recognition", configuration D."""


def alexnet(image_size: int = 224, classes: int = 1000, width: float = 1.0, dropout: float = 0.5) -> jpipe.LayerStack:
    """Return AlexNet's layers `conv1` … `conv5`, `fc6`, `fc7`, `fc8` as constructors: nothing is allocated here.

    Inputs of these models are images (b, s, s, 3), outputs logits (b, v).

    Args:
        image_size: s, pixels per side.
        classes: v.
        width: channels of each layer, relative to the published ones.
        dropout: of the outputs of the first two dense layers.

    Raises:
        InputError: an argument is out of range; images are so small that none of their pixels reaches the dense layers.
    """
    check_images(image_size, 63, classes, width)
    check_fractions(MODEL, dropout=dropout)
    return _with_dense_layers(ALEXNET, Convolution, image_size, classes, width, dropout)


def vgg16(
    image_size: int = 224, classes: int = 1000, width: float = 1.0, dropout: float = 0.5, batch_norm: bool = False
) -> jpipe.LayerStack:
    """Return VGG-16's layers `conv1_1` … `conv5_3`, `fc6`, `fc7`, `fc8`.

    Args:
        image_size: as in `alexnet`.
        classes: as in `alexnet`.
        width: as in `alexnet`.
        dropout: as in `alexnet`.
        batch_norm: put a batch norm behind each convolution, as torchvision's `vgg16_bn` has it: small models then learn sooner.

    Raises:
        InputError: as in `alexnet`.
    """
    check_images(image_size, 32, classes, width)
    check_fractions(MODEL, dropout=dropout)
    check_choice(MODEL, (True, False), batch_norm=batch_norm)
    return _with_dense_layers(VGG_16, NormedConvolution if batch_norm else Convolution, image_size, classes, width, dropout)


def _with_dense_layers(
    convolutions: Convolutions, kind: type[Convolution | NormedConvolution], size: int, classes: int, width: float, dropout: float
) -> jpipe.LayerStack:
    """Stack convolutions of one kind, then `fc6`, `fc7` and `fc8`, the first of them over all remaining pixels."""
    layers: dict[str, Any] = {}
    inputs = 3
    image_size: int | None = size
    for layer_id, conv, pool in convolutions:
        scaled = conv.scaled(width)
        layers[layer_id] = partial(kind, inputs, scaled, pool=pool, image_size=image_size)
        image_size = None
        inputs, size = scaled.outputs, _size_after(conv, pool, size)
    hidden = channels(4096, width)
    layers["fc6"] = partial(Dense, size * size * inputs, hidden, dropout)
    layers["fc7"] = partial(Dense, hidden, hidden, dropout)
    layers["fc8"] = partial(Classifier, hidden, classes)
    return jpipe.LayerStack(layers)


def _size_after(conv: Conv, pool: MaxPool | None, size: int) -> int:
    """Return the pixels per side after a layer."""
    padding = conv.kernel[0] // 2 if conv.padding is None else conv.padding[0]
    size = (size + 2 * padding - conv.kernel[0]) // conv.stride + 1
    return size if pool is None else (size - pool.size) // pool.stride + 1
