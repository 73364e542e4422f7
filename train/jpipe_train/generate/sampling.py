"""Which token comes next: the likeliest, or one that is drawn. Pure functions.

The letters in the shapes: b rows, v symbols.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

_COLDEST = 1e-30  # a temperature; what is less may be 0 in float32


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    Attributes:
        temperature: logits are divided by it; 0: the likeliest token, nothing is drawn.
        top_k: one of the so many likeliest; None: of all.
        top_p: one of the likeliest that have this probability together; None: of all.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None


def choose(
    logits: Float[Array, "b v"], sampling: Sampling, seed: UInt32[Array, ""], rows: Int[Array, " b"], count: Int[Array, ""]
) -> Int[Array, " b"]:
    """A token for each row, -1 where its logits are not numbers.

    What is drawn depends on the seed, the row and the count alone: the other rows may be any.

    Args:
        logits: of the next token.
        sampling: how it is chosen.
        seed: of all draws.
        rows: the number of each row.
        count: how many tokens were drawn for each row before.
    """
    wide = logits.astype(jnp.float32)
    if sampling.temperature == 0:
        chosen = jnp.argmax(wide, axis=-1)
    else:
        wide = with_temperature(wide, sampling.temperature)
        if sampling.top_k is not None:
            wide = with_top_k(wide, sampling.top_k)
        if sampling.top_p is not None:
            wide = with_top_p(wide, sampling.top_p)

        def draw(row: Int[Array, ""], own: Float[Array, " v"]) -> Int[Array, ""]:
            return jax.random.categorical(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), count), own)

        chosen = jax.vmap(draw)(rows, wide)
    return jnp.where(jnp.isnan(logits).any(-1), -1, chosen).astype(jnp.int32)


def with_temperature(logits: Float[Array, "b v"], temperature: float) -> Float[Array, "b v"]:
    """Flatter above 1, steeper below. The largest becomes 0, so that none overflows."""
    return (logits - logits.max(axis=-1, keepdims=True)) / max(temperature, _COLDEST)


def with_top_k(logits: Float[Array, "b v"], k: int) -> Float[Array, "b v"]:
    """Those that are not among the k largest become -inf; of equal ones the first are larger."""
    _, kept = jax.lax.top_k(logits, min(k, logits.shape[-1]))
    return _only(logits, kept, jnp.ones(kept.shape, bool))


def with_top_p(logits: Float[Array, "b v"], p: float) -> Float[Array, "b v"]:
    """Those become -inf that are not among the fewest largest whose probability is p or more together (the nucleus).

    Reference: Holtzman et al. 2019, "The Curious Case of Neural Text Degeneration".
    """
    order = jnp.argsort(logits, axis=-1, stable=True, descending=True)
    likely = jnp.take_along_axis(jax.nn.softmax(logits, axis=-1), order, axis=-1)
    kept = jnp.cumsum(likely, axis=-1) - likely < p
    return _only(logits, order, kept.at[:, 0].set(True))  # the likeliest also where `p` is 0 in float32


def _only(logits: Float[Array, "b v"], order: Int[Array, "b n"], kept: Array) -> Float[Array, "b v"]:
    """The logits at those places of `order` that are kept; elsewhere -inf."""
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.where(jnp.zeros(logits.shape, bool).at[rows, order].set(kept), logits, -jnp.inf)
