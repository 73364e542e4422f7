"""Grouped-query attention with documents in a row kept apart, and rotary position embeddings.

The letters in the shapes: b rows, s positions, h heads of queries, k of keys and values, d numbers per head.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jpipe import InputError
from jpipe.context import traced_platform
from jpipe_train.config.model_config import ModelConfig
from jpipe_train.models.cross_entropy import wider


def attend(
    q: Float[Array, "b s h d"],
    k: Float[Array, "b s k d"],
    v: Float[Array, "b s k d"],
    segments: Int[Array, "b s"] | None,
    config: ModelConfig,
) -> Float[Array, "b s h d"]:
    """Compute attention: causal for a decoder, to all positions for an encoder, and within segments if there are any.

    Raises:
        InputError: the config asks for cuDNN's attention, which is not available or does not support these shapes.
    """
    mask = None if segments is None else same_segment(segments, segments)
    is_causal = config.kind == "decoder"
    if config.attention == "xla":
        return _of_xla(q, k, v, mask=mask, is_causal=is_causal)
    where = "model.attention: cudnn needs an NVIDIA GPU with cuDNN"
    if traced_platform() == "cpu":
        raise InputError(f"{where}, found CPUs; set it to xla")
    try:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=is_causal, implementation="cudnn")
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{where} that computes this attention; JAX says: {reason}; set it to xla") from error


def attend_cached(
    q: Float[Array, "b s h d"], keys: Float[Array, "b t k d"], values: Float[Array, "b t k d"], at: Int[Array, "b s"]
) -> Float[Array, "b s h d"]:
    """Compute causal attention for some positions, given the keys and values of all t positions so far."""
    mask = jnp.arange(keys.shape[1])[None, None, None] <= at[:, None, :, None]
    return _of_xla(q, keys, values, mask=mask)


def _of_xla(q: Float[Array, "b s h d"], k: Float[Array, "b t k d"], v: Float[Array, "b t k d"], **options: Any) -> Float[Array, "b s h d"]:
    """Call JAX's attention, in float32 for float16 on CPUs and TPUs, which have no products of float16 that are summed in float32."""
    if q.dtype == jnp.float16 and traced_platform() in ("cpu", "tpu"):
        return _of_xla(*(x.astype(jnp.float32) for x in (q, k, v)), **options).astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, implementation="xla", **options)


def same_segment(segments: Int[Array, "b s"], other: Int[Array, "b t"]) -> Bool[Array, "b 1 s t"]:
    """Return whether pairs of positions lie in one segment."""
    return segments[:, None, :, None] == other[:, None, None, :]


def positions_of(segments: Int[Array, "b s"]) -> Int[Array, "b s"]:
    """Count positions from 0 in each segment."""
    numbers = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32)[None], segments.shape)
    is_first = segments[:, 1:] != segments[:, :-1]
    begins = jnp.concatenate([jnp.zeros_like(numbers[:, :1]), jnp.where(is_first, numbers[:, 1:], jnp.zeros_like(numbers[:, 1:]))], axis=1)
    return numbers - jax.lax.cummax(begins, axis=1)


def rotated(x: Float[Array, "b s h d"], positions: Int[Array, "#b s"], config: ModelConfig) -> Float[Array, "b s h d"]:
    """Apply rotary position embeddings: rotate each pair of components by an angle that grows with the position.

    A pair has one component from either half of a head.

    Reference: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """
    wide = wider(x.dtype)
    angles = positions[:, :, None, None].astype(wide) * jnp.asarray(frequencies(config), wide)[None, None, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def frequencies(config: ModelConfig) -> Any:
    """Return by what angle each pair rotates from one position to the next, (d / 2)."""
    size, scaling = config.head_size_used, config.rope_scaling
    unscaled = config.rope_base ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    if scaling is None:
        return unscaled
    turns = scaling.original_positions * unscaled / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    unscaled_share = np.clip((turns - low) / (high - low), 0, 1)
    return unscaled * (unscaled_share + (1 - unscaled_share) / scaling.factor)
