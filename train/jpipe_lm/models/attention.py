"""Grouped-query attention, with segments, windows and soft caps.

Letters in shapes: b rows, s positions, h query heads, k key and value heads, d numbers per head.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jpipe import InputError
from jpipe.context import traced_platform
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.blockwise import LONG, Masked, attend_in_blocks
from jpipe_train.losses.cross_entropy import soft_capped, wider


def attend(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    segments: Int[Array, "b s"] | None,
    config: ModelConfig,
) -> Float[Array, "b s h d"]:
    """Compute attention: causal attention for a decoder, attention to all positions for BERT. Segments do not attend to each other.

    Raises:
        InputError: the config selects cuDNN's attention, but cuDNN is not available or does not support these shapes.
    """
    is_causal, window = config.kind == "decoder", config.window
    masked = Masked(is_causal, window)
    if config.attention == "blockwise" or (config.attention == "xla" and q.shape[1] >= LONG):
        return attend_in_blocks(partial(_masked, config), q, k, v, segments, masked)
    mask = None if segments is None else same_segment(segments, segments)
    if config.attention_soft_cap is not None:
        at = jnp.arange(q.shape[1])
        seen = masked.pairs(at, at)[None, None]
        return _capped(q, k, v, seen if mask is None else seen & mask, config)
    options: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "scale": config.attention_scale}
    options["local_window_size"] = None if window is None else (window - 1, 0)
    if config.attention == "xla":
        return _of_xla(q, k, v, **options)
    where = "model.attention: cudnn needs an NVIDIA GPU with cuDNN"
    if traced_platform() == "cpu":
        raise InputError(f"{where}, found CPUs; set model.attention to xla")
    try:
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{where} that supports this attention; JAX reports: {reason}; set model.attention to xla") from error


def cached_positions(window: int | None, room: int) -> int:
    """Return how many of a row's `room` positions a cache keeps: all positions or, with a window, only the last `window` positions."""
    return room if window is None else min(window, room)


def attend_cached(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    cache: tuple[Float[Array, "b t k d"], Float[Array, "b t k d"]],
    at: Int[Array, "b s"],
    lengths: Int[Array, " b"],
    config: ModelConfig,
) -> tuple[Float[Array, "b s h d"], tuple[Float[Array, "b t k d"], Float[Array, "b t k d"]]]:
    """Compute causal attention for further positions, given the keys and values of earlier positions.

    The cache is a ring buffer: position p is in place p % t. There it replaces position p - t, which is outside all later windows.

    Args:
        q: the queries of the further positions.
        k: the keys of the further positions.
        v: the values of the further positions.
        cache: the keys and values of earlier positions; t is `cached_positions`.
        at: the further positions, which are consecutive in each row.
        lengths: the number of positions of each row. Later positions are not kept in the cache.
        config: the config of the block.

    Returns:
        The outputs, and the cache with the further positions.
    """
    places, count = cache[0].shape[1], at.shape[1]
    end = jnp.minimum(at[:, -1] + 1, lengths)
    is_kept = (at < lengths[:, None]) & (at >= end[:, None] - places)
    rows, into = jnp.arange(at.shape[0])[:, None], jnp.where(is_kept, at % places, places)
    following = cache[0].at[rows, into].set(k, mode="drop"), cache[1].at[rows, into].set(v, mode="drop")
    if count == 1 or places != config.window:
        keys, values, positions = *following, _positions_in(places, end)
    else:  # in the cache, the last of the further positions may replace positions that the first ones attend to
        before = _positions_in(places, jnp.minimum(at[:, 0], lengths))
        keys, values = (jnp.concatenate(parts, axis=1) for parts in zip(cache, (k, v), strict=True))
        positions = jnp.concatenate([before, at], axis=1)
    mask = Masked(True, config.window).pairs(at, positions) & (positions >= 0)[:, None]
    return _masked(config, q, keys, values, mask[:, None]), following


def _positions_in(places: int, end: Int[Array, " b"]) -> Int[Array, "b t"]:
    """Return the position in each place of the ring buffer after all positions before `end` were added; negative for an empty place."""
    last = end[:, None] - 1
    return last - (last - jnp.arange(places)[None]) % places


def _masked(config: ModelConfig, q: Any, k: Any, v: Any, mask: Bool[Array, "#b 1 s t"]) -> Any:
    """Compute attention for the pairs of positions where the mask is True."""
    if config.attention_soft_cap is not None:
        return _capped(q, k, v, mask, config)
    return _of_xla(q, k, v, mask=mask, scale=config.attention_scale)


def _of_xla(q: Float[Array, "b s h d"], k: Float[Array, "b t k d"], v: Float[Array, "b t k d"], **options: Any) -> Float[Array, "b s h d"]:
    """Call JAX's attention. On CPUs and TPUs, float16 is cast to float32, because these cannot sum float16 products in float32."""
    if q.dtype == jnp.float16 and traced_platform() in ("cpu", "tpu"):
        return _of_xla(*(x.astype(jnp.float32) for x in (q, k, v)), **options).astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, implementation="xla", **options)


def _capped(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    mask: Bool[Array, "#b 1 s t"],
    config: ModelConfig,
) -> Float[Array, "b s h d"]:
    """Compute attention with soft-capped scores, which JAX's attention does not support. The softmax is computed in float32 at least."""
    (b, s, heads, size), kv_heads, wide = q.shape, k.shape[2], wider(q.dtype)
    grouped = q.reshape(b, s, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("bskgd,btkd->bkgst", grouped, k, preferred_element_type=wide)
    scale = size**-0.5 if config.attention_scale is None else config.attention_scale
    capped = soft_capped(scores * jnp.asarray(scale, wide), config.attention_soft_cap)
    lowest = jnp.asarray(jnp.finfo(wide).min, wide)
    weights = jax.nn.softmax(jnp.where(mask[:, :, None], capped, lowest), axis=-1)
    return jnp.einsum("bkgst,btkd->bskgd", weights.astype(v.dtype), v).reshape(b, s, heads, size)


def same_segment(segments: Int[Array, "b s"], other: Int[Array, "b t"]) -> Bool[Array, "b 1 s t"]:
    """Return for each pair of positions whether both are in the same segment."""
    return segments[:, None, :, None] == other[:, None, None, :]
