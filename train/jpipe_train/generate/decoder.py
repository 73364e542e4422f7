"""A decoder that keeps the keys and values of the tokens it has seen, its layers on one device or on several, in their order.

The letters in the shapes: b rows, s positions, v symbols.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jpipe.context import without_mesh
from jpipe_train.config.model_config import ModelConfig
from jpipe_train.models import transformer

Tree = Any  # nested dicts of arrays
_PIECE = 1024  # positions of a prompt at a time: attention takes memory for each of them times all there may be
_SHORTEST = 16  # positions; lengths are powers of two from here on, so that there are few programs to compile


class Layer:
    """A Flax module of which only the shapes are there."""

    def __init__(self, constructor: Callable[..., nnx.Module]) -> None:
        self._graph, self._state = nnx.split(nnx.eval_shape(lambda: constructor(rngs=nnx.Rngs(0))))

    @property
    def specs(self) -> Tree:
        """The shapes and dtypes of its parameters."""
        return nnx.to_pure_dict(self._state)

    def bound(self, params: Tree) -> Any:
        """The module with these parameters."""
        return nnx.merge(self._graph, jax.tree.unflatten(jax.tree.structure(self._state), jax.tree.leaves(params)))


def layers_of(config: ModelConfig) -> dict[str, Layer]:
    """The layers of a built-in decoder by id; its blocks are one object."""
    still = config.model_copy(update={"dropout": 0.0})
    block = Layer(partial(transformer.Block, still))
    blocks = {f"block_{i}": block for i in range(config.depth)}
    return {"embed": Layer(partial(transformer.Embed, still)), **blocks, "head": Layer(partial(transformer.Head, still, None))}


def bytes_of(config: ModelConfig, rows: int, positions: int) -> dict[str, int]:
    """The bytes of each layer, by id, for so many rows that come to so many positions: its parameters, its keys and values."""
    computes = np.dtype(transformer.dtype_of(config)).itemsize
    kept = 2 * computes * math.prod(_cache_shape(config, rows, room_for(config, positions)))
    found = {}
    for layer_id, layer in layers_of(config).items():
        params = sum(spec.size * (computes if spec.ndim > 1 else 4) for spec in jax.tree.leaves(layer.specs))
        found[layer_id] = params + (kept if layer_id.startswith("block_") else 0)
    return found


def room_for(config: ModelConfig, positions: int) -> int:
    """How many positions are kept where so many are needed."""
    return min(config.max_positions_used, max(_SHORTEST, 1 << (positions - 1).bit_length()))


def _cache_shape(config: ModelConfig, rows: int, room: int) -> tuple[int, int, int, int]:
    """Of the keys of a block, and of its values."""
    return rows, room, config.kv_heads_used, config.head_size_used


class Decoder:
    """Continues rows of tokens, one token at a time.

    Args:
        config: of the model, a decoder.
        params: of each layer, by id, on its device.
        devices: of each layer, by id.
    """

    def __init__(self, config: ModelConfig, params: Mapping[str, Tree], devices: Mapping[str, jax.Device]) -> None:
        self._config, self._params, self._devices = config, params, devices
        layers = layers_of(config)
        embed, block, head = (layers[layer_id] for layer_id in ("embed", "block_0", "head"))

        def last_of(params: Tree, x: Any, last: Any) -> Any:
            return head.bound(params)(x[jnp.arange(x.shape[0]), last][:, None])[:, 0]

        self._embed = jax.jit(lambda params, tokens, at: embed.bound(params).vectors(tokens, at))
        self._block = jax.jit(lambda params, *given: block.bound(params).following(*given), donate_argnums=(2, 3))
        self._head = jax.jit(last_of)
        self._caches: dict[str, tuple[Any, Any]] = {}
        self._lengths = np.zeros(0, np.int32)
        self._room = 0

    @without_mesh()
    def begin(self, prompts: Sequence[Sequence[int]], positions: int) -> Float[Array, "b v"]:
        """See the prompts, in one pass, or of long ones a piece at a time; what was seen before is forgotten.

        Args:
            prompts: of each row its tokens, at least one.
            positions: so many, or fewer, will the longest row have in the end, if the model has as many.

        Returns:
            The logits of each row's next token, on the last layer's device.
        """
        self._lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        self._room = room_for(self._config, positions)
        length = room_for(self._config, int(np.max(self._lengths)))
        tokens = np.zeros((len(prompts), length), np.int32)  # what follows a shorter prompt is overwritten before it is looked at
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        shape = _cache_shape(self._config, len(prompts), self._room)
        blocks = [layer_id for layer_id in self._params if layer_id.startswith("block_")]
        self._caches = {}
        for layer_id in blocks:
            made = (jnp.zeros(shape, transformer.dtype_of(self._config), device=self._devices[layer_id]) for _ in range(2))
            self._caches[layer_id] = next(made), next(made)
        found = None
        for start in range(0, length, _PIECE):
            piece = tokens[:, start : start + _PIECE]
            at = np.broadcast_to(np.arange(start, start + piece.shape[1], dtype=np.int32), piece.shape)
            logits = self._forward(piece, at, np.clip(self._lengths - 1 - start, 0, piece.shape[1] - 1))
            found = logits if found is None else jnp.where((self._lengths > start)[:, None], logits, found)
        assert found is not None
        return found

    @without_mesh()
    def follow(self, tokens: Int[Array, " b"]) -> Float[Array, "b v"]:
        """See one more token of each row, which may still be on its way; of rows without a position left the logits mean nothing."""
        at = np.minimum(self._lengths, self._room - 1)[:, None]
        self._lengths = self._lengths + np.int32(1)
        return self._forward(tokens[:, None], at, np.zeros_like(self._lengths))

    def _forward(self, tokens: Any, at: Int[np.ndarray, "b s"], last: Int[np.ndarray, " b"]) -> Float[Array, "b v"]:
        device = self._devices["embed"]
        tokens, here = jax.device_put((tokens, at), device)
        x = self._embed(self._params["embed"], tokens, here)
        for layer_id, (keys, values) in self._caches.items():
            if self._devices[layer_id] != device:
                device = self._devices[layer_id]
                x, here = jax.device_put((x, at), device)
            x, *cache = self._block(self._params[layer_id], x, keys, values, here)
            self._caches[layer_id] = cache[0], cache[1]
        x, last = jax.device_put((x, last), self._devices["head"])
        return self._head(self._params["head"], x, last)
