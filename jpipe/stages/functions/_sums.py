"""Sums over the replicas of a stage, and over the stages that hold a shared parameter."""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.stages.functions._accumulators import mean_loss
from jpipe.stages.functions._stage import StageFunctions
from jpipe.stages.messages._sums import with_feedback, without_compression

Tree = Any

_PURPOSE = 8  # of a key of the run; those of the layers and of the messages between stages are below


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


def compress_sum(f: StageFunctions, gradients: Tree, weight: jax.Array, errors: Tree, rng: tuple[Any, Any]) -> tuple[Tree, Tree]:
    """Compress what a replica gives to a sum, or one part of it.

    Args:
        f: of the stage.
        gradients: from the accumulators of the replica.
        weight: of its microbatches.
        errors: what rounding has lost of its gradients before.
        rng: (number of the update and the replica, key of the run); (None, None): round to nearest.

    Returns:
        The compressed gradients; the new errors.
    """
    assert f.compressed_sums is not None
    number, key = rng
    keys = None
    if key is not None:
        for fixed in (_PURPOSE, f.number, number):
            key = jax.random.fold_in(key, fixed)
        keys = {entry: jax.random.fold_in(key, n) for n, entry in enumerate(sorted(f.specs.params))}
    return with_feedback(f.partition, f.compressed_sums, gradients, weight, errors, keys)


def sum_compressed(f: StageFunctions, parts: Sequence[tuple[Tree, list[jax.Array]]]) -> tuple[Tree, list[jax.Array], Any]:
    """Sum what all replicas have sent, in their order, and finish it as `finish` does.

    Args:
        f: of the stage.
        parts: of each replica (accumulators with compressed gradients, layer state), or one part of them.
    """
    assert f.compressed_sums is not None
    specs = f.accumulators_spec["gradients"]
    of_replicas = []
    for accumulators, state in parts:
        sent = accumulators["gradients"]
        gradients = without_compression(f.partition, f.compressed_sums, sent, {entry: specs[entry] for entry in sent})
        of_replicas.append(({**accumulators, "gradients": gradients}, state))
    return finish(f, reduce(add, of_replicas))


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
