"""Attention that is computed block by block of queries. Memory grows with the length of a row, not with its square.

Letters in shapes: b rows, s positions, h query heads, k key and value heads, d numbers per head, e per query, q queries of a block, t keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jpipe_train.losses.cross_entropy import wider

LONG = 8192
"""Attention of rows with at least this many positions is computed in blocks, unless the user chooses cudnn."""
_PAIRS = 2**25  # the most pairs of a query and a key in a block, over all rows and heads; a block holds the weight of each pair
_SHORTEST = 16  # the fewest queries of a block

Core = Callable[[Any, Any, Any, Any], Any]  # (queries, keys, values, mask) -> outputs


@dataclass(frozen=True)
class Masked:
    """The rule for which keys a query attends to, apart from segments."""

    is_causal: bool  # whether a query attends only to keys at its own position and at earlier positions
    window: int | None = None  # if given, a query attends only to keys less than this many positions before it

    def pairs(self, queries: Int[Array, "*b q"], keys: Int[Array, "*b t"]) -> Bool[Array, "*b q t"]:
        """Return for each pair of a query position and a key position whether the query attends to the key."""
        distance = queries[..., :, None] - keys[..., None, :]
        mask = distance >= 0 if self.is_causal else jnp.ones(distance.shape, bool)
        return mask if self.window is None else mask & (distance < self.window)


def attend_in_blocks(
    core: Core,
    q: Float[Array, "b s h e"],
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    segments: Int[Array, "b t"] | None,
    masked: Masked,
    size: int | None = None,
) -> Float[Array, "b s h d"]:
    """Compute attention block by block. The backward pass recomputes each block.

    A block does not read keys that are outside the windows of all its queries.

    Args:
        core: computes the attention of some queries to some keys. Its mask (b or 1, 1, q, t) is True where a query attends to a key.
        q: the queries, which are at the last s positions.
        masked: the rule that says which keys in its segment a query attends to.
        size: the number of queries of a block; None chooses a number for which a block needs moderate memory.
    """
    (rows, length, heads, _), before = q.shape, k.shape[1] - q.shape[1]
    if size is None:
        size = queries_of_block(rows * heads * k.shape[1])
    count = -(-length // min(size, length))
    size = -(-length // count)
    fill = count * size - length
    if segments is None:
        segments = jnp.zeros((1, k.shape[1]), jnp.int32)
    q, k, v = (jnp.pad(x, ((0, 0), (0, fill), (0, 0), (0, 0))) for x in (q, k, v))
    segments = jnp.pad(segments, ((0, 0), (0, fill)), constant_values=-1)
    return _in_blocks(_Blocks(core, masked, size, count, before), q, k, v, segments)[:, :length]


def queries_of_block(keys: int) -> int:
    """Return a number of queries of a block that needs moderate memory, if each reads `keys` keys, over all rows and heads."""
    return max(_SHORTEST, _PAIRS // keys)


@dataclass(frozen=True)
class _Blocks:
    """The division of attention into `count` blocks of `size` queries, which `before` keys precede. See `attend_in_blocks`."""

    core: Core
    masked: Masked
    size: int
    count: int
    before: int

    @property
    def keys(self) -> int:
        """The number of keys that a block reads."""
        length, window = self.before + self.size * self.count, self.masked.window
        return length if window is None or not self.masked.is_causal else min(length, self.size + window - 1)

    def first_key(self, block: Any) -> Any:
        """Return the position of the first key that a block reads."""
        return jnp.maximum(self.before + (block + 1) * self.size - self.keys, 0)

    def compute(self, block: Any, q: Any, k: Any, v: Any, segments: Any) -> Any:
        """Compute the attention of one block, given its queries and the keys that it reads."""
        start, first = self.before + block * self.size, self.first_key(block)
        pairs = self.masked.pairs(start + jnp.arange(self.size), first + jnp.arange(self.keys))
        own = jax.lax.dynamic_slice_in_dim(segments, start, self.size, 1)
        others = jax.lax.dynamic_slice_in_dim(segments, first, self.keys, 1)
        return self.core(q, k, v, pairs[None, None] & (own[:, None, :, None] == others[:, None, None, :]))

    def read(self, block: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Return the queries of a block, and the keys and values that it reads."""
        of_keys = partial(jax.lax.dynamic_slice_in_dim, start_index=self.first_key(block), slice_size=self.keys, axis=1)
        return jax.lax.dynamic_slice_in_dim(q, block * self.size, self.size, 1), of_keys(k), of_keys(v)

    def numbers(self) -> Any:
        return jnp.arange(self.count)


def _whole(blocks: Any) -> Any:
    """Join the positions of all blocks (blocks, b, q, h, d) along one axis."""
    count, rows, size, *other = blocks.shape
    return blocks.swapaxes(0, 1).reshape(rows, count * size, *other)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_blocks(blocks: _Blocks, q: Any, k: Any, v: Any, segments: Any) -> Any:
    return _whole(jax.lax.map(lambda block: blocks.compute(block, *blocks.read(block, q, k, v), segments), blocks.numbers()))


def _forward(blocks: _Blocks, q: Any, k: Any, v: Any, segments: Any) -> tuple[Any, Any]:
    return _in_blocks(blocks, q, k, v, segments), (q, k, v, segments)


def _backward(blocks: _Blocks, saved: Any, gradient: Any) -> tuple[Any, Any, Any, None]:
    """Compute the gradients block by block. The gradients of keys and values are summed in float32 at least."""
    q, k, v, segments = saved
    wide = wider(k.dtype)

    def add(sums: Any, block: Any) -> Any:
        _, pull = jax.vjp(lambda *read: blocks.compute(block, read[0], read[1], read[2], segments), *blocks.read(block, q, k, v))
        of_q, *of_keys = pull(jax.lax.dynamic_slice_in_dim(gradient, block * blocks.size, blocks.size, 1))
        first = blocks.first_key(block)

        def added(total: Any, part: Any) -> Any:
            before = jax.lax.dynamic_slice_in_dim(total, first, blocks.keys, 1)
            return jax.lax.dynamic_update_slice_in_dim(total, before + part.astype(wide), first, 1)

        return [added(total, part) for total, part in zip(sums, of_keys, strict=True)], of_q

    sums, of_q = jax.lax.scan(add, [jnp.zeros(x.shape, wide) for x in (k, v)], blocks.numbers())
    of_k, of_v = (total.astype(k.dtype) for total in sums)
    return _whole(of_q), of_k, of_v, None


_in_blocks.defvjp(_forward, _backward)
