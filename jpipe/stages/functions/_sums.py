"""Sums over the replicas of a stage, and over the stages that hold a shared parameter."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.stages.functions._accumulators import mean_loss
from jpipe.stages.functions._stage import StageFunctions

Tree = Any


def add(a: Tree, b: Tree) -> Tree:
    """Add two trees leaf by leaf."""
    return jax.tree.map(jnp.add, a, b)


def finish(f: StageFunctions, summed: tuple[Tree, list[jax.Array]]) -> tuple[Tree, list[jax.Array], tuple[jax.Array, jax.Array] | None]:
    """Finish a sum over replicas of (accumulators, layer state), or of one part of them.

    Returns:
        The accumulators; the means of the layer state; at the last stage the mean loss and the weight of the batch, if they are there.
    """
    accumulators, state = summed
    return accumulators, mean_state(f, state), mean_loss(accumulators) if "loss" in accumulators else None


def mean_state(f: StageFunctions, total: list[jax.Array]) -> list[jax.Array]:
    """Return the mean of each floating-point leaf of the layer state over the replicas, from their sum."""
    # XLA may replace a division by a constant by this product; written out, the bits do not depend on that.
    return [leaf * (1 / f.stage.replicas) for leaf in total]


def take_shared(f: StageFunctions, accumulators: Tree) -> dict[str, jax.Array]:
    """Copy the gradients of the parameters that other stages hold, too."""
    return {name: jnp.copy(gradient) for name, gradient in shared_gradients(f, accumulators).items()}


def shared_gradients(f: StageFunctions, accumulators: Tree) -> dict[str, Any]:
    """Select the gradients (or specs) of the parameters that other stages hold, too."""
    return {name: accumulators["gradients"][name] for names in f.sharing.groups_of(f.number).values() for name in names}


def unshared(f: StageFunctions, tree: Mapping[str, Tree]) -> dict[str, Tree]:
    """Select the entries of a tree that no other stage holds."""
    shared = {name for names in f.sharing.groups_of(f.number).values() for name in names}
    return {entry: part for entry, part in tree.items() if entry not in shared}


def shared_with(f: StageFunctions, other: int, gradients: Mapping[str, Any]) -> dict[str, Any]:
    """Select the gradients (or specs) of the parameters that another stage holds, too."""
    return {name: gradients[name] for name in f.sharing.between(f.number, other)}


def add_shared(f: StageFunctions, group: int, accumulators: Tree, received: Mapping[int, Mapping[str, jax.Array]]) -> Tree:
    """Sum the gradients of a group of shared parameters over its stages, in the order of the stages.

    Args:
        f: of the stage.
        group: the number of the group.
        accumulators: of the stage.
        received: the gradients of the group's remaining stages.

    Returns:
        The accumulators with the sums.
    """
    stages, names = f.sharing.groups[group]
    gradients = dict(accumulators["gradients"])
    for name in names:
        first, *later = (gradients[name] if s == f.number else received[s][name] for s in stages)
        gradients[name] = sum(later, first)
    return {**accumulators, "gradients": gradients}
