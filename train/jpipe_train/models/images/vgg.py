"""AlexNet and VGG-16 as layers of a pipeline: convolutions, then dense layers. Pooling belongs to the layer before it.

Both are the variants of torchvision, with as many parameters: AlexNet is that of 2014, in one piece and without normalization.
"""

from functools import partial
from typing import Any

import jpipe
from jpipe_train.config.targets.vision_config import Alexnet, Vgg16
from jpipe_train.models.images.convolutions import Classifier, Conv, Convolution, Dense, MaxPool, NormedConvolution, channels

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


def alexnet(arguments: Alexnet, batch_size: int) -> jpipe.LayerStack:
    """AlexNet, with the layers `conv1` … `conv5`, `fc6`, `fc7`, `fc8` as constructors: nothing is allocated here.

    Inputs of these models are images (b, s, s, 3), outputs logits (b, v) of v classes.

    Args:
        arguments: its size.
        batch_size: of any batch; the layers do not depend on it.
    """
    return _with_dense_layers(arguments, ALEXNET)


def vgg16(arguments: Vgg16, batch_size: int) -> jpipe.LayerStack:
    """As `alexnet`, with the layers `conv1_1` … `conv5_3`, `fc6`, `fc7`, `fc8`."""
    return _with_dense_layers(arguments, VGG_16, arguments.batch_norm)


def _with_dense_layers(arguments: Alexnet | Vgg16, convolutions: Convolutions, batch_norm: bool = False) -> jpipe.LayerStack:
    """Convolutions, then `fc6`, `fc7` and `fc8`, the first of them over all pixels that are left."""
    found: dict[str, Any] = {}
    inputs, size = 3, arguments.image_size
    for layer_id, conv, pool in convolutions:
        scaled = conv.scaled(arguments.width)
        found[layer_id] = partial(NormedConvolution if batch_norm else Convolution, inputs, scaled, pool=pool)
        inputs, size = scaled.outputs, _size_after(conv, pool, size)
    width, dropout = channels(4096, arguments.width), arguments.dropout
    found["fc6"] = partial(Dense, size * size * inputs, width, dropout)
    found["fc7"] = partial(Dense, width, width, dropout)
    found["fc8"] = partial(Classifier, width, arguments.classes)
    return jpipe.LayerStack(found)


def _size_after(conv: Conv, pool: MaxPool | None, size: int) -> int:
    """Pixels per side after a layer."""
    padding = conv.kernel[0] // 2 if conv.padding is None else conv.padding[0]
    size = (size + 2 * padding - conv.kernel[0]) // conv.stride + 1
    return size if pool is None else (size - pool.size) // pool.stride + 1
