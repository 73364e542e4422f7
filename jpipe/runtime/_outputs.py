"""The outputs of a model for any number of rows: inputs filled up to whole microbatches, outputs joined, and shared between processes."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jpipe.errors import InputError
from jpipe.model._layer import describe
from jpipe.processes._membership import Processes

Tree = Any


class Padded:
    """An array of rows that is followed by copies of its last row: values that are real, whatever a layer checks.

    Args:
        leaf: an array, or anything with a shape, a dtype and slices of rows.
        size: the number of rows with the copies.
    """

    def __init__(self, leaf: Any, size: int) -> None:
        self._leaf, self.shape, self.dtype = leaf, (size, *leaf.shape[1:]), leaf.dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        found = np.asarray(self._leaf[rows.start : min(rows.stop, self._leaf.shape[0])])
        return np.concatenate([found, np.repeat(found[-1:], rows.stop - rows.start - len(found), axis=0)])


def check_outputs(outputs: Tree, rows: int, layer_id: str) -> None:
    """Refuse outputs that cannot be joined.

    Args:
        outputs: their specs, for a microbatch.
        rows: of a microbatch.
        layer_id: of the last layer.

    Raises:
        InputError: an array has not one row for each row of the inputs.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(outputs)[0]:
        if leaf.shape[:1] != (rows,):
            where = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise InputError(
                f"predict: expected every output of layer '{layer_id}' to have one row for each row of the inputs, {rows} for a "
                f"microbatch, found {describe(leaf)}{where}; give each row its own output there, or leave that output out of the layer"
            )


def joined_rows(spec: Any, parts: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Return the first `size` rows of the parts of an array, one after the other; the spec is that of a part."""
    return np.concatenate([*parts, np.empty((0, *spec.shape[1:]), spec.dtype)])[:size]


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
    found = {}
    for k, source in enumerate(sources):
        own = parts.get(k, blank)
        with processes.waiting("the outputs of a prediction", source):
            # As bytes: a sum of numbers would make 0 of -0.
            sent = jax.tree.map(lambda leaf: np.ascontiguousarray(leaf).reshape(-1).view(np.uint8), own)
            received = multihost_utils.broadcast_one_to_all(sent, is_source=source == processes.index)
        if keep:
            found[k] = jax.tree.map(lambda leaf, like: np.asarray(leaf).view(like.dtype).reshape(like.shape), received, blank)
    return found
