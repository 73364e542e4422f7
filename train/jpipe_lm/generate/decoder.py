"""A decoder with a cache of keys and values. Its layers are on one device, or in order on several devices.

The letters in the shapes: b rows, s positions, v symbols.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jpipe.context import without_mesh
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import attention, transformer

Tree = Any  # nested dicts of arrays
Share = Callable[[Any, jax.ShapeDtypeStruct, str, int], np.ndarray]
"""A function (array or None, its shape and dtype, a description, source) that returns the array of process `source` in all processes. All
processes must call it."""
_PIECE = 1024  # the most positions of a prompt that are read at a time
_SCORES = 2**26  # the most attention scores at a time, for all rows, heads and pairs of positions
_SHORTEST = 16  # the least number of positions; numbers are powers of two, so that few programs are compiled


class Layer:
    """A Flax module with shapes and dtypes in place of parameters."""

    def __init__(self, constructor: Callable[..., nnx.Module]) -> None:
        self._graph, self._state = nnx.split(nnx.eval_shape(lambda: constructor(rngs=nnx.Rngs(0))))

    @property
    def specs(self) -> Tree:
        """The shapes and dtypes of the parameters."""
        return nnx.to_pure_dict(self._state)

    def bound(self, params: Tree) -> Any:
        """Return the module with these parameters."""
        return nnx.merge(self._graph, jax.tree.unflatten(jax.tree.structure(self._state), jax.tree.leaves(params)))


def layers_of(config: ModelConfig) -> dict[str, Layer]:
    """Return a dict from layer ids to the layers of a built-in decoder. Equal blocks are one object."""
    without_dropout = config.model_copy(update={"dropout": 0.0})
    configs = without_dropout.blocks
    layers = {id(block): Layer(partial(transformer.Block, block)) for block in configs}
    return {
        "embed": Layer(partial(transformer.Embed, without_dropout)),
        **{f"block_{i}": layers[id(block)] for i, block in enumerate(configs)},
        "head": Layer(partial(transformer.Head, without_dropout, None)),
    }


def bytes_of(config: ModelConfig, rows: int, positions: int) -> dict[str, int]:
    """Return a dict from layer ids to the bytes of the layer's parameters, keys and values, for a number of rows and positions."""
    computes, room = np.dtype(transformer.dtype_of(config)).itemsize, room_for(config, positions)
    shapes = (jax.eval_shape(lambda block=block: transformer.new_cache(block, rows, room)) for block in config.blocks)
    caches = {f"block_{i}": sum(part.size * part.dtype.itemsize for part in cache) for i, cache in enumerate(shapes)}
    sizes = {}
    for layer_id, layer in layers_of(config).items():
        params = sum(spec.size * (computes if spec.ndim > 1 else 4) for spec in jax.tree.leaves(layer.specs))
        sizes[layer_id] = params + caches.get(layer_id, 0)
    return sizes


def scratch_of(config: ModelConfig, rows: int, positions: int) -> int:
    """Return the bytes of attention scores and weights that the device of any block needs while it reads prompts."""
    room = room_for(config, positions)
    piece = min(room, _piece(config, rows, room))
    return 2 * 4 * rows * config.heads * piece * _keys(config, room, piece)


def _piece(config: ModelConfig, rows: int, room: int) -> int:
    """Return the number of prompt positions to read at a time: a power of two, so small that the scores need moderate memory."""
    piece = _PIECE
    while piece > _SHORTEST and rows * config.heads * piece * _keys(config, room, piece) > _SCORES:
        piece //= 2
    return piece


def _keys(config: ModelConfig, room: int, piece: int) -> int:
    """Return the largest number of keys for which a position has scores: those in the cache and, with a window, in the piece."""
    cached = [(block, attention.cached_positions(block.window, room)) for block in config.blocks]
    return max(places + (piece if places == block.window else 0) for block, places in cached)


def room_for(config: ModelConfig, positions: int) -> int:
    """Return the number of positions to reserve for rows of up to `positions` positions."""
    return min(config.max_positions_used, max(_SHORTEST, 1 << (positions - 1).bit_length()))


class Decoder:
    """Continues rows of tokens, one token at a time.

    Args:
        config: the config of the model, a decoder.
        params: a dict from the ids of this process's layers to their parameters, on their devices.
        devices: a dict from layer ids to devices.
        share: shares arrays between the processes that have the devices; None if one process has all devices.
    """

    def __init__(
        self, config: ModelConfig, params: Mapping[str, Tree], devices: Mapping[str, jax.Device], share: Share | None = None
    ) -> None:
        self._config, self._params, self._devices, self._share = config, params, devices, share
        layers = layers_of(config)
        embed, head = layers["embed"], layers["head"]

        def apply_head(params: Tree, x: Any, last: Any) -> Any:
            return head.bound(params)(x[jnp.arange(x.shape[0]), last][:, None])[:, 0]

        self._embed = jax.jit(lambda params, tokens, at: embed.bound(params).vectors(tokens, at))
        programs = {id(layer): _program(layer) for layer_id, layer in layers.items() if layer_id.startswith("block_")}
        self._blocks = {layer_id: programs[id(layer)] for layer_id, layer in layers.items() if id(layer) in programs}
        self._head = jax.jit(apply_head)
        self._configs = {f"block_{i}": block for i, block in enumerate(config.blocks)}
        self._caches: dict[str, tuple[Any, ...]] = {}
        self._lengths = np.zeros(0, np.int32)
        self._room = 0
        self._tokens: list[Any] = []  # the tokens of each row, so that rows can be read again
        self._original = _original_positions(config)

    @without_mesh()
    def begin(self, prompts: Sequence[Sequence[int]], positions: int) -> Float[Array, "b v"] | None:
        """Read the prompts, at least one token each, long ones piece by piece, and forget earlier prompts.

        `positions` is the largest length that a row will have, up to the positions of the model. Return the logits of the next token of
        each row, shape (b, v), on the device of the last layer; None in processes without it.
        """
        self._tokens = [list(prompt) for prompt in prompts]
        self._room = room_for(self._config, positions)
        return self._read(prompts)

    def _read(self, prompts: Sequence[Sequence[int]]) -> Float[Array, "b v"] | None:
        """Read rows beginning with their first token."""
        self._lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
        length = room_for(self._config, int(np.max(self._lengths)))
        tokens = np.zeros((len(prompts), length), np.int32)  # positions after a shorter prompt are not kept
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        self._caches = {}
        for layer_id in self._params.keys() & self._blocks.keys():
            with jax.default_device(self._devices[layer_id]):
                cache = transformer.new_cache(self._configs[layer_id], len(prompts), self._room)
            self._caches[layer_id] = jax.device_put(cache, self._devices[layer_id])
        last_logits = None
        size = _piece(self._config, len(prompts), self._room)
        for start in range(0, length, size):
            piece = tokens[:, start : start + size]
            at = np.broadcast_to(np.arange(start, start + piece.shape[1], dtype=np.int32), piece.shape)
            logits = self._forward(piece, at, np.clip(self._lengths - 1 - start, 0, piece.shape[1] - 1))
            last_logits = (
                logits if last_logits is None or logits is None else jnp.where((self._lengths > start)[:, None], logits, last_logits)
            )
        return last_logits

    @without_mesh()
    def follow(self, tokens: Int[Array, " b"] | Int[np.ndarray, " b"]) -> Float[Array, "b v"] | None:
        """Read one more token of each row, and return the logits of the next token like `begin`. The tokens may not be computed yet.

        The logits of rows without a free position are meaningless. If a row exceeds the original positions of LongRoPE, all its positions
        rotate at other speeds, so the rows are read again.
        """
        if self._original is not None:
            for row, token in zip(self._tokens, np.asarray(tokens).tolist(), strict=True):
                row.append(max(token, 0))
            if np.any(self._lengths == self._original):
                return self._read([row[: self._room] for row in self._tokens])
        at = np.minimum(self._lengths, self._room - 1)[:, None]
        self._lengths = self._lengths + np.int32(1)
        return self._forward(tokens[:, None], at, np.zeros_like(self._lengths))

    def everywhere(self, tokens: Int[Array, " b"] | None) -> Int[Array, " b"] | Int[np.ndarray, " b"]:
        """Return the tokens that were chosen from the logits, in all processes. Processes without logits pass None."""
        if self._share is None:
            assert tokens is not None
            return tokens
        like = jax.ShapeDtypeStruct(self._lengths.shape, np.dtype(np.int32))
        return self._share(tokens, like, "tokens", self._devices["head"].process_index)

    def _forward(self, tokens: Any, at: Int[np.ndarray, "b s"], last: Int[np.ndarray, " b"]) -> Float[Array, "b v"] | None:
        device, here, x, positions = self._devices["embed"], jax.process_index(), None, None
        if device.process_index == here:
            tokens, positions = jax.device_put((tokens, at), device)
            x = self._embed(self._params["embed"], tokens, positions)
        for layer_id, block in self._blocks.items():
            target = self._devices[layer_id]
            x = self._moved(x, at.shape, device, target)
            if target.process_index == here:
                positions = positions if device == target else jax.device_put(at, target)
                x, self._caches[layer_id] = block(self._params[layer_id], x, self._caches[layer_id], positions, self._lengths)
            device = target
        target = self._devices["head"]
        x = self._moved(x, at.shape, device, target)
        return None if target.process_index != here else self._head(self._params["head"], x, jax.device_put(last, target))

    def _moved(self, x: Any, shape: tuple[int, int], device: jax.Device, target: jax.Device) -> Any:
        """Move activations of shape (rows, positions, width) to a device; return None if this process does not have the target."""
        if device.process_index != target.process_index and self._share is not None:
            like = jax.ShapeDtypeStruct((*shape, self._config.width), np.dtype(transformer.dtype_of(self._config)))
            x = self._share(x, like, "activations", device.process_index)
        return None if target.process_index != jax.process_index() else x if device == target else jax.device_put(x, target)


def _program(layer: Layer) -> Callable[..., Any]:
    """Return a compiled function that applies a block to further positions. It reuses the memory of keys and values."""
    return jax.jit(lambda params, *inputs: layer.bound(params).following(*inputs), donate_argnums=2)


def _original_positions(config: ModelConfig) -> int | None:
    """Return the length above which positions rotate at other speeds (LongRoPE), or None."""
    scaling = config.rope_scaling
    return scaling.original_positions if scaling is not None and scaling.kind == "longrope" else None
