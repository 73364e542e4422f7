"""The rule by which parallel pipelines agree on the weights of a stage (see `jpipe.plan.Agreement`), as pure functions."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jpipe.capabilities.agreement.option import Agreement, OuterOptimizer

Tree = Any


ALREADY_AGREED: Tree = {}
"""Replaces the mean of the changes in a restored run if the agreed weights have already been moved by it.

It is an empty pytree, like `ALREADY_APPLIED`, because it is part of a state, which is a pytree.
"""

ALREADY_APPLIED: Tree = ()
"""Replaces the mean of the changes in a restored run that continues from the agreed weights or has already applied the agreement."""


class Agreed(NamedTuple):
    """The result of the last agreement on a stage, which each pipeline keeps. All but the errors are the same in all pipelines."""

    params: Tree  # A, the trained parameters on which the pipelines have agreed last; at first the initial parameters
    momentum: Tree  # V of the outer optimizer, a tree like `params`; empty without momentum
    errors: Tree  # E_k, what rounding the changes has lost, a tree like `params`; empty if they are not sent in few bits


def like_agreed(agreement: Agreement, params: Tree) -> Agreed:
    """Return an `Agreed` with `params` as parameters, momentum and errors; momentum and errors are empty if there are none."""
    return Agreed(params, params if agreement.outer.momentum else {}, params if agreement.bits else {})


def changes(agreed: Tree, params: Tree) -> Tree:
    """Return D_k, the agreed weights minus the weights of this pipeline."""
    return jax.tree.map(jnp.subtract, agreed, params)


def mean_changes(pipelines: int, total: Tree) -> Tree:
    """Return D, the mean of the changes over the pipelines, from their sum."""
    return jax.tree.map(lambda leaf: leaf * (1 / pipelines), total)


def agree(outer: OuterOptimizer, agreed: Agreed, mean: Tree) -> Agreed:
    """Return the new agreed weights from the last ones and `mean`, the mean of the pipelines' changes (D)."""
    momentum: Tree = {}
    if outer.momentum:
        mean, state = optax.trace(outer.momentum, nesterov=True).update(mean, optax.TraceState(agreed.momentum))
        momentum = state.trace
    params = jax.tree.map(lambda leaf, step: leaf - outer.learning_rate * step, agreed.params, mean)
    return Agreed(params, momentum, agreed.errors)


def agree_at_once(outer: OuterOptimizer, agreed: Agreed, mean: Tree) -> tuple[Agreed, Tree]:
    """Move the agreed weights as `agree` does, and also return a copy of their parameters for the pipeline to continue from."""
    new = agree(outer, agreed, mean)
    return new, jax.tree.map(jnp.copy, new.params)


def mix(mixing: float, own: Tree, agreed: Tree) -> Tree:
    """Return the mixed parameters of a pipeline that applies an agreement late; `mixing` (α) is the share of its own parameters."""
    if not mixing:  # even if its own parameters are not finite
        return jax.tree.map(jnp.copy, agreed)
    return jax.tree.map(lambda own_leaf, leaf: mixing * own_leaf + (1 - mixing) * leaf, own, agreed)
