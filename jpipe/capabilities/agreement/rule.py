"""The agreement of parallel pipelines on the weights of a stage, by the rule of `jpipe.plan.Agreement`, as pure functions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jpipe.capabilities.agreement.option import OuterOptimizer

Tree = Any


ALREADY_AGREED: Tree = {}
"""In place of the mean of the changes where a restored run has the agreed weights that were moved with it already.

An empty pytree, as `ALREADY_APPLIED`, because it is part of a state, which is one.
"""

ALREADY_APPLIED: Tree = ()
"""In place of the mean of the changes where a restored run goes on from the agreed weights, or has applied the agreement already."""


class Agreed(NamedTuple):
    """What each pipeline keeps of a stage from one agreement to the next, the same in all of them.

    Attributes:
        params: A, the trained parameters on which the pipelines have agreed last; at first the initial ones.
        momentum: V of the outer optimizer, as `params`; empty without momentum.
    """

    params: Tree
    momentum: Tree


def like_agreed(outer: OuterOptimizer, params: Tree) -> Agreed:
    """Return a tree of the structure of `Agreed`, with `params` in both places."""
    return Agreed(params, params if outer.momentum else {})


def changes(agreed: Tree, params: Tree) -> Tree:
    """Return D_k, the agreed weights minus this pipeline's."""
    return jax.tree.map(jnp.subtract, agreed, params)


def mean_changes(pipelines: int, total: Tree) -> Tree:
    """Return D, the mean of the changes over the pipelines, from their sum."""
    return jax.tree.map(lambda leaf: leaf * (1 / pipelines), total)


def agree(outer: OuterOptimizer, agreed: Agreed, mean: Tree) -> Agreed:
    """Move the agreed weights.

    Args:
        outer: the outer optimizer.
        agreed: the result of the last agreement.
        mean: D.

    Returns:
        The result of this one.
    """
    momentum: Tree = {}
    if outer.momentum:
        mean, state = optax.trace(outer.momentum, nesterov=True).update(mean, optax.TraceState(agreed.momentum))
        momentum = state.trace
    params = jax.tree.map(lambda leaf, step: leaf - outer.learning_rate * step, agreed.params, mean)
    return Agreed(params, momentum)


def agree_at_once(outer: OuterOptimizer, agreed: Agreed, mean: Tree) -> tuple[Agreed, Tree]:
    """Move the agreed weights as `agree` does, and also return a copy of their parameters for the pipeline to continue from."""
    new = agree(outer, agreed, mean)
    return new, jax.tree.map(jnp.copy, new.params)


def mix(mixing: float, own: Tree, agreed: Tree) -> Tree:
    """Return the mixed parameters of a pipeline that applies an agreement late.

    Args:
        mixing: α, the share of its own.
        own: its own parameters.
        agreed: the result of the agreement.
    """
    if not mixing:  # even where its own are not finite
        return jax.tree.map(jnp.copy, agreed)
    return jax.tree.map(lambda own_leaf, leaf: mixing * own_leaf + (1 - mixing) * leaf, own, agreed)
