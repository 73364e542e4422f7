"""Sums over replicas, the optimizer step of a stage including the changes of capabilities, and norms that show the effect of a delay."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.capabilities.registry import updates_for
from jpipe.model._precision import wider
from jpipe.model.layerwise._optimizer import masters_of, without_prediction
from jpipe.model.layerwise._trace_optimizer import Position
from jpipe.stages.functions._loss import divisor, loss_dtype, mean, mean_loss
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any

_NOWHERE: Position = MappingProxyType({})


def add(a: Tree, b: Tree) -> Tree:
    """Add two trees leaf by leaf."""
    return jax.tree.map(jnp.add, a, b)


def finish(f: StageFunctions, summed: tuple[Tree, list[jax.Array]]) -> tuple[Tree, list[jax.Array], tuple[jax.Array, jax.Array] | None]:
    """Finish a sum over replicas of (accumulators, layer state), or of one part of this pair.

    Return the accumulators, the means of the layer state, and (mean loss, weight) of the batch if the accumulators have a loss.
    """
    accumulators, state = summed
    return accumulators, mean_state(f, state), mean_loss(accumulators) if "loss" in accumulators else None


def mean_state(f: StageFunctions, total: list[jax.Array]) -> list[jax.Array]:
    """Return the mean of each floating-point leaf of the layer state over the replicas, from their sum."""
    # XLA may replace a division by a constant with a product. Writing the product makes the bits independent of XLA's choice.
    return [leaf * (1 / f.stage.replicas) for leaf in total]


def update(
    f: StageFunctions,
    params: Tree,
    optimizer_state: Tree,
    accumulators: Tree,
    others: Mapping[str, Tree] = _NOWHERE,
    position: Position = _NOWHERE,
) -> tuple[Tree, Tree, Tree, tuple[jax.Array, jax.Array] | None]:
    """Take one optimizer step with the mean gradient. If all weights of a batch are zero, its gradient and loss are zero.

    Args:
        f: the functions of the stage.
        params: the trained parameters, without the entries that separate programs update (`StageFunctions.apart`).
        optimizer_state: the optimizer state of the entries to update.
        accumulators: the sums over the batch; they may have more entries.
        others: the arrays that capabilities pass to the update, by the name of the capability.
        position: the entries of the position that the optimizer `needs`.

    Returns:
        The new parameters; the new optimizer state; zero accumulators; at the last stage (mean loss, weight) of the batch, else None.
    """
    new_params, new_state = _take_step(f, params, optimizer_state, accumulators, others, position)
    zeros = jax.tree.map(jnp.zeros_like, accumulators)
    return new_params, new_state, zeros, mean_loss(accumulators) if f.last else None


def update_entries(
    f: StageFunctions,
    params: Tree,
    optimizer_state: Tree,
    gradients: Tree,
    weight: jax.Array,
    others: Mapping[str, Tree] = _NOWHERE,
    position: Position = _NOWHERE,
) -> tuple[Tree, Tree, Tree]:
    """Take one optimizer step for some entries, as a separate program that all stages with these entries run.

    If the step were a part of the updates of different stages, XLA could round it differently in each. Return the new parameters, the new
    optimizer state and zero gradients.
    """
    new_params, new_state = _take_step(f, params, optimizer_state, {"gradients": gradients, "weight": weight}, others, position)
    return new_params, new_state, jax.tree.map(jnp.zeros_like, gradients)


def average_params(f: StageFunctions, optimizer_state: Tree, newest: Tree) -> dict[str, Tree]:
    """Return the moving average of the entries in `optimizer_state`, in the dtypes in which it is kept; frozen parameters are their own.

    It needs `optimizer.ema_decay`.
    """
    return f.trained.joined({entry: f.optimizer.average(state) for entry, state in optimizer_state.items()}, newest)


def newest_params(f: StageFunctions, optimizer_state: Tree, newest: Tree) -> dict[str, Tree]:
    """Return the newest parameters of the entries in `optimizer_state` without prediction, from masters if there are any.

    Otherwise they are in the dtypes of `newest`.
    """
    if f.precision.has_masters:
        trained: Tree = {entry: state.masters for entry, state in optimizer_state.items()}
        frozen = masters_of(f.trained.unchosen(newest))  # a frozen parameter needs no master: its newest version is as precise
    else:
        trained, frozen = f.trained.part({entry: newest[entry] for entry in optimizer_state}), newest
    if f.predicts:
        trained = _without_prediction(trained, {entry: f.optimizer.ahead(state) for entry, state in optimizer_state.items()})
    return f.trained.joined(trained, frozen)


_without_prediction = jax.jit(without_prediction)


def _take_step(
    f: StageFunctions, params: Tree, optimizer_state: Tree, accumulators: Tree, others: Mapping[str, Tree], position: Position
) -> tuple[Tree, Tree]:
    """Return the new parameters and optimizer state."""
    step: Callable[..., tuple[Tree, Tree]] = partial(_step, f)
    for hooks in updates_for(f.capabilities).values():
        step = hooks.step(f, step)
    return step(params, optimizer_state, accumulators, others, position)


def _step(
    f: StageFunctions, params: Tree, optimizer_state: Tree, accumulators: Tree, others: Mapping[str, Tree], position: Position
) -> tuple[Tree, Tree]:
    weight = divisor(accumulators["weight"])
    new_params, new_state = {}, {}
    for entry in optimizer_state:
        gradient = mean(accumulators["gradients"][entry], weight)
        for name, hooks in updates_for(f.capabilities).items():
            gradient = hooks.gradient(f, others[name], gradient)
        state = optimizer_state[entry]
        new_params[entry], new_state[entry] = f.optimizer.update(entry, gradient, state, params[entry], position)
    return new_params, new_state


def delay_squares(f: StageFunctions, newest: Tree, before: Tree | None, optimizer_state: Tree) -> jax.Array:
    """Return the squared norms, shape (2,), of a stage's prediction and of the distance between its two newest weight versions.

    The entries of `newest` count. Without a version `before` the distance is NaN. The dtype is as for losses.
    """
    ahead = {entry: f.optimizer.ahead(state) for entry, state in optimizer_state.items()} if f.predicts else {}
    return _squared(ahead, newest, newest if before is None else before, has_two=before is not None)


@partial(jax.jit, static_argnames="has_two")
def _squared(ahead: Tree, newest: Tree, before: Tree, has_two: bool) -> jax.Array:
    distance = _sum_of_squares(jax.tree.map(lambda new, old: _precise(new) - _precise(old), newest, before))
    return jnp.stack([_sum_of_squares(ahead), distance if has_two else jnp.full_like(distance, jnp.nan)])


def _sum_of_squares(tree: Tree) -> jax.Array:
    return sum(
        (jnp.sum(jnp.square(_precise(leaf)), dtype=loss_dtype()) for leaf in jax.tree.leaves(tree)), start=jnp.zeros((), loss_dtype())
    )


def _precise(leaf: jax.Array) -> jax.Array:
    return leaf.astype(wider(leaf.dtype, jnp.float32))
