"""The shapes of the microbatches of a batch (inputs, labels), and the few shapes that the batches of a run may have."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe.errors import InputError
from jpipe.model._layer import describe, spec_of
from jpipe.stages._functions import StageFunctions

Tree = Any
Batch = tuple[Tree, Tree]


def microbatch_spec(batch: Any, count: int) -> Batch:
    """Shapes and dtypes of one of `count` microbatches."""
    if not isinstance(batch, tuple) or len(batch) != 2:
        found = f"{len(batch)} of them" if isinstance(batch, tuple) else type(batch).__name__
        raise InputError(f"batch: expected a tuple (inputs, labels), found {found}")
    try:
        leaves = jax.tree.leaves(batch)
    except ValueError:  # keys of a dict that cannot be sorted
        raise InputError(
            "batch: expected dicts with keys that can be sorted, found some of several types; make all of them texts"
        ) from None
    if masked := [leaf for leaf in leaves if isinstance(leaf, np.ma.MaskedArray)]:
        raise InputError(
            f"batch: expected arrays without masks, found a masked array {describe(masked[0])}, whose mask would be dropped; "
            "give filled values (numpy.ma.filled), and the mask as an array of its own"
        )
    sizes = {leaf.shape[0] if getattr(leaf, "ndim", 0) else -1 for leaf in leaves}
    if len(sizes) != 1 or -1 in sizes:
        raise InputError(f"batch: expected arrays that agree in their first dim, the batch, found {describe(batch)}")
    for leaf in leaves:
        try:
            spec_of(leaf)
        except (TypeError, ValueError):  # text, objects, dates, random keys
            found = getattr(leaf, "dtype", type(leaf).__name__)
            raise InputError(f"batch: expected arrays of numbers, found {describe(batch)}; convert {found} to numbers") from None
    size = sizes.pop()
    if size == 0 or size % count:
        raise InputError(
            f"batch: expected a number of rows divisible by {count} microbatches, found {size}; change the batch size or microbatches"
        )
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size // count, *leaf.shape[1:]), spec_of(leaf).dtype), batch)


def count_microbatches(batch: Batch, rows_each: int) -> int:
    """How many microbatches of `rows_each` rows a batch has."""
    size = rows_of(microbatch_spec(batch, 1))
    if size % rows_each:
        raise InputError(f"batch: expected a number of rows divisible by the microbatch size {rows_each}, found {size}")
    return size // rows_each


def rows_of(spec: Tree) -> int:
    """The size of the first dim of every array."""
    return jax.tree.leaves(spec)[0].shape[0]


class Bucket(NamedTuple):
    """One of the shapes that batches may have.

    Attributes:
        spec: shapes and dtypes of one microbatch.
        functions: of each stage, for such microbatches.
    """

    spec: Batch
    functions: Sequence[StageFunctions]


def bucket_of(spec: Batch, specs: Sequence[Batch]) -> int:
    """Which of `specs` the microbatches of a batch have.

    Raises:
        InputError: none of them.
    """
    if spec not in specs:
        those = "the one" if len(specs) == 1 else "one of those"
        raise InputError(f"batch: expected microbatches like {those} of init, {told(specs)}; found {describe(spec)}")
    return specs.index(spec)


def check_buckets(buckets: Sequence[Bucket]) -> None:
    """Refuse shapes that cannot take turns in one run.

    Raises:
        InputError: they differ in their rows or in the names of their arrays, or a layer has other parameters or state with one of them.
    """
    first = buckets[0]
    for bucket in buckets[1:]:
        if rows_of(bucket.spec) != rows_of(first.spec):
            raise InputError(
                f"buckets: expected microbatches of {rows_of(first.spec)} rows, as the others have, found {describe(bucket.spec)}; "
                "give each batch as many rows"
            )
        if jax.tree.structure(bucket.spec) != jax.tree.structure(first.spec):  # type: ignore[operator]
            raise InputError(
                f"buckets: expected the arrays that the others have, {describe(first.spec)}, found {describe(bucket.spec)}; "
                "give each batch the same arrays, which may differ in their shapes"
            )
        for here, there in zip(first.functions, bucket.functions, strict=True):
            for what, own, other in (("parameters", here.specs.fresh, there.specs.fresh), ("state", here.specs.state, there.specs.state)):
                changed = [entry for entry in own if own[entry] != other.get(entry)]
                if changed:
                    raise InputError(
                        f"buckets: expected layer '{changed[0]}' to have the same {what} with batches of each shape, found "
                        f"{describe(own[changed[0]])} with microbatches of {describe(first.spec)} and {describe(other.get(changed[0]))} "
                        f"with {describe(bucket.spec)}; make them independent of the shape, or give one shape"
                    )


def told(specs: Sequence[Batch]) -> str:
    """The shapes, for messages."""
    return " or ".join(map(describe, specs))
