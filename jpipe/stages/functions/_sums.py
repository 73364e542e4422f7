"""Sums over the replicas of a stage, and over the stages that hold a shared parameter."""

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
