"""Queries, keys and values from latents: multi-head latent attention.

Reference: DeepSeek-AI 2024, "DeepSeek-V2: A Strong, Economical, and Efficient Mixture-of-Experts Language Model".

Letters in shapes: b rows, s positions, w width, h heads, d numbers per head.
"""

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.metadata import named
from jpipe_lm.models.rope import rotated
from jpipe_train.losses.cross_entropy import wider

_EPSILON = 1e-6  # of the norms of latents in all models


class Latents(nnx.Module):
    """The linear layers and norms that compute queries, keys and values. `into` constructs a linear layer without bias."""

    def __init__(self, config: ModelConfig, into: Callable[..., nnx.Linear], *, rngs: nnx.Rngs):
        latent, width, heads = config.latent, config.width, config.heads
        assert latent is not None
        self.config, short, by_head = config, {"kernel_metadata": named("embed", None)}, {"kernel_metadata": named(None, "heads")}

        def norm(size: int) -> nnx.RMSNorm:
            return nnx.RMSNorm(size, epsilon=_EPSILON, dtype=wider(config.compute_dtype), rngs=rngs)

        if latent.queries is None:
            self.query = into(width, heads * config.head_size_used, kernel_metadata=named("embed", "heads"))
        else:
            self.query_down, self.query_norm = into(width, latent.queries, **short), norm(latent.queries)
            self.query_up = into(latent.queries, heads * config.head_size_used, **by_head)
        self.down, self.norm = into(width, latent.keys + latent.rotary, **short), norm(latent.keys)
        self.up = into(latent.keys, heads * (config.head_size_used - latent.rotary + latent.values), **by_head)

    def __call__(
        self, x: Float[Array, "b s w"], at: Int[Array, "#b s"], lengths: Int[Array, "#b #s"]
    ) -> tuple[Float[Array, "b s h d"], Float[Array, "b s h d"], Float[Array, "b s h d"]]:
        """Compute queries, keys and values. Values are padded with zeros to the size of a head."""
        config, latent = self.config, self.config.latent
        assert latent is not None
        (b, s, _), still = x.shape, config.head_size_used - latent.rotary
        q = self.query(x) if latent.queries is None else self.query_up(self.query_norm(self.query_down(x)).astype(x.dtype))
        q = q.reshape(b, s, config.heads, -1)
        short, turning = jnp.split(self.down(x), (latent.keys,), axis=-1)
        k, v = jnp.split(self.up(self.norm(short).astype(x.dtype)).reshape(b, s, config.heads, -1), (still,), axis=-1)
        turned = jnp.broadcast_to(rotated(turning[:, :, None], at, lengths, config), (b, s, config.heads, latent.rotary))
        q = jnp.concatenate([q[..., :still], rotated(q[..., still:], at, lengths, config)], axis=-1)
        return q, jnp.concatenate([k, turned], axis=-1), jnp.pad(v, (*[(0, 0)] * 3, (0, config.head_size_used - latent.values)))
