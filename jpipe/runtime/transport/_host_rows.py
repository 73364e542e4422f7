"""The rows of batches on the host: read and checked for a microbatch, or shared by all processes."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jpipe.errors import InputError
from jpipe.model._layer import describe
from jpipe.processes._membership import Processes

Tree = Any


def rows(batch: Tree, start: int, stop: int) -> Tree:
    """Copy rows start .. stop - 1 of every array of a batch: `device_put` reads late, and the caller may overwrite the batch.

    Raises:
        InputError: they are not of the array's dtype and shape.
    """
    return jax.tree.map(lambda leaf: _rows_of_leaf(leaf, start, stop), batch)


def _rows_of_leaf(leaf: Any, start: int, stop: int) -> np.ndarray:
    array = np.array(leaf[start:stop])
    expected = jax.ShapeDtypeStruct((stop - start, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype))
    if array.dtype == object or (array.shape, jax.dtypes.canonicalize_dtype(array.dtype)) != (expected.shape, expected.dtype):
        raise InputError(
            f"batch: expected rows {start} to {stop - 1} as {describe(expected)}, as its shape and dtype say, found {describe(array)}"
        )
    return array


def to_host(batch: Tree) -> Tree:
    """Convert the JAX arrays of a batch to NumPy; anything else with rows stays, to be read a microbatch at a time.

    Raises:
        InputError: it has no rows that can be read: only a shape, or arrays that were deleted.
    """
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise InputError(f"batch: expected arrays, found {describe(leaf)} that was deleted, as donated arrays are; give a copy of it")
        if not hasattr(leaf, "__getitem__"):
            raise InputError(f"batch: expected arrays whose rows can be read, found {type(leaf).__name__}; give arrays")
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, batch)


def share_rows(
    processes: Processes, name: str, parts: Mapping[int, Tree], sources: Sequence[int], outputs: Tree, *, keep: bool
) -> dict[int, Tree]:
    """Send the outputs of each microbatch to all processes, bit for bit; all of them call it.

    Args:
        processes: of the run.
        name: of the call, the same in all processes.
        parts: of this process, by microbatch.
        sources: for each microbatch the process that has it.
        outputs: the specs of each part.
        keep: whether this process wants them.

    Returns:
        All parts, or nothing.
    """
    processes.barrier(name)  # all have computed: no process waits in a collective for another's computation
    blank = jax.tree.map(lambda spec: np.zeros(spec.shape, spec.dtype), outputs)
    results = {}
    for k, source in enumerate(sources):
        part = parts.get(k, blank)
        with processes.waiting("the outputs of a prediction", source):
            # As bytes: a sum of numbers would make 0 of -0.
            sent = jax.tree.map(lambda leaf: np.ascontiguousarray(leaf).reshape(-1).view(np.uint8), part)
            received = multihost_utils.broadcast_one_to_all(sent, is_source=source == processes.index)
        if keep:
            results[k] = jax.tree.map(lambda leaf, like: np.asarray(leaf).view(like.dtype).reshape(like.shape), received, blank)
    return results
