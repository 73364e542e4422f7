"""The gated delta rule: a layer with a recurrent state in place of attention.

Reference: Yang et al. 2025, "Gated Delta Networks: Improving Mamba2 with Delta Rule".

Letters in shapes: b rows, s positions, c positions of a chunk, h heads, k numbers of a key, v numbers of a value, m channels of the
convolution, n positions of the convolution, r n - 1 positions before, t positions with those before, w width.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.metadata import named
from jpipe_train.losses.cross_entropy import wider

Carry = tuple[Float[Array, "b r m"], Int[Array, "b r"], Float[Array, "b h k v"]]
"""The last inputs of the convolution with their segments, and the state."""
_CHUNK = 64  # positions that are computed at a time, by products of matrices
_EPSILON = 1e-6  # of the norms of queries and keys


class GatedDelta(nnx.Module):
    """A gated delta rule. `into` and `back` construct linear layers without biases."""

    def __init__(self, config: ModelConfig, into: Callable[..., nnx.Linear], back: Callable[..., nnx.Linear], *, rngs: nnx.Rngs):
        delta, width, names = config.delta, config.width, {"kernel_metadata": named("embed", None)}
        assert delta is not None
        self.config, values = config, delta.value_heads * delta.value_size
        self.inputs, self.output_gate = into(width, delta.channels, **names), into(width, values, **names)
        self.rate, self.decay = into(width, delta.value_heads, **names), into(width, delta.value_heads, **names)
        uniform = jax.random.uniform
        spread = 1 / delta.convolution**0.5
        of_convolution = uniform(rngs.params(), (delta.channels, 1, delta.convolution), minval=-spread, maxval=spread)
        self.convolution = nnx.Param(of_convolution, **named(None, None, None))
        self.decay_log = nnx.Param(jnp.log(uniform(rngs.params(), (delta.value_heads,), minval=0.01, maxval=16.0)), **named(None))
        self.decay_bias = nnx.Param(jnp.ones(delta.value_heads), **named(None))
        self.norm = nnx.RMSNorm(delta.value_size, epsilon=config.norm_epsilon, dtype=wider(config.compute_dtype), rngs=rngs)
        self.output = back(values, width, kernel_metadata=named(None, "embed"))

    def __call__(
        self, x: Float[Array, "b s w"], segments: Int[Array, "b s"] | None, carry: Carry | None, counts: Int[Array, " b"] | None = None
    ) -> tuple[Float[Array, "b s w"], Carry]:
        """Compute the outputs of positions that follow the carry, and the new carry.

        Only the first `counts` positions of each row, by default all, change the carry.
        """
        delta, wide, (b, s, _) = self.config.delta, wider(x.dtype), x.shape
        assert delta is not None
        carry = carry_of(self.config, b) if carry is None else carry
        segments = jnp.zeros((b, s), jnp.int32) if segments is None else segments
        inputs, of_inputs = jnp.concatenate([carry[0], self.inputs(x)], axis=1), jnp.concatenate([carry[1], segments], axis=1)
        mixed = nnx.silu(_convolved(inputs, of_inputs, self.convolution[...].astype(x.dtype)))
        sizes = delta.key_heads * delta.key_size
        q, k, v = (
            part.reshape(b, s, heads, -1).astype(wide)
            for part, heads in zip(
                jnp.split(mixed, (sizes, 2 * sizes), axis=-1), (delta.key_heads, delta.key_heads, delta.value_heads), strict=True
            )
        )
        q, k = (jnp.repeat(_unit(part), delta.value_heads // delta.key_heads, axis=2) for part in (q, k))
        bias, speed = self.decay_bias[...].astype(wide)[None, None], jnp.exp(self.decay_log[...].astype(wide))[None, None]
        decay, rate = -speed * nnx.softplus(self.decay(x).astype(wide) + bias), nnx.sigmoid(self.rate(x)).astype(wide)
        if counts is not None:
            is_counted = (jnp.arange(s)[None] < counts[:, None])[:, :, None]
            decay, rate = (jnp.where(is_counted, part, jnp.zeros((), wide)) for part in (decay, rate))
        y, state = delta_rule(q * delta.key_size**-0.5, k, v, decay, rate, segments, carry[2].astype(wide), carry[1][:, -1])
        gate = nnx.silu(self.output_gate(x).astype(wide)).reshape(y.shape)
        y = (self.norm(y.astype(x.dtype)).astype(wide) * gate).astype(x.dtype)
        last = (jnp.full(b, s) if counts is None else counts)[:, None] + jnp.arange(delta.convolution - 1)[None]
        inputs, of_inputs = jnp.take_along_axis(inputs, last[:, :, None], axis=1), jnp.take_along_axis(of_inputs, last, axis=1)
        return self.output(y.reshape(b, s, -1)), (inputs, of_inputs, state)


def carry_of(config: ModelConfig, rows: int) -> Carry:
    """Return the carry of a block before the first position."""
    delta, before = config.delta, config.delta.convolution - 1 if config.delta else 0
    assert delta is not None
    state = jnp.zeros((rows, delta.value_heads, delta.key_size, delta.value_size), wider(config.compute_dtype))
    return jnp.zeros((rows, before, delta.channels), config.compute_dtype), jnp.zeros((rows, before), jnp.int32), state


def _unit(x: Float[Array, "b s h k"]) -> Float[Array, "b s h k"]:
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + jnp.asarray(_EPSILON, x.dtype))


def _convolved(x: Float[Array, "b t m"], segments: Int[Array, "b t"], kernel: Float[Array, "m 1 n"]) -> Float[Array, "b s m"]:
    """Return for each position, from the n-th on, the weighted sum of each channel over n positions in its segment."""
    n = kernel.shape[-1]
    length, own = x.shape[1] - n + 1, segments[:, n - 1 :]
    zero = jnp.zeros((), x.dtype)
    parts = (
        jnp.where((segments[:, i : i + length] == own)[:, :, None], x[:, i : i + length], zero) * kernel[None, None, :, 0, i]
        for i in range(n)
    )
    return sum(parts, zero)


def delta_rule(
    q: Float[Array, "b s h k"],
    k: Float[Array, "b s h k"],
    v: Float[Array, "b s h v"],
    decay: Float[Array, "b s h"],
    rate: Float[Array, "b s h"],
    segments: Int[Array, "b s"],
    state: Float[Array, "b h k v"],
    before: Int[Array, " b"],
) -> tuple[Float[Array, "b s h v"], Float[Array, "b h k v"]]:
    """Return the output qₜᵀ Sₜ of each position, and the last state, with Sₜ = exp(decayₜ) Sₜ₋₁ + rateₜ kₜ (vₜ - exp(decayₜ) Sₜ₋₁ᵀ kₜ)ᵀ.

    Each segment begins with a state of zeros, except that the first one continues `state` if this is of its segment, `before`. Positions
    are computed chunk by chunk: within a chunk the changes of the state are the solution of a triangular system of equations.
    """
    b, s, h, _ = q.shape
    size = min(_CHUNK, s)
    fill = -s % size

    def chunked(x: Any) -> Any:
        """Reshape (b, s, h, …) to (chunks, b, h, c, …)."""
        x = jnp.pad(x, [(0, 0), (0, fill), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(b, -1, size, *x.shape[2:]), (1, 3), (0, 2))

    of_chunks = jnp.pad(segments, ((0, 0), (0, fill)), mode="edge").reshape(b, -1, size).swapaxes(0, 1)
    (state, _), y = jax.lax.scan(_chunk, (state, before), (*map(chunked, (q, k, v, decay, rate)), of_chunks))
    return jnp.moveaxis(y, (0, 2), (1, 3)).reshape(b, -1, h, v.shape[-1])[:, :s], state


def _chunk(carry: tuple[Any, Any], inputs: tuple[Any, ...]) -> tuple[tuple[Any, Any], Any]:
    """Compute one chunk: arrays are (b, h, c, …), segments (b, c)."""
    (state, before), (q, k, v, decay, rate, segments) = carry, inputs
    total, continues = decay.cumsum(-1), (segments == before[:, None])[:, None]
    reached = _exp(total, continues)  # how much of the state of the chunk before remains at a position
    causal = jnp.tril(jnp.ones((q.shape[2], q.shape[2]), bool))[None]
    pairs = _exp(total[..., :, None] - total[..., None, :], ((segments[:, :, None] == segments[:, None]) & causal)[:, None])
    system = (k @ k.swapaxes(-1, -2)) * rate[..., None] * pairs
    wanted = jnp.concatenate([v, k * reached[..., None]], axis=-1) * rate[..., None]
    solved = jax.lax.linalg.triangular_solve(system, wanted, left_side=True, lower=True, unit_diagonal=True)
    new = solved[..., : v.shape[-1]] - solved[..., v.shape[-1] :] @ state
    y = (q * reached[..., None]) @ state + ((q @ k.swapaxes(-1, -2)) * pairs) @ new
    added = (k * pairs[..., -1, :, None]).swapaxes(-1, -2) @ new
    return (state * reached[..., -1, None, None] + added, segments[:, -1]), y


def _exp(x: Float[Array, "b h *c"], where: Bool[Array, "b 1 *c"]) -> Float[Array, "b h *c"]:
    return jnp.exp(jnp.where(where, x, jnp.asarray(-jnp.inf, x.dtype)))
