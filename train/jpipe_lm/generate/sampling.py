"""Choose the next token, greedily or by sampling, with pure functions.

The letters in the shapes: b rows, v symbols.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

_COLDEST = 1e-30  # the lowest temperature; a lower number may be 0 in float32


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen."""

    temperature: float = 0.0  # divisor of the logits; 0 chooses the most likely token
    top_k: int | None = None  # the number of most likely tokens to sample from; None for all
    top_p: float | None = None  # the total probability of the most likely tokens to sample from; None for all


def choose(
    logits: Float[Array, "b v"], sampling: Sampling, seed: UInt32[Array, ""], rows: Int[Array, " b"], count: Int[Array, ""]
) -> Int[Array, " b"]:
    """Choose a token for each row, or -1 if its logits (b, v) are NaN.

    A sample depends only on the seed, the index and the logits of the row, and `count`, the number of tokens that were already sampled for
    it, not on other rows.
    """
    scaled = logits.astype(jnp.float32)
    if sampling.temperature == 0:
        chosen = jnp.argmax(scaled, axis=-1)
    else:
        scaled = with_temperature(scaled, sampling.temperature)
        if sampling.top_k is not None:
            scaled = with_top_k(scaled, sampling.top_k)
        if sampling.top_p is not None:
            scaled = with_top_p(scaled, sampling.top_p)

        def draw(row: Int[Array, ""], row_logits: Float[Array, " v"]) -> Int[Array, ""]:
            return jax.random.categorical(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), count), row_logits)

        chosen = jax.vmap(draw)(rows, scaled)
    return jnp.where(jnp.isnan(logits).any(-1), -1, chosen).astype(jnp.int32)


def with_temperature(logits: Float[Array, "b v"], temperature: float) -> Float[Array, "b v"]:
    """Divide the logits by the temperature. The largest logit is first shifted to 0, so that none overflows."""
    return (logits - logits.max(axis=-1, keepdims=True)) / max(temperature, _COLDEST)


def with_top_k(logits: Float[Array, "b v"], k: int) -> Float[Array, "b v"]:
    """Replace all logits except the k largest by -inf. Among equal logits, the first are kept."""
    _, best = jax.lax.top_k(logits, min(k, logits.shape[-1]))
    return _only(logits, best, jnp.ones(best.shape, bool))


def with_top_p(logits: Float[Array, "b v"], p: float) -> Float[Array, "b v"]:
    """Replace all logits outside the nucleus by -inf: the smallest set of likeliest tokens with a total probability of p or more.

    Reference: Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration".
    """
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    likely = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    is_chosen = jnp.cumsum(likely, axis=-1) - likely < p
    return _only(logits, order, is_chosen.at[:, 0].set(True))  # keep the most likely token even if `p` is 0 in float32


def _only(logits: Float[Array, "b v"], order: Int[Array, "b n"], is_chosen: Array) -> Float[Array, "b v"]:
    """Keep the logits at the selected positions in `order`, and replace the others by -inf."""
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.where(jnp.zeros(logits.shape, bool).at[rows, order].set(is_chosen), logits, -jnp.inf)
