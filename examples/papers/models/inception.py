"""Inception-v3 without its auxiliary head: each block of branches is a layer.

Reference: Szegedy et al. 2015, "Rethinking the Inception Architecture for Computer Vision". Names are those of the released model.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import jpipe
from examples.papers.arguments import MODEL, check_fractions
from examples.papers.models.convolutions import (
    Classifier,
    Conv,
    MaxPool,
    NormedConvolution,
    average_pool,
    check_batch,
    check_blocks,
    check_images,
)

Step = Conv | Callable[[Any], Any] | tuple[Conv, Conv]
"""Of a branch: a convolution, a pooling, or two convolutions of the same input, put beside each other."""
Branch = tuple[Step, ...]


def _conv(outputs: int, height: int, width: int | None = None) -> Conv:
    return Conv(outputs, (height, height if width is None else width))


def _halving(outputs: int) -> Conv:
    return Conv(outputs, (3, 3), 2, (0, 0))


_POOL = MaxPool(3, 2)


def _a(pooled: int) -> tuple[Branch, ...]:
    five, three = (_conv(48, 1), _conv(64, 5)), (_conv(64, 1), _conv(96, 3), _conv(96, 3))
    return (_conv(64, 1),), five, three, (average_pool, _conv(pooled, 1))


def _c(inner: int) -> tuple[Branch, ...]:
    once = _conv(inner, 1), _conv(inner, 1, 7), _conv(192, 7, 1)
    twice = _conv(inner, 1), _conv(inner, 7, 1), _conv(inner, 1, 7), _conv(inner, 7, 1), _conv(192, 1, 7)
    return (_conv(192, 1),), once, twice, (average_pool, _conv(192, 1))


_E_PAIR = _conv(384, 1, 3), _conv(384, 3, 1)
_E: tuple[Branch, ...] = (
    (_conv(320, 1),),
    (_conv(384, 1), _E_PAIR),
    (_conv(448, 1), _conv(384, 3), _E_PAIR),
    (average_pool, _conv(192, 1)),
)

LAYERS: MappingProxyType[str, tuple[Branch, ...]] = MappingProxyType(
    {
        "conv_1a": ((_halving(32),),),
        "conv_2a": ((Conv(32, (3, 3), 1, (0, 0)),),),
        "conv_2b": ((_conv(64, 3), _POOL),),
        "conv_3b": ((_conv(80, 1),),),
        "conv_4a": ((Conv(192, (3, 3), 1, (0, 0)), _POOL),),
        "mixed_5b": _a(32),
        "mixed_5c": _a(64),
        "mixed_5d": _a(64),
        "mixed_6a": ((_halving(384),), (_conv(64, 1), _conv(96, 3), _halving(96)), (_POOL,)),
        "mixed_6b": _c(128),
        "mixed_6c": _c(160),
        "mixed_6d": _c(160),
        "mixed_6e": _c(192),
        "mixed_7a": ((_conv(192, 1), _halving(320)), (_conv(192, 1), _conv(192, 1, 7), _conv(192, 7, 1), _halving(192)), (_POOL,)),
        "mixed_7b": _E,
        "mixed_7c": _E,
    }
)
"""The branches of each layer but the last, `fc`; their outputs are put beside each other."""

GROUPS = tuple(tuple(f"mixed_{group}{letter}" for letter in letters) for group, letters in ((5, "bcd"), (6, "bcde"), (7, "bc")))
"""The blocks that keep the image's size. Those behind them in a group can be left out."""


class Pair(nnx.Module):
    """Two convolutions of the same input, concatenated."""

    def __init__(self, inputs: int, convs: tuple[Conv, Conv], *, rngs: nnx.Rngs):
        self.parts = nnx.List([_module(inputs, conv, rngs) for conv in convs])

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h w c2"]:
        return jnp.concatenate([part(x) for part in self.parts], axis=-1)


class Mixed(nnx.Module):
    """Branches of the same input, concatenated; a first layer checks the `image_size` of the batch."""

    def __init__(self, inputs: int, branches: tuple[Branch, ...], image_size: int | None = None, *, rngs: nnx.Rngs):
        self.image_size = image_size
        self.branches = nnx.List([_branch(inputs, branch, rngs) for branch in branches])

    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b h2 w2 c2"]:
        check_batch(x, self.image_size)
        return jnp.concatenate([branch(x) for branch in self.branches], axis=-1)


def inception_v3(
    image_size: int = 299, classes: int = 1000, width: float = 1.0, blocks: Sequence[int] = (3, 4, 2), dropout: float = 0.5
) -> jpipe.LayerStack:
    """Return the layers `conv_1a` … `conv_4a`, `mixed_5b` … `mixed_7c`, `fc`, as constructors.

    Args:
        image_size: as in `examples.papers.models.vgg.alexnet`; only the check of the batches depends on it.
        classes: as in `alexnet`.
        width: as in `alexnet`.
        blocks: how many of the published blocks that keep the image's size there are in each of the three groups, from the first one on:
            `mixed_5b` and so on, `mixed_6b` and so on, `mixed_7b` and so on.
        dropout: before the last layer.

    Raises:
        InputError: an argument is out of range; images are too small; numbers of blocks do not fit.
    """
    check_images(image_size, 75, classes, width)
    check_fractions(MODEL, dropout=dropout)
    check_blocks(blocks, tuple(map(len, GROUPS)))
    layers: dict[str, Any] = {}
    inputs = 3
    left_out = {layer_id for group, count in zip(GROUPS, blocks, strict=True) for layer_id in group[count:]}
    for layer_id, published in LAYERS.items():
        if layer_id in left_out:
            continue
        branches = tuple(tuple(_scaled(step, width) for step in branch) for branch in published)
        layers[layer_id] = partial(Mixed, inputs, branches, None if layers else image_size)
        inputs = sum(_outputs(branch, inputs) for branch in branches)
    return jpipe.LayerStack({**layers, "fc": partial(Classifier, inputs, classes, dropout)})


def _branch(inputs: int, branch: Branch, rngs: nnx.Rngs) -> nnx.Module:
    """Chain the modules of a branch."""
    modules = []
    for i, step in enumerate(branch):
        modules.append(_module(_outputs(branch[:i], inputs), step, rngs))
    return nnx.Sequential(*modules)


def _module(inputs: int, step: Step, rngs: nnx.Rngs) -> Any:
    if isinstance(step, tuple):
        return Pair(inputs, step, rngs=rngs)
    if isinstance(step, Conv):
        return NormedConvolution(inputs, step, init=nnx.initializers.truncated_normal(0.1), epsilon=1e-3, rngs=rngs)
    return step


def _scaled(step: Step, width: float) -> Step:
    if isinstance(step, tuple):
        return step[0].scaled(width), step[1].scaled(width)
    return step.scaled(width) if isinstance(step, Conv) else step


def _outputs(branch: Branch, inputs: int) -> int:
    """Return the number of output channels of a branch."""
    for step in branch:
        if isinstance(step, tuple):
            inputs = step[0].outputs + step[1].outputs
        elif isinstance(step, Conv):
            inputs = step.outputs
    return inputs
