"""Rotary position embeddings, and scalings for texts that are longer than the texts of the original training.

Letters in shapes: b rows, s positions, h heads, d numbers per head.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jpipe_lm.config.model_config import ModelConfig
from jpipe_train.losses.cross_entropy import wider

Frequencies = Any  # NumPy array of float64, one number for each pair of components
Scaling = Any  # a `jpipe_lm.config.model.rope_section.RopeScaling`; its validation ensures that the keys of its kind are not None


Ended = tuple[Int[Array, "b 1"], Int[Array, "b 1"]]
"""The segment of the last token of a slice of the rows, and its position in this segment."""


def positions_of(segments: Int[Array, "b s"], before: Ended | None = None) -> Int[Array, "b s"]:
    """Return the position of each token in its segment, counted from 0. The first segment may continue the last one of the slice before."""
    numbers = jnp.broadcast_to(jnp.arange(segments.shape[1], dtype=jnp.int32)[None], segments.shape)
    is_first = segments[:, 1:] != segments[:, :-1]
    begins = jnp.concatenate([jnp.zeros_like(numbers[:, :1]), jnp.where(is_first, numbers[:, 1:], jnp.zeros_like(numbers[:, 1:]))], axis=1)
    found = numbers - jax.lax.cummax(begins, axis=1)
    if before is None:
        return found
    continues = (found == numbers) & (segments[:, :1] == before[0])
    return jnp.where(continues, found + before[1] + 1, found)


def lengths_of(segments: Int[Array, "b s"]) -> Int[Array, "b s"]:
    """Return for each position the number of positions in its segment."""
    return positions_of(segments) + positions_of(segments[:, ::-1])[:, ::-1] + 1


def rotated(
    x: Float[Array, "b s h d"], positions: Int[Array, "#b s"], lengths: Int[Array, "#b #s"], config: ModelConfig
) -> Float[Array, "b s h d"]:
    """Apply rotary position embeddings: rotate each pair of components by an angle that is proportional to the position.

    A pair has one component from each half of the rotated part of a head; or two neighbours, which are in different halves of the result.
    The rest of the head is not changed. LongRoPE chooses between its two scalings by the length of the text that each position belongs to.
    Reference: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding".
    """
    wide, size = wider(x.dtype), config.rotary_size
    short, long = (jnp.asarray(numbers, wide)[None, None, None] for numbers in frequencies(config))
    scaling: Scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "longrope":
        short = jnp.where((lengths > scaling.original_positions)[:, :, None, None], long, short)
    angles = positions[:, :, None, None].astype(wide) * short
    factor = jnp.asarray(attention_factor(config), wide)
    cos, sin = jnp.cos(angles) * factor, jnp.sin(angles) * factor
    turning = x[..., :size].astype(wide)
    first, second = (turning[..., ::2], turning[..., 1::2]) if config.rope_pairs == "neighbours" else jnp.split(turning, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)


def frequencies(config: ModelConfig) -> tuple[Frequencies, Frequencies]:
    """Return the angle per position of each pair, for texts within the original positions and for longer texts."""
    size = config.rotary_size
    scaling: Scaling = config.rope_scaling
    unscaled = config.rope_base ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    if scaling is None:
        return unscaled, unscaled
    if scaling.kind == "proportional":
        scaled = np.where(np.arange(size // 2) < int(scaling.share * size // 2), unscaled, 0)
        return scaled, scaled
    if scaling.kind == "longrope":
        return unscaled / np.asarray(scaling.short_factors), unscaled / np.asarray(scaling.long_factors)
    share = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}[scaling.kind](unscaled, scaling, config)
    scaled = unscaled * (share + (1 - share) / scaling.factor)
    return scaled, scaled


def attention_factor(config: ModelConfig) -> float:
    """Return the factor by which the scaling multiplies queries and keys."""
    scaling: Scaling = config.rope_scaling
    if scaling is None:
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "yarn":
        return 0.1 * math.log(scaling.factor) + 1
    if scaling.kind == "longrope":
        longer = config.max_positions_used / scaling.original_positions
        return math.sqrt(1 + math.log(longer) / math.log(scaling.original_positions)) if longer > 1 else 1.0
    return 1.0


def _linear(unscaled: Frequencies, scaling: Scaling, config: ModelConfig) -> Frequencies:
    """Return the share of each frequency that is not scaled, which is zero for position interpolation (Chen et al. 2023)."""
    return np.zeros_like(unscaled)


def _llama3(unscaled: Frequencies, scaling: Scaling, config: ModelConfig) -> Frequencies:
    """Return the share of each frequency that is not scaled. It depends on the number of turns within the original positions."""
    turns = scaling.original_positions * unscaled / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    return np.clip((turns - low) / (high - low), 0, 1)


def _yarn(unscaled: Frequencies, scaling: Scaling, config: ModelConfig) -> Frequencies:
    """Return the share of each frequency that is not scaled. It depends on the index of the pair.

    Reference: Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models".
    """
    original, size = scaling.original_positions, config.rotary_size

    def pair(turns: float) -> float:
        """Return the index of the pair that makes `turns` turns within the original positions, as a real number."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_base))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    return 1 - np.clip((np.arange(size // 2) - first) / (last - first if last != first else 0.001), 0, 1)
