"""Optax optimizers under strict promotion."""

import jax
import optax


def lenient(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return the optimizer with JAX's standard promotion inside it, and only there: Adam and schedules mix int and float."""

    def init(params):
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.init(params)

    def update(updates, state, params=None, **extra):
        with jax.numpy_dtype_promotion("standard"):
            return optimizer.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(init, update)
