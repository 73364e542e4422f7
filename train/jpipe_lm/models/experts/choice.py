"""How a router chooses experts from its logits.

Letters in shapes: b rows, s positions, e experts, k experts of a token.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jpipe_lm.config.model.experts_section import ExpertsConfig


def choose(
    config: ExpertsConfig, logits: Float[Array, "b s e"], correction: Float[Array, " e"] | None
) -> tuple[Float[Array, "b s k"], Int[Array, "b s k"], Float[Array, "b s e"]]:
    """Return the weights and the numbers of the experts that each token chooses, and the probabilities of all experts.

    The `correction` (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report") affects only the choice, and has no gradient.
    """
    probabilities = scores = jax.nn.softmax(logits, axis=-1)
    if config.score == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        probabilities = scores / scores.sum(-1, keepdims=True)
    ranked = scores if correction is None else scores + correction[None, None]
    if config.groups > 1:
        ranked = _within_groups(config, ranked)
    chosen = jax.lax.top_k(jax.lax.stop_gradient(ranked), config.per_token)[1]
    weights = jnp.take_along_axis(scores, chosen, axis=-1)
    if config.renormalize:
        weights = weights / weights.sum(-1, keepdims=True)
    return weights * config.scale, chosen, probabilities


def _within_groups(config: ExpertsConfig, scores: Any) -> Any:
    """Return the scores, minus infinity for experts outside the groups that a token chooses by the sum of their two best scores."""
    of_groups = jax.lax.top_k(scores.reshape(*scores.shape[:-1], config.groups, -1), 2)[0].sum(-1)
    chosen = jax.lax.top_k(of_groups, config.groups_per_token)[1]
    is_chosen = jax.nn.one_hot(chosen, config.groups, dtype=jnp.bool_).any(-2)
    inside = jnp.repeat(is_chosen, config.count // config.groups, axis=-1)
    return jnp.where(inside, scores, jnp.asarray(-jnp.inf, scores.dtype))
