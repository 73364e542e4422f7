"""The models of the PipeDream papers as layer stacks, only ever profiled, and an Adam that keeps float32 copies of bfloat16 weights.

The letters in the shapes: b rows, h w c an image, s positions, d width, v symbols.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jpipe

Tree = Any


class Model(NamedTuple):
    """What a profile needs: the layers, what a microbatch of so many rows looks like, and the loss."""

    stack: jpipe.LayerStack
    batch: Callable[[int], tuple[Tree, Tree]]
    loss: Callable[[Any, Any], tuple[jax.Array, jax.Array]]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Summed over all labels, and their number."""
    nats = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
    return nats.sum(), jnp.asarray(labels.size, jnp.float32)


# Images ------------------------------------------------------------------------------------------------------------------


def vgg16() -> Model:
    """VGG-16 over 224 × 224 pixels: 13 convolutions, 5 poolings, 3 dense layers."""
    layers: dict[str, Any] = {}
    for group, (convolutions, channels) in enumerate([(2, 64), (2, 128), (3, 256), (3, 512), (3, 512)], start=1):
        for n in range(1, convolutions + 1):
            layers[f"conv{group}_{n}"] = nn.Conv(channels, (3, 3))
            layers[f"relu{group}_{n}"] = nn.relu
        layers[f"pool{group}"] = partial(nn.max_pool, window_shape=(2, 2), strides=(2, 2))
    layers["flat"] = lambda x: x.reshape(x.shape[0], -1)
    for n, width in ((6, 4096), (7, 4096)):
        layers |= {f"fc{n}": nn.Dense(width), f"relu{n}": nn.relu}
    return Model(jpipe.LayerStack({**layers, "fc8": nn.Dense(1000)}), _images, cross_entropy)


class Bottleneck(nn.Module):
    """ResNet's block of 1 × 1, 3 × 3 and 1 × 1 convolutions, each normalized over the batch."""

    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        norm = partial(nn.BatchNorm, use_running_average=not train)
        y = nn.relu(norm()(nn.Conv(self.width, (1, 1), use_bias=False)(x)))
        y = nn.relu(norm()(nn.Conv(self.width, (3, 3), (self.stride, self.stride), use_bias=False)(y)))
        y = norm()(nn.Conv(4 * self.width, (1, 1), use_bias=False)(y))
        if y.shape != x.shape:
            x = norm()(nn.Conv(4 * self.width, (1, 1), (self.stride, self.stride), use_bias=False)(x))
        return nn.relu(x + y)


class Stem(nn.Module):
    """ResNet's first convolution and pooling."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(64, (7, 7), (2, 2), use_bias=False)(x)))
        return nn.max_pool(x, (3, 3), (2, 2), "SAME")


def resnet50() -> Model:
    """ResNet-50 over 224 × 224 pixels, a layer each bottleneck."""
    layers: dict[str, Any] = {"stem": Stem()}
    for group, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=1):
        for n in range(blocks):
            layers[f"block{group}_{n}"] = Bottleneck(width, stride=2 if n == 0 and group > 1 else 1)
    layers |= {"mean": lambda x: x.mean((1, 2)), "fc": nn.Dense(1000)}
    return Model(jpipe.LayerStack(layers), _images, cross_entropy)


def _images(rows: int) -> tuple[Tree, Tree]:
    return jax.ShapeDtypeStruct((rows, 224, 224, 3), np.float32), jax.ShapeDtypeStruct((rows,), np.int32)


# Translation -------------------------------------------------------------------------------------------------------------


class Encode(nn.Module):
    """One LSTM of the encoder; the first one reads both ways. The target words ride along."""

    width: int
    both_ways: bool = False
    skip: bool = True

    @nn.compact
    def __call__(self, carried: Tree) -> Tree:
        x, target = carried
        y = nn.RNN(nn.LSTMCell(self.width))(x)
        if self.both_ways:
            back = nn.RNN(nn.LSTMCell(self.width), reverse=True, keep_order=True)(x)
            y = nn.Dense(self.width, use_bias=False)(jnp.concatenate([y, back], -1))
        return (x + y if self.skip else y), target


class Words(nn.Module):
    """The vectors of source or target words."""

    vocabulary: int
    width: int
    target: bool

    @nn.compact
    def __call__(self, carried: Tree) -> Tree:
        embed = nn.Embed(self.vocabulary, self.width)
        if self.target:
            encoded, words = carried
            return encoded, embed(words)
        return embed(carried["source"]), carried["target"]


class Decode(nn.Module):
    """One LSTM of the decoder, which attends to the encoder's outputs."""

    width: int
    attends: bool = False

    @nn.compact
    def __call__(self, carried: Tree) -> Tree:
        encoded, x, context = carried if len(carried) == 3 else (*carried, None)
        y = nn.RNN(nn.LSTMCell(self.width))(x if context is None else jnp.concatenate([x, context], -1))
        if self.attends:
            weights = jax.nn.softmax(jnp.einsum("btd,bsd->bts", nn.Dense(self.width, use_bias=False)(y), encoded))
            context = jnp.einsum("bts,bsd->btd", weights, encoded)
            return encoded, y, context
        return encoded, x + y, context


def gnmt(lstms: int, vocabulary: int = 32320, width: int = 1024, words: int = 48) -> Model:
    """GNMT with `lstms` LSTM layers, half of them in the encoder."""
    half = lstms // 2
    layers: dict[str, Any] = {"source": Words(vocabulary, width, target=False), "encode_0": Encode(width, both_ways=True, skip=False)}
    layers |= {f"encode_{n}": Encode(width) for n in range(1, half)}
    layers |= {"target": Words(vocabulary, width, target=True), "decode_0": Decode(width, attends=True)}
    layers |= {f"decode_{n}": Decode(width) for n in range(1, half)}
    layers |= {"only_decoded": lambda carried: carried[1], "classify": nn.Dense(vocabulary)}

    def batch(rows: int) -> tuple[Tree, Tree]:
        spec = jax.ShapeDtypeStruct((rows, words), np.int32)
        return {"source": spec, "target": spec}, spec

    return Model(jpipe.LayerStack(layers), batch, cross_entropy)


# GPT ---------------------------------------------------------------------------------------------------------------------


HALF = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}


class Embedding(nn.Module):
    """Symbols and positions to vectors."""

    vocabulary: int
    width: int

    @nn.compact
    def __call__(self, symbols: jax.Array) -> jax.Array:
        positions = nn.Embed(symbols.shape[1], self.width, **HALF)(jnp.arange(symbols.shape[1])[None])
        return nn.Embed(self.vocabulary, self.width, **HALF)(symbols) + positions


class Block(nn.Module):
    """One transformer block in bfloat16, heads of 64 to 128."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        b, s, d = x.shape
        y = nn.Dense(3 * d, **HALF)(nn.LayerNorm(**HALF)(x)).reshape(b, s, 3, self.heads, d // self.heads)
        y = jax.nn.dot_product_attention(y[:, :, 0], y[:, :, 1], y[:, :, 2], is_causal=True).reshape(b, s, d)
        x = x + nn.Dense(d, **HALF)(y)
        return x + nn.Dense(d, **HALF)(nn.gelu(nn.Dense(4 * d, **HALF)(nn.LayerNorm(**HALF)(x))))


class Logits(nn.Module):
    """The last norm and the logits of the symbols."""

    vocabulary: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(self.vocabulary, use_bias=False, **HALF)(nn.LayerNorm(**HALF)(x))


def gpt(blocks: int, width: int, heads: int, sequence: int = 512, vocabulary: int = 51200) -> Model:
    """A GPT in bfloat16 with `blocks` blocks."""
    layers = {"embed": Embedding(vocabulary, width), **{f"block_{n}": Block(width, heads) for n in range(blocks)}}

    def batch(rows: int) -> tuple[Tree, Tree]:
        spec = jax.ShapeDtypeStruct((rows, sequence), np.int32)
        return spec, spec

    return Model(jpipe.LayerStack({**layers, "head": Logits(vocabulary)}), batch, cross_entropy)


def mixed_precision_adam(learning_rate: float = 1e-4) -> optax.GradientTransformation:
    """Adam over float32 copies of the weights, which are its state: 12 bytes per parameter, as in the papers' mixed precision."""
    adam = optax.adam(learning_rate)

    def init(params: Tree) -> Tree:
        copies = jax.tree.map(lambda p: p.astype(jnp.float32), params)
        return copies, adam.init(copies)

    def update(gradients: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        copies, inner = state
        steps, inner = adam.update(jax.tree.map(lambda g: g.astype(jnp.float32), gradients), inner, copies)
        new = jax.tree.map(jnp.add, copies, steps)
        moved = jax.tree.map(lambda p, n: (n.astype(p.dtype) - p).astype(p.dtype), params, new)
        return moved, (new, inner)

    return optax.GradientTransformation(init, update)
