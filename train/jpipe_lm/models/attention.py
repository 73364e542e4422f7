"""Grouped-query attention, with segments, windows and soft caps.

Letters in shapes: b rows, s positions, h query heads, k key and value heads, d numbers per head, e numbers per query: d,
or with sinks one more, the logit of a key without a value.
"""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jpipe import InputError
from jpipe.context import traced_platform, traced_positions
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import kernels
from jpipe_lm.models.blockwise import LONG, Masked, attend_in_blocks
from jpipe_train.losses.cross_entropy import soft_capped, wider


def attend(
    q: Float[Array, "b s h e"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    segments: Int[Array, "b s"] | None,
    config: ModelConfig,
) -> Float[Array, "b s h d"]:
    """Compute attention: causal attention for a decoder, attention to all positions for BERT. Segments do not attend to each other.

    Raise InputError if the config selects a kernel that this platform does not have, or that does not support these shapes.
    """
    masked = Masked(config.kind == "decoder", config.sliding_window)
    kernel, platform = config.attention, jax.default_backend()
    is_auto = kernel == "auto" and platform == traced_platform()  # a planner lowers what it traces for an absent device for this one, too
    if kernel == "splash" or (is_auto and platform == "tpu" and kernels.fits_splash(q.shape[1]) and not config.sinks):
        return _by_splash(q, k, v, segments, masked, config)
    if kernel == "cudnn":
        return _by_cudnn(q, k, v, segments, masked, config)
    is_long = q.shape[1] >= LONG
    if is_auto and platform == "gpu" and _suits_cudnn(q, config) and (segments is None or not is_long):
        with contextlib.suppress(InputError):  # cuDNN is not installed, or does not support these shapes
            return _by_cudnn(q, k, v, segments, masked, config)
    if kernel == "blockwise" or is_long:
        return attend_in_blocks(partial(_masked, config), q, k, v, segments, masked)
    mask = None if segments is None else same_segment(segments, segments)
    if not _suits_jax(config):
        at = jnp.arange(q.shape[1])
        seen = masked.pairs(at, at)[None, None]
        return _weighted(q, k, v, seen if mask is None else seen & mask, config)
    return _of_xla(q, k, v, mask=mask, **_options(masked, config))


def _options(masked: Masked, config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of JAX's attention."""
    window = None if masked.window is None else (masked.window - 1, 0)
    return {"is_causal": masked.is_causal, "scale": config.attention_scale, "local_window_size": window}


def _scale(q: Any, config: ModelConfig) -> float:
    return float(q.shape[-1] ** -0.5 if config.attention_scale is None else config.attention_scale)


def _by_splash(q: Any, k: Any, v: Any, segments: Any, masked: Masked, config: ModelConfig) -> Any:
    change, positions = "set model.attention to auto", kernels.BLOCKS[-1]
    if (platform := traced_platform()) != "tpu":
        raise InputError(f"model.attention: splash needs TPUs, found {'CPUs' if platform == 'cpu' else 'GPUs'}; {change}")
    if not kernels.fits_splash(q.shape[1]):
        raise InputError(
            f"model.attention: splash needs rows of a multiple of {positions} positions, found {q.shape[1]}; change them, or {change}"
        )
    wide = wider(q.dtype) if q.dtype == jnp.float16 else q.dtype  # TPUs have no float16
    scale, dtype = _scale(q, config), q.dtype
    q, k, v = (x.astype(wide) for x in (q, k, v))
    return kernels.splash(q, k, v, segments, masked, scale=scale, soft_cap=config.attention_soft_cap).astype(dtype)


def _suits_cudnn(q: Any, config: ModelConfig) -> bool:
    """Return whether this machine has a GPU with cuDNN's attention, and cuDNN computes in this dtype what the config asks for."""
    return q.dtype in (jnp.bfloat16, jnp.float16) and _suits_jax(config) and kernels.is_gpu_with("8.0")


def _suits_jax(config: ModelConfig) -> bool:
    """Return whether JAX's attention computes what the config asks for."""
    return config.attention_soft_cap is None and not config.sinks


def _by_cudnn(q: Any, k: Any, v: Any, segments: Any, masked: Masked, config: ModelConfig) -> Any:
    where = "model.attention: cudnn needs an NVIDIA GPU with cuDNN"
    if traced_platform() == "cpu":
        raise InputError(f"{where}, found CPUs; set model.attention to xla")
    try:
        if segments is not None and config.attention == "cudnn" and kernels.packs_documents(q, k):
            in_blocks = partial(attend_in_blocks, partial(_masked, config), masked=masked)
            return kernels.packed(in_blocks, q, k, v, segments, masked, _scale(q, config))
        mask = None if segments is None else same_segment(segments, segments)
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn", **_options(masked, config))
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{where} that supports this attention; JAX reports: {reason}; set model.attention to xla") from error


def attend_after(q: Float[Array, "b s h e"], slices: Sequence[tuple[Any, ...]], config: ModelConfig) -> Float[Array, "b s h d"]:
    """Compute causal attention of the last slice of rows, with queries `q`, to the keys and values of all slices.

    Each slice also has its segments if segments do not attend to each other. The backward pass joins keys and values again: they are kept
    only once, not once for each later slice. Attention of long rows is computed in blocks of queries, and the backward pass recomputes each
    block.
    """
    masked = Masked(True, config.sliding_window)
    positions = traced_positions()
    is_in_blocks = config.attention == "blockwise" or (positions is not None and positions.length >= LONG)

    def attend(q: Any, slices: Any) -> Any:
        k, v, *segments = (jnp.concatenate(parts, axis=1) for parts in zip(*slices, strict=True))
        if is_in_blocks:
            return attend_in_blocks(partial(_masked, config), q, k, v, segments[0] if segments else None, masked)
        first = k.shape[1] - q.shape[1]
        mask = masked.pairs(first + jnp.arange(q.shape[1]), jnp.arange(k.shape[1]))[None, None]
        return _masked(config, q, k, v, mask & same_segment(segments[0][:, first:], segments[0]) if segments else mask)

    policy = jax.checkpoint_policies.nothing_saveable if is_in_blocks else _all_but_joined
    return jax.checkpoint(attend, policy=policy, prevent_cse=False)(q, tuple(entry[:3] for entry in slices))


def _all_but_joined(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name != "concatenate"


def cached_positions(window: int | None, room: int) -> int:
    """Return how many of a row's `room` positions a cache keeps: all positions or, with a window, only the last `window` positions."""
    return room if window is None else min(window, room)


def attend_cached(
    q: Float[Array, "b s h e"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    cache: tuple[Float[Array, "b t k d"], Float[Array, "b t k d"]],
    at: Int[Array, "b s"],
    lengths: Int[Array, " b"],
    config: ModelConfig,
) -> tuple[Float[Array, "b s h d"], tuple[Float[Array, "b t k d"], Float[Array, "b t k d"]]]:
    """Compute causal attention for further positions, given the keys and values of earlier positions (`cache`), and return both.

    The cache is a ring buffer: position p is in place p % t, where t is `cached_positions`. There it replaces position p - t, which is
    outside all later windows. The positions `at` are consecutive in each row; those beyond the row's length are not kept in the cache.
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
    if config.window is not None and config.sliding_window is None:
        mask &= (at // config.window)[:, :, None] == (positions // config.window)[:, None]
    return _masked(config, q, keys, values, mask[:, None]), following


def _positions_in(places: int, end: Int[Array, " b"]) -> Int[Array, "b t"]:
    """Return the position in each place of the ring buffer after all positions before `end` were added; negative for an empty place."""
    last = end[:, None] - 1
    return last - (last - jnp.arange(places)[None]) % places


def _masked(config: ModelConfig, q: Any, k: Any, v: Any, mask: Bool[Array, "#b 1 s t"]) -> Any:
    """Compute attention for the pairs of positions where the mask is True."""
    if not _suits_jax(config):
        return _weighted(q, k, v, mask, config)
    return _of_xla(q, k, v, mask=mask, scale=config.attention_scale)


def _of_xla(q: Float[Array, "b s h d"], k: Float[Array, "b t k d"], v: Float[Array, "b t k d"], **options: Any) -> Float[Array, "b s h d"]:
    """Call JAX's attention. On CPUs and TPUs, float16 is cast to float32, because these cannot sum float16 products in float32.

    On GPUs and TPUs keys and values are repeated for each query head, except for a single query: XLA would transpose the probabilities of
    grouped heads.
    """
    if q.dtype == jnp.float16 and traced_platform() in ("cpu", "tpu"):
        return _of_xla(*(x.astype(jnp.float32) for x in (q, k, v)), **options).astype(q.dtype)
    if traced_platform() in ("gpu", "tpu") and q.shape[1] > 1:
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    return jax.nn.dot_product_attention(q, k, v, implementation="xla", **options)


def _weighted(
    q: Float[Array, "b s h e"],
    k: Float[Array, "b t k d"],
    v: Float[Array, "b t k d"],
    mask: Bool[Array, "#b 1 s t"],
    config: ModelConfig,
) -> Float[Array, "b s h d"]:
    """Compute attention with soft-capped scores or sinks, which JAX's attention does not support. The softmax is in float32 at least.

    With sinks, the last number of each query is the score of a key without a value.
    """
    wide, kv_heads, size = wider(q.dtype), k.shape[2], k.shape[-1]
    q, sinks = q[..., :size], q[..., size:].astype(wide)
    b, s, heads, _ = q.shape
    grouped = q.reshape(b, s, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("bskgd,btkd->bkgst", grouped, k, preferred_element_type=wide)
    scores = soft_capped(scores * jnp.asarray(_scale(q, config), wide), config.attention_soft_cap)
    scores = jnp.where(mask[:, :, None], scores, jnp.asarray(jnp.finfo(wide).min, wide))
    if config.sinks:
        of_sinks = sinks.reshape(b, s, kv_heads, -1).transpose(0, 2, 3, 1)[..., None]
        scores = jnp.concatenate([scores, of_sinks], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    return jnp.einsum("bkgst,btkd->bskgd", weights.astype(v.dtype), v).reshape(b, s, heads, size)


def same_segment(segments: Int[Array, "b s"], other: Int[Array, "b t"]) -> Bool[Array, "b 1 s t"]:
    """Return for each pair of positions whether both are in the same segment."""
    return segments[:, None, :, None] == other[:, None, None, :]
