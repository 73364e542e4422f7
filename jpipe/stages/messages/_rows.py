"""Activations as changes against what both ends of a cut remember of the same rows, as pure functions: see `jpipe.plan.Links` for the rule.

The number of a row on the devices is `NO_ROW` where nothing is remembered: it is outside of every array, reads zeros and writes nothing.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jpipe.model._precision import wider
from jpipe.plan import Links
from jpipe.stages.messages._compress import decompress, shrinks
from jpipe.stages.messages._messages import compress_message

Tree = Any
Spec = jax.ShapeDtypeStruct

NO_ROW = np.int32(np.iinfo(np.int32).max)
"""The number that stands for no row on the devices."""


def row_specs(specs: Tree, links: Links, numbers: Spec) -> list[Spec]:
    """Return the shapes and dtypes of what is remembered of activations, a spec for each array that is remembered.

    Args:
        specs: of the activations of a microbatch.
        links: how they are compressed, and how many rows the data has.
        numbers: the spec of the numbers of the rows of a microbatch.
    """
    return [Spec((links.rows, *leaf.shape[1:]), leaf.dtype) for leaf in jax.tree.leaves(specs) if _is_remembered(leaf, links, numbers)]


def compress_change(
    links: Links, activations: Tree, remembered: Sequence[jax.Array], numbers: jax.Array, stage: int, rng: tuple[Any, Any]
) -> Tree:
    """Compress the changes of activations since their rows were last sent.

    Args:
        links: how.
        activations: of a microbatch.
        remembered: what is remembered of all rows.
        numbers: of the rows of the microbatch.
        stage: the number of the stage that sends.
        rng: (microbatch, key of the run), which are read for stochastic rounding.
    """
    arrays = iter(remembered)

    def change(leaf: jax.Array) -> jax.Array:
        if not _is_remembered(leaf, links, numbers):
            return leaf
        wide = wider(leaf.dtype, jnp.float32)
        return leaf.astype(wide) - _read(next(arrays), numbers).astype(wide)

    return compress_message(links, jax.tree.map(change, activations), "activations", stage, rng)


def add_change(links: Links, specs: Tree, remembered: Sequence[jax.Array], sent: Tree, numbers: jax.Array) -> tuple[Tree, list[jax.Array]]:
    """Add the changes that `compress_change` has compressed to what is remembered.

    Both ends run this as the same program, so that they remember the same bits.

    Args:
        links: how they were compressed.
        specs: of the activations of a microbatch.
        remembered: what is remembered of all rows.
        sent: the compressed changes.
        numbers: of the rows of the microbatch.

    Returns:
        The activations as they are received; what is remembered from now on.
    """
    arrays, remembered_now = iter(remembered), list[jax.Array]()
    wide = jax.tree.map(
        lambda spec: Spec(spec.shape, wider(spec.dtype, jnp.float32)) if _is_remembered(spec, links, numbers) else spec, specs
    )

    def received(spec: Any, change: jax.Array) -> jax.Array:
        if not _is_remembered(spec, links, numbers):
            return change
        before = next(arrays)
        now = (_read(before, numbers).astype(change.dtype) + change).astype(spec.dtype)
        remembered_now.append(before.at[numbers].set(jnp.where(jnp.isfinite(now), now, jnp.zeros_like(now)), mode="drop"))
        return now

    return jax.tree.map(received, specs, decompress(sent, links.activations, wide)), remembered_now


def _is_remembered(leaf: Any, links: Links, numbers: Any) -> bool:
    """Return whether an array of activations (or its spec) is compressed, and its first dim is the rows of the microbatch."""
    assert links.activations is not None  # `Plan` checks it
    return bool(leaf.ndim) and leaf.shape[0] == numbers.shape[0] and shrinks(leaf, links.activations)


def _read(remembered: jax.Array, numbers: jax.Array) -> jax.Array:
    """Return what is remembered of these rows, zeros for `NO_ROW`."""
    return remembered.at[numbers].get(mode="fill", fill_value=0)
