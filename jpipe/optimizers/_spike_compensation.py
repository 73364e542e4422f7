"""Spike compensation: momentum in which a late gradient has the same total effect as a gradient without delay.

A gradient that is τ updates late has missed the first τ terms of its geometric decay in the momentum m ← β·m + (1 − β)·g. Spike
compensation adds these terms in the update at which the gradient arrives:

    û = β^τ·m + (1 − β^τ)·g.

It needs no buffer. With τ = 0 it is ordinary momentum, and with τ = 1 Nesterov's momentum.

Reference:
    Kosson, Chiley, Venigalla, Hestness, Köster: Pipelined Backpropagation at Scale, 2020, https://arxiv.org/abs/2003.11666.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.typing import ArrayLike, DTypeLike

Tree = Any


def scale_by_compensated_momentum(decay: ArrayLike, accumulator_dtype: DTypeLike | None = None) -> optax.GradientTransformationExtraArgs:
    """Accumulate momentum as `optax.trace` does, with spike compensation.

    With the trace m ← g + decay·m the update is decay^τ·m + (1 − decay^τ)/(1 − decay)·g. For τ = 0 it equals `optax.trace(decay)` bit for
    bit, and for τ = 1 it equals `optax.trace(decay, nesterov=True)` up to rounding. The state is the state of `optax.trace`.

    Args:
        decay: β, the decay of the momentum.
        accumulator_dtype: the dtype of the momentum; by default the dtype of the parameters.

    Returns:
        A transformation. Its `update` takes the argument `delay`, τ.
    """
    trace = optax.trace(decay, accumulator_dtype=accumulator_dtype)

    def update(updates: Tree, state: Any, params: Tree = None, *, delay: ArrayLike = 0.0, **extra_args: Any) -> tuple[Tree, Any]:
        momentum, state = trace.update(updates, state, params)
        retained = _power(decay, delay)
        missed = (1 - retained) / (1 - decay)
        return jax.tree.map(lambda m, g: retained.astype(m.dtype) * m + missed.astype(g.dtype) * g, momentum, updates), state

    return optax.GradientTransformationExtraArgs(trace.init, update)


def scale_by_compensated_adam(
    b1: ArrayLike = 0.9, b2: ArrayLike = 0.999, eps: ArrayLike = 1e-8, eps_root: ArrayLike = 0.0, mu_dtype: DTypeLike | None = None
) -> optax.GradientTransformationExtraArgs:
    """Rescale updates as Adam does, with spike compensation of the first moment.

    After t updates the weights of the gradients in û add up to 1 − β₁^(t+τ), so the corrected first moment is û/(1 − β₁^(t+τ)). For τ = 0
    the updates equal `optax.scale_by_adam` bit for bit. For τ = 1 the momentum is Nesterov's. `optax.scale_by_adam(nesterov=True)` divides
    its gradient term by 1 − β₁^t instead, so its first updates are larger: the first one by 47 % with b1 = 0.9. The difference falls as
    β₁^t. The state is the state of `optax.scale_by_adam`.

    Args:
        b1: β₁, the decay of the first moment.
        b2: the decay of the second moment, which is not compensated.
        eps: a number that is added to the root of the second moment.
        eps_root: a number that is added to the second moment under the root.
        mu_dtype: the dtype of the first moment; by default the dtype of the parameters.

    Returns:
        A transformation. Its `update` takes the argument `delay`, τ.
    """
    init = optax.scale_by_adam(mu_dtype=mu_dtype).init

    def update(updates: Tree, state: Any, params: Tree = None, *, delay: ArrayLike = 0.0, **extra_args: Any) -> tuple[Tree, Any]:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, b1, 1)
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
        mu_hat = _compensated(mu, updates, b1, count, delay)
        nu_hat = optax.tree.bias_correction(nu, b2, count)
        scaled = jax.tree.map(lambda m, v: m / (jnp.sqrt(v + eps_root) + eps), mu_hat, nu_hat)
        return scaled, optax.ScaleByAdamState(count, optax.tree.cast(mu, mu_dtype), optax.tree.cast_like(nu, state.nu))

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_compensated_muon(
    ns_steps: int = 5, beta: ArrayLike = 0.95, eps: ArrayLike = 1e-8, mu_dtype: DTypeLike | None = None, *, adaptive: bool = False
) -> optax.GradientTransformationExtraArgs:
    """Orthogonalize the momentum of matrices as Muon does, with spike compensation before the orthogonalization.

    For τ = 0 the updates equal `optax.contrib.scale_by_muon(nesterov=False)` bit for bit. The state is also the same.

    Args:
        ns_steps: the number of Newton-Schulz iterations.
        beta: β, the decay of the momentum.
        eps: a number that is added to denominators.
        mu_dtype: the dtype of the momentum; by default the dtype of the parameters.
        adaptive: whether to scale the updates by the dual norm of the momentum.

    Returns:
        A transformation of matrices. Its `update` takes the argument `delay`, τ.
    """
    init = optax.contrib.scale_by_muon(mu_dtype=mu_dtype).init
    # Without its own momentum, Muon orthogonalizes the momentum that it gets.
    orthogonalize = optax.contrib.scale_by_muon(ns_steps=ns_steps, beta=0.0, eps=eps, nesterov=False, adaptive=adaptive)

    def update(updates: Tree, state: Any, params: Tree = None, *, delay: ArrayLike = 0.0, **extra_args: Any) -> tuple[Tree, Any]:
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        mu_hat = _compensated(mu, updates, beta, count, delay)
        orthogonal = jax.tree.map(lambda m: orthogonalize.update(m, orthogonalize.init(m))[0], mu_hat)
        return orthogonal, state._replace(count=count, mu=optax.tree.cast(mu, mu_dtype))

    return optax.GradientTransformationExtraArgs(init, update)


def compensated_sgd(
    learning_rate: optax.ScalarOrSchedule, momentum: ArrayLike = 0.9, accumulator_dtype: DTypeLike | None = None
) -> optax.GradientTransformationExtraArgs:
    """Return `optax.sgd` with momentum and spike compensation. The arguments are the same as in `optax.sgd`.

    Returns:
        A transformation. Its `update` takes `delay`; see `scale_by_compensated_momentum`.
    """
    return optax.chain(scale_by_compensated_momentum(momentum, accumulator_dtype), optax.scale_by_learning_rate(learning_rate))


def compensated_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return `optax.adam` with spike compensation. The arguments are the same as in `optax.adam`.

    Returns:
        A transformation. Its `update` takes `delay`; see `scale_by_compensated_adam`.
    """
    return optax.chain(scale_by_compensated_adam(b1, b2, eps, eps_root, mu_dtype), optax.scale_by_learning_rate(learning_rate))


def compensated_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_decay: ArrayLike = 1e-4,
    mask: Any | Callable[[Any], Any] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return `optax.adamw` with spike compensation. The arguments are the same as in `optax.adamw`.

    Returns:
        A transformation. Its `update` takes `delay`; see `scale_by_compensated_adam`.
    """
    return optax.chain(
        scale_by_compensated_adam(b1, b2, eps, eps_root, mu_dtype),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def compensated_muon(
    learning_rate: optax.ScalarOrSchedule,
    ns_steps: int = 5,
    beta: ArrayLike = 0.95,
    eps: ArrayLike = 1e-8,
    weight_decay: ArrayLike = 0.0,
    weight_decay_mask: Any | Callable[[Any], Any] | None = None,
    mu_dtype: DTypeLike | None = None,
    *,
    adaptive: bool = False,
    adam_b1: ArrayLike = 0.9,
    adam_b2: ArrayLike = 0.999,
    adam_eps_root: ArrayLike = 0.0,
    adam_weight_decay: ArrayLike = 0.0,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    consistent_rms: ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Return `optax.contrib.muon` with spike compensation: it updates matrices with Muon, and other parameters with Adam.

    The arguments are the same as in `optax.contrib.muon`, without `nesterov`: Nesterov's momentum is spike compensation for a delay of 1.

    Returns:
        A transformation. Its `update` takes `delay`; see `scale_by_compensated_muon`.
    """

    def scaled(update: Any) -> jax.Array:
        inputs, outputs = update.shape
        return update * (
            jnp.sqrt(jnp.maximum(1, outputs / inputs)) if consistent_rms is None else jnp.sqrt(max(inputs, outputs)) * consistent_rms
        )

    matrices = optax.chain(
        scale_by_compensated_muon(ns_steps, beta, eps, mu_dtype, adaptive=adaptive),
        optax.stateless(lambda updates, _: jax.tree.map(scaled, updates)),
        optax.add_decayed_weights(weight_decay, weight_decay_mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    adam_rate = learning_rate if adam_learning_rate is None else adam_learning_rate
    adam = compensated_adamw(adam_rate, adam_b1, adam_b2, eps, adam_eps_root, mu_dtype, adam_weight_decay)
    return optax.partition(
        {"muon": matrices, "adam": adam}, lambda params: jax.tree.map(lambda p: "muon" if p.ndim == 2 else "adam", params)
    )


def _compensated(momentum: Tree, gradients: Tree, decay: ArrayLike, count: Any, delay: ArrayLike) -> Tree:
    """Return the mean of the `count` gradients so far, weighted as in û, from their moving average `momentum`."""
    retained = _power(decay, delay)
    total = 1 - decay**count * retained

    def mean(m: Any, g: Any) -> jax.Array:
        return (retained.astype(m.dtype) * m + (1 - retained).astype(g.dtype) * g) / total.astype(m.dtype)

    return jax.tree.map(mean, momentum, gradients)


def _power(decay: ArrayLike, delay: ArrayLike) -> jax.Array:
    """Return decay^delay, at least in float32."""
    return jnp.power(decay, jnp.asarray(delay, float))
