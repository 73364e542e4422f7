"""Calls of losses and metrics with checks of their results, and the sums of losses, weights and gradients over a batch."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.errors import InputError, callers_code, cause
from jpipe.model._function_arguments import Loss, call_with_randomness
from jpipe.model._layer import describe, key_spec
from jpipe.model._precision import Precision, widened

Tree = Any


def loss_dtype() -> Any:
    """Return the dtype in which losses and weights are summed: float32, or float64 where JAX has it enabled."""
    return jax.dtypes.canonicalize_dtype(jnp.float64)


def call_loss(function: Loss, where: str, outputs: Tree, labels: Tree, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Call a loss or a metric; return the sum and the weight, scalars of `loss_dtype()`.

    Error messages begin with `where`, such as "loss". Raise InputError if the result is not two real scalars.
    """
    result = call_with_randomness(function, outputs, labels, key)
    of = "sum of the losses" if where == "loss" else "sum"
    if not (isinstance(result, tuple) and len(result) == 2 and all(_is_scalar(part) for part in result)):
        values = "losses" if where == "loss" else "values"
        raise InputError(f"{where}: expected ({of}, weight), two scalars, found {describe(result)}; return {values}.sum(), count")
    total, weight = result
    kind = jnp.floating if where == "loss" else jnp.number
    if not jnp.issubdtype(jnp.result_type(total), kind) or jnp.iscomplexobj(total):
        expected = "a real floating-point number, which has a gradient" if where == "loss" else "a real number"
        raise InputError(where=where, expected=f"the {of} to be {expected}", found=jnp.result_type(total), change="convert it to float32")
    if jnp.iscomplexobj(weight):
        raise InputError(where=where, expected="the weight to be a real number", found=jnp.result_type(weight), change="return a count")
    return jnp.asarray(total, loss_dtype()), jnp.asarray(weight, loss_dtype())


def check_loss(function: Loss, where: str, layer: str, outputs: Tree, labels: Tree) -> None:
    """Check by tracing that a loss or metric accepts the outputs and labels, given as specs, of the last stage."""

    def message(error: BaseException) -> str:
        return (
            f"{where}: the function does not take outputs {describe(outputs)} of layer {layer} and labels {describe(labels)}; "
            f"it raises {cause(error)}; fix the function"
        )

    with callers_code(message):
        jax.eval_shape(lambda y, labels, key: call_loss(function, where, y, labels, key), outputs, labels, key_spec())


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float, complex)) or (hasattr(value, "dtype") and jnp.shape(value) == ())


# Accumulators: sums over a batch, and their means ----------------------------------------------------------------------


def zero_accumulators(trained: Mapping[str, Tree], precision: Precision, *, last: bool) -> dict[str, Any]:
    """Return the accumulators at the start of a batch, for these trained parameters."""
    numbers = ("loss", "weight") if last else ("weight",)
    gradients = jax.tree.map(lambda p: jnp.zeros(p.shape, precision.accumulator_dtype(p.dtype)), dict(trained))
    return {"gradients": gradients} | {name: jnp.zeros((), loss_dtype()) for name in numbers}


def accumulate(
    accumulators: Mapping[str, Any],
    gradients: Iterable[tuple[str, Tree]],
    numbers: tuple[Any, ...],
    scale: Any,
    add: Callable[[str, Tree, Tree], Tree],
) -> dict[str, Any]:
    """Add one microbatch to the accumulators, and return the new ones.

    Args:
        gradients: pairs (entry, gradient), multiplied by the loss scale. An entry occurs twice if two layers share a parameter.
        numbers: (weight,), at the last stage (loss, weight); empty if the accumulators have neither.
        add: `(entry, sums, gradients) -> sums`.
    """
    sums = dict(accumulators["gradients"])
    for entry, part in gradients:
        unscaled = jax.tree.map(lambda total, g: _unscaled(g, total.dtype, scale), sums[entry], part)
        sums[entry] = add(entry, sums[entry], unscaled)
    added = {name: accumulators[name] + number for name, number in zip(("weight", "loss"), reversed(numbers), strict=False)}
    return {"gradients": sums, **added}


def add_entry(entry: str, sums: Tree, gradients: Tree) -> Tree:
    """Add the gradients of a microbatch to the sums of an entry."""
    return jax.tree.map(jnp.add, sums, gradients)


def mean_loss(accumulators: Tree) -> tuple[jax.Array, jax.Array]:
    """Return the mean loss and the weight of a batch, from the accumulators of the last stage."""
    return accumulators["loss"] / divisor(accumulators["weight"]), accumulators["weight"]


def mean(gradient: Tree, weight: jax.Array) -> Tree:
    """Divide gradients by a weight, in the precision of the weight, which may be too large for the dtype of the gradients."""
    return jax.tree.map(lambda g: (g.astype(weight.dtype) / weight).astype(g.dtype), gradient)


def divisor(weight: jax.Array) -> jax.Array:
    """Return the weight of a batch, or 1 if the weight is zero."""
    return jnp.where(weight == 0, jnp.ones_like(weight), weight)


def _unscaled(gradient: jax.Array, dtype: Any, scale: Any) -> jax.Array:
    """Convert the gradient of one microbatch for accumulation: to the dtype of the sum, without the loss scale."""
    wide = widened(gradient, dtype)
    return wide if scale is None else wide / jnp.asarray(scale, dtype)
