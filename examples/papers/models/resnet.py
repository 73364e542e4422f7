"""ResNet-50: each residual block is a layer.

Reference: He et al. 2015, "Deep Residual Learning for Image Recognition". A block halves the image in its 3 × 3 convolution, as in
torchvision, not in the one before it.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

import jpipe
from examples.papers.models.convolutions import Classifier, Conv, MaxPool, NormedConvolution, channels, check_blocks, check_images

_MOST_BLOCKS = 64  # of a group


class Stem(nnx.Module):
    """The first convolution, with pooling."""

    def __init__(self, outputs: int, image_size: int, *, rngs: nnx.Rngs):
        self.conv = NormedConvolution(3, Conv(outputs, (7, 7), 2), image_size=image_size, rngs=rngs)

    def __call__(self, x: Float[Array, "b h w 3"]) -> Float[Array, "b h2 w2 c"]:
        return MaxPool(3, 2, 1)(self.conv(x))


class Block(nnx.Module):
    """Convolutions of 1 × 1, 3 × 3 and 1 × 1, added to the input, which is projected if its shape differs, and a ReLU.

    The scale of the last norm begins with 0, so that a block is only its shortcut at first (Goyal et al. 2017, "Accurate, Large Minibatch
    SGD"): deep models then learn sooner.
    """

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int, *, rngs: nnx.Rngs):
        self.reduce = NormedConvolution(inputs, Conv(inner, (1, 1)), rngs=rngs)
        self.conv = NormedConvolution(inner, Conv(inner, (3, 3), stride), rngs=rngs)
        self.expand = NormedConvolution(inner, Conv(outputs, (1, 1)), scale_init=nnx.initializers.zeros, activate=False, rngs=rngs)
        if stride != 1 or inputs != outputs:
            self.project = NormedConvolution(inputs, Conv(outputs, (1, 1), stride), activate=False, rngs=rngs)
        self.projects = stride != 1 or inputs != outputs

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c2"]:
        shortcut = self.project(x) if self.projects else x
        return nnx.relu(self.expand(self.conv(self.reduce(x))) + shortcut)


def resnet50(image_size: int = 224, classes: int = 1000, width: float = 1.0, blocks: Sequence[int] = (3, 4, 6, 3)) -> jpipe.LayerStack:
    """Return the layers `conv1`, `block1_1` … `block4_3`, `fc`, as constructors.

    The blocks of the four groups have 64, 128, 256 and 512 channels inside, and four times as many outside.

    Args:
        image_size: as in `examples.papers.models.vgg.alexnet`; only the check of the batches depends on it.
        classes: as in `alexnet`.
        width: as in `alexnet`.
        blocks: how many there are in each of the four groups, of which each but the first halves the image.

    Raises:
        InputError: an argument is out of range; images are too small; numbers of blocks do not fit.
    """
    check_images(image_size, 32, classes, width)
    check_blocks(blocks, (_MOST_BLOCKS,) * 4)
    inputs = channels(64, width)
    layers: dict[str, Any] = {"conv1": partial(Stem, inputs, image_size)}
    for group, count in enumerate(blocks):
        inner, outputs = (channels(size * 2**group, width) for size in (64, 256))
        same = partial(Block, outputs, inner, outputs, 1)  # one object, so that jpipe traces it once
        first = partial(Block, inputs, inner, outputs, 1 if group == 0 else 2)
        layers |= {f"block{group + 1}_{i + 1}": same if i else first for i in range(count)}
        inputs = outputs
    return jpipe.LayerStack({**layers, "fc": partial(Classifier, inputs, classes)})
