"""Norms of what a delay and its correction do to the weights of a stage."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.model._precision import wider
from jpipe.stages.functions._loss import loss_dtype
from jpipe.stages.functions._stage import StageFunctions

Tree = Any


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
