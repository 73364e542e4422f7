"""The built-in models of images as layers of a pipeline: AlexNet, VGG-16, ResNet-50, Inception-v3.

Each is the variant of torchvision, with as many parameters. What branches is inside one layer; pooling belongs to the layer before it.
"""

from functools import partial
from typing import Any

import jpipe
from train.config.vision_config import VisionConfig
from train.models import inception, resnet
from train.models.convolutions import Classifier, Conv, Convolution, Dense, MaxPool, channels

Convolutions = tuple[tuple[str, Conv, MaxPool | None], ...]
"""The id of each layer, what it is like, and how it is pooled."""

ALEXNET: Convolutions = (
    ("conv1", Conv(64, (11, 11), 4, (2, 2)), MaxPool(3, 2)),
    ("conv2", Conv(192, (5, 5)), MaxPool(3, 2)),
    ("conv3", Conv(384, (3, 3)), None),
    ("conv4", Conv(256, (3, 3)), None),
    ("conv5", Conv(256, (3, 3)), MaxPool(3, 2)),
)
"""Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks": AlexNet in one piece, without normalization."""

VGG_16: Convolutions = tuple(
    (f"conv{block}_{i + 1}", Conv(outputs, (3, 3)), MaxPool(2, 2) if i == count - 1 else None)
    for block, (count, outputs) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)], 1)
    for i in range(count)
)
"""Simonyan and Zisserman 2014, "Very Deep Convolutional Networks for Large-Scale Image Recognition", configuration D."""


def layers(config: VisionConfig) -> jpipe.LayerStack:
    """The layers of a model, as constructors: nothing is allocated here.

    Inputs are images (b, s, s, 3) with s = `config.image_size_used`, outputs logits (b, v) of v classes.
    """
    if config.kind == "alexnet":
        return jpipe.LayerStack(_with_dense_layers(config, ALEXNET))
    if config.kind == "vgg16":
        return jpipe.LayerStack(_with_dense_layers(config, VGG_16))
    return jpipe.LayerStack((resnet if config.kind == "resnet50" else inception).layers(config))


def _with_dense_layers(config: VisionConfig, convolutions: Convolutions) -> dict[str, Any]:
    """Convolutions, then `fc6`, `fc7` and `fc8`, the first of them over all pixels that are left."""
    found: dict[str, Any] = {}
    inputs, size = 3, config.image_size_used
    for layer_id, conv, pool in convolutions:
        scaled = conv.scaled(config.width)
        found[layer_id] = partial(Convolution, inputs, scaled, pool)
        inputs, size = scaled.outputs, _size_after(conv, pool, size)
    width, dropout = channels(4096, config.width), config.dropout_used
    found["fc6"] = partial(Dense, size * size * inputs, width, dropout)
    found["fc7"] = partial(Dense, width, width, dropout)
    found["fc8"] = partial(Classifier, width, config.classes)
    return found


def _size_after(conv: Conv, pool: MaxPool | None, size: int) -> int:
    """Pixels per side after a layer."""
    padding = conv.kernel[0] // 2 if conv.padding is None else conv.padding[0]
    size = (size + 2 * padding - conv.kernel[0]) // conv.stride + 1
    return size if pool is None else (size - pool.size) // pool.stride + 1
