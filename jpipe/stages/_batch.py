"""The shapes of the microbatches of a batch (inputs, labels)."""

from typing import Any

import jax

from jpipe.errors import InputError
from jpipe.model._layer import describe, spec_of

Tree = Any
Batch = tuple[Tree, Tree]


def microbatch_spec(batch: Any, count: int) -> Batch:
    """Shapes and dtypes of one of `count` microbatches."""
    if not isinstance(batch, tuple) or len(batch) != 2:
        found = f"{len(batch)} of them" if isinstance(batch, tuple) else type(batch).__name__
        raise InputError(f"batch: expected a tuple (inputs, labels), found {found}")
    leaves = jax.tree.leaves(batch)
    sizes = {leaf.shape[0] if getattr(leaf, "ndim", 0) else -1 for leaf in leaves}
    if len(sizes) != 1 or -1 in sizes:
        raise InputError(f"batch: expected arrays that agree in their first dim, the batch, found {describe(batch)}")
    for leaf in leaves:
        try:
            spec_of(leaf)
        except TypeError:  # text, objects, dates
            raise InputError(f"batch: expected arrays of numbers, found {describe(batch)}; convert {leaf.dtype} to numbers") from None
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
