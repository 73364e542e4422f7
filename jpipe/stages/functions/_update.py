"""The optimizer step of a stage, with the norm of all gradients, clipping, skipped batches and what a delay does to the weights."""

from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.model._precision import LossScale, wider
from jpipe.model.layerwise._optimizer import masters_of, without_prediction
from jpipe.model.layerwise._trace import Position
from jpipe.stages.functions._accumulators import divisor, mean, mean_loss
from jpipe.stages.functions._loss import loss_dtype
from jpipe.stages.functions._stage import StageFunctions

Tree = Any

_NOWHERE: Position = MappingProxyType({})


class GlobalNorm(NamedTuple):
    """What an update has to know of the gradients of all stages, as scalars.

    Attributes:
        norm: the square root of the sum of the squares of the mean gradients. With `clip_stage_norm` an update gets the norm of its stage
            alone, see `with_stage_norm`.
        nonfinite: the number of their entries that are NaN or infinite; None if updates do not use it.
    """

    norm: Any
    nonfinite: Any


def norm_spec() -> GlobalNorm:
    """Return the shapes and dtypes of the norm."""
    number = jax.ShapeDtypeStruct((), loss_dtype())
    return GlobalNorm(number, number)


def squares_spec(counts: Sequence[int]) -> tuple[GlobalNorm, ...]:
    """Return the shapes and dtypes of the sums of squares of stages that count these numbers of entries."""
    numbers = (jax.ShapeDtypeStruct((count,), loss_dtype()) for count in counts)
    return tuple(GlobalNorm(number, number) for number in numbers)


def sum_squares(f: StageFunctions, accumulators: Tree) -> GlobalNorm:
    """Sum the squares of each layer's mean gradient, as `norm`, and count its entries that are not finite."""
    weight = divisor(accumulators["weight"])
    means = {layer_id: mean(gradient, weight) for layer_id, gradient in accumulators["gradients"].items()}
    leaves = [[leaf.astype(loss_dtype()) for leaf in jax.tree.leaves(means[entry])] for entry in f.counted]
    zero = jnp.zeros((), loss_dtype())
    squares = [sum((jnp.square(leaf).sum() for leaf in layer), zero) for layer in leaves]
    nonfinite = [sum(((~jnp.isfinite(leaf)).sum(dtype=loss_dtype()) for leaf in layer), zero) for layer in leaves]
    return GlobalNorm(jnp.stack(squares), jnp.stack(nonfinite))


def norm_of(squares: tuple[GlobalNorm, ...]) -> GlobalNorm:
    """Return the norm from `sum_squares` of each stage, added layer by layer, so that it does not depend on the cut."""
    total = jnp.zeros((), squares[0].norm.dtype)
    for layer in jnp.concatenate([stage.norm for stage in squares]):
        total += layer
    return GlobalNorm(jnp.sqrt(total), jnp.concatenate([stage.nonfinite for stage in squares]).sum())


def with_stage_norm(f: StageFunctions, accumulators: Tree, norm: GlobalNorm | None) -> GlobalNorm:
    """Return what an update gets with `clip_stage_norm`: the norm of the stage's mean gradient, and `norm.nonfinite` of all stages.

    Args:
        f: of the stage.
        accumulators: the sums over the batch, with all trained parameters of the stage, also those that other replicas update.
        norm: of all stages, if updates use it.
    """
    return GlobalNorm(norm_of((sum_squares(f, accumulators),)).norm, None if norm is None else norm.nonfinite)


def update(
    f: StageFunctions,
    params: Tree,
    optimizer_state: Tree,
    accumulators: Tree,
    norm: GlobalNorm | None = None,
    position: Position = _NOWHERE,
) -> tuple[Tree, Tree, Tree, tuple[jax.Array, jax.Array] | None]:
    """Take one optimizer step with the mean gradient. A batch whose weights are all zero has gradient and loss zero.

    Args:
        f: of the stage.
        params: the trained parameters, without those that other stages hold, too (see `update_shared`).
        optimizer_state: of the entries to update.
        accumulators: the sums over the batch; they may have more entries.
        norm: of all stages, or from `with_stage_norm`; needed to clip, and to skip batches whose gradients are not finite.
        position: the entries that the optimizer `needs`.

    Returns:
        The new parameters; the new optimizer state; zero accumulators; at the last stage the mean loss and the weight of the batch.
    """
    new_params, new_state = _step_or_skip(f, params, optimizer_state, accumulators, norm, position)
    zeros = jax.tree.map(jnp.zeros_like, accumulators)
    return new_params, new_state, zeros, mean_loss(accumulators) if f.last else None


def update_shared(
    f: StageFunctions,
    params: Tree,
    optimizer_state: Tree,
    gradients: Tree,
    weight: jax.Array,
    norm: GlobalNorm | None,
    position: Position = _NOWHERE,
) -> tuple[Tree, Tree, Tree]:
    """Take one optimizer step for shared parameters, keyed by name.

    All stages that hold them run this same program. As a part of the update of different stages XLA would round it differently.

    Returns:
        The new parameters; the new optimizer state; zero gradients.
    """
    new_params, new_state = _step_or_skip(f, params, optimizer_state, {"gradients": gradients, "weight": weight}, norm, position)
    return new_params, new_state, jax.tree.map(jnp.zeros_like, gradients)


def next_scale(f: StageFunctions, scale: LossScale, norm: GlobalNorm) -> LossScale:
    """Return the dynamic loss scale of the version that an update makes, from that of the version before."""
    assert f.precision.dynamic_scale is not None
    return f.precision.dynamic_scale.after(scale, norm.nonfinite == 0)


def average_params(f: StageFunctions, optimizer_state: Tree, newest: Tree) -> dict[str, Tree]:
    """Return the moving average of the parameters, in the dtypes in which it is kept; needs `optimizer.ema_decay`.

    Args:
        f: of the stage.
        optimizer_state: of the entries that the worker updates; the result has these entries alone.
        newest: the newest parameters, whose frozen ones are their own average.
    """
    return f.trained.joined({entry: f.optimizer.average(state) for entry, state in optimizer_state.items()}, newest)


def newest_params(f: StageFunctions, optimizer_state: Tree, newest: Tree) -> dict[str, Tree]:
    """Return the newest parameters without prediction: the masters where there are any, else in the dtypes of `newest`.

    Args:
        f: of the stage.
        optimizer_state: of the entries that the worker updates; the result has these entries alone.
        newest: the newest parameters, at least of these entries.
    """
    if f.precision.has_masters:
        trained: Tree = {entry: state.masters for entry, state in optimizer_state.items()}
        frozen = masters_of(f.trained.unchosen(newest))  # a frozen parameter has none: it is that of the newest version, as precise
    else:
        trained, frozen = f.trained.part({entry: newest[entry] for entry in optimizer_state}), newest
    if f.predicts:
        trained = _without_prediction(trained, {entry: f.optimizer.ahead(state) for entry, state in optimizer_state.items()})
    return f.trained.joined(trained, frozen)


_without_prediction = jax.jit(without_prediction)


def _step_or_skip(
    f: StageFunctions, params: Tree, optimizer_state: Tree, accumulators: Tree, norm: GlobalNorm | None, position: Position
) -> tuple[Tree, Tree]:
    """Return the new parameters and optimizer state, or the old ones if the batch is skipped."""
    if not f.skip_nonfinite:
        return _step(f, params, optimizer_state, accumulators, norm, position)
    assert norm is not None
    # With `where` instead, XLA rounds the update in other ways than without `skip_nonfinite`.
    arguments = params, optimizer_state, accumulators, norm, dict(position)
    new_params, new_state = jax.lax.cond(norm.nonfinite == 0, partial(_step, f), _unchanged, *arguments)
    return new_params, new_state


def _step(
    f: StageFunctions, params: Tree, optimizer_state: Tree, accumulators: Tree, norm: GlobalNorm | None, position: Position
) -> tuple[Tree, Tree]:
    weight = divisor(accumulators["weight"])
    new_params, new_state = {}, {}
    for entry in optimizer_state:
        gradient = mean(accumulators["gradients"][entry], weight)
        if f.largest_norm is not None:
            assert norm is not None
            gradient = jax.tree.map(lambda g: _clip(g, norm.norm, f.largest_norm), gradient)
        state = optimizer_state[entry]
        new_params[entry], new_state[entry] = f.optimizer.update(entry, gradient, state, params[entry], position)
    return new_params, new_state


def _unchanged(params: Tree, optimizer_state: Tree, accumulators: Tree, norm: GlobalNorm, position: Position) -> tuple[Tree, Tree]:
    return params, optimizer_state


def _clip(gradient: jax.Array, norm: jax.Array, largest: float | None) -> jax.Array:
    """Clip as `optax.clip_by_global_norm`; if the norm is NaN, all gradients become NaN."""
    assert largest is not None
    return jnp.where(norm < largest, gradient, gradient / norm.astype(gradient.dtype) * largest)


def delay_squares(f: StageFunctions, newest: Tree, before: Tree | None, optimizer_state: Tree) -> jax.Array:
    """Return the squared norms of the prediction of a stage and of the distance of its two newest weight versions.

    Args:
        f: of the stage.
        newest: the parameters of the newest version, by entry, of the entries to count.
        before: those of the version before; None if the stage holds one version, which gives NaN for the distance.
        optimizer_state: of these entries.

    Returns:
        Two numbers, shape (2,), in the dtype of losses.
    """
    ahead = {entry: f.optimizer.ahead(state) for entry, state in optimizer_state.items()} if f.predicts else {}
    return _squares(ahead, newest, newest if before is None else before, has_two=before is not None)


@partial(jax.jit, static_argnames="has_two")
def _squares(ahead: Tree, newest: Tree, before: Tree, has_two: bool) -> jax.Array:
    distance = _sum_of_squares(jax.tree.map(lambda new, old: _precise(new) - _precise(old), newest, before))
    return jnp.stack([_sum_of_squares(ahead), distance if has_two else jnp.full_like(distance, jnp.nan)])


def _sum_of_squares(tree: Tree) -> jax.Array:
    return sum(
        (jnp.sum(jnp.square(_precise(leaf)), dtype=loss_dtype()) for leaf in jax.tree.leaves(tree)), start=jnp.zeros((), loss_dtype())
    )


def _precise(leaf: jax.Array) -> jax.Array:
    return leaf.astype(wider(leaf.dtype, jnp.float32))
