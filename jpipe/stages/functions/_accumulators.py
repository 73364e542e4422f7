"""The accumulators of a stage: sums of gradients, weight and loss over the microbatches of a batch, and their means."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.model._precision import Precision, widened
from jpipe.stages.functions._loss import loss_dtype

Tree = Any


def zero_accumulators(trained: Mapping[str, Tree], precision: Precision, *, last: bool) -> dict[str, Any]:
    """Return the accumulators at the start of a batch, for these trained parameters."""
    numbers = ("loss", "weight") if last else ("weight",)
    gradients = jax.tree.map(lambda p: jnp.zeros(p.shape, precision.accumulator_dtype(p.dtype)), dict(trained))
    return {"gradients": gradients} | {name: jnp.zeros((), loss_dtype()) for name in numbers}


def accumulate(
    accumulators: Mapping[str, Any], gradients: Iterable[tuple[str, Tree]], numbers: tuple[Any, ...], scale: Any
) -> dict[str, Any]:
    """Add one microbatch to the accumulators.

    Args:
        accumulators: the sums so far.
        gradients: (entry, gradient), times the loss scale; a parameter that two layers share comes twice.
        numbers: (weight,), at the last stage (loss, weight); none where the accumulators have none.
        scale: the loss scale, or None.

    Returns:
        The new accumulators.
    """
    sums = dict(accumulators["gradients"])
    for entry, part in gradients:
        sums[entry] = jax.tree.map(lambda total, g: total + _unscaled(g, total.dtype, scale), sums[entry], part)
    added = {name: accumulators[name] + number for name, number in zip(("weight", "loss"), reversed(numbers), strict=False)}
    return {"gradients": sums, **added}


def mean_loss(accumulators: Tree) -> tuple[jax.Array, jax.Array]:
    """Return the mean loss and the weight of a batch, from the accumulators of the last stage."""
    return accumulators["loss"] / divisor(accumulators["weight"]), accumulators["weight"]


def mean(gradient: Tree, weight: jax.Array) -> Tree:
    """Divide gradients by a weight in the precision of the weight, which may be too large for their dtype."""
    return jax.tree.map(lambda g: (g.astype(weight.dtype) / weight).astype(g.dtype), gradient)


def divisor(weight: jax.Array) -> jax.Array:
    """Return the weight of a batch, or 1 where it is zero."""
    return jnp.where(weight == 0, jnp.ones_like(weight), weight)


def _unscaled(gradient: jax.Array, dtype: Any, scale: Any) -> jax.Array:
    """Return the gradient of one microbatch as it is accumulated: in the dtype of the sum, without the loss scale."""
    wide = widened(gradient, dtype)
    return wide if scale is None else wide / jnp.asarray(scale, dtype)
