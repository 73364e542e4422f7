"""Batches and their microbatches: checked shapes, the few that a run may have, padding, and rows read on the host."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe.errors import InputError
from jpipe.model._layer import describe, spec_of
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any
Batch = tuple[Tree, Tree]


def microbatch_spec(batch: Any, count: int) -> Batch:
    """Return the shapes and dtypes of one of `count` microbatches."""
    if not isinstance(batch, tuple) or len(batch) != 2:
        actual = f"{len(batch)} of them" if isinstance(batch, tuple) else type(batch).__name__
        raise InputError(where="batch", expected="a tuple (inputs, labels)", found=actual)
    size = _checked_rows(batch, "batch")
    if size == 0 or size % count:
        raise InputError(
            f"batch: expected a number of rows divisible by {count} microbatches, found {size}; change the batch size or microbatches"
        )
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((size // count, *leaf.shape[1:]), spec_of(leaf).dtype), batch)


def _checked_rows(batch: Tree, where: str) -> int:
    """Return the number of rows, checked to be the same in all arrays."""
    try:
        leaves = jax.tree.leaves(batch)
    except ValueError:  # keys of a dict that cannot be sorted
        raise InputError(
            where=where, expected="dicts with keys that can be sorted", found="some of several types", change="make all of them texts"
        ) from None
    if masked := [leaf for leaf in leaves if isinstance(leaf, np.ma.MaskedArray)]:
        raise InputError(
            f"{where}: expected arrays without masks, found a masked array {describe(masked[0])}: its mask would be dropped; "
            "give filled values (numpy.ma.filled), and the mask as an array of its own"
        )
    sizes = {leaf.shape[0] if getattr(leaf, "ndim", 0) else -1 for leaf in leaves}
    if len(sizes) != 1 or -1 in sizes:
        numbers = any(isinstance(leaf, int | float | complex) for leaf in leaves)
        hint = "; make an array of a list of numbers with numpy.asarray" if numbers else ""
        raise InputError(where=where, expected="arrays that agree in their first dim, the batch", found=f"{describe(batch)}{hint}")
    for leaf in leaves:
        try:
            spec_of(leaf)
        except (TypeError, ValueError):  # text, objects, dates, random keys
            actual = getattr(leaf, "dtype", type(leaf).__name__)
            raise InputError(f"{where}: expected arrays of numbers, found {describe(batch)}; convert {actual} to numbers") from None
    return int(sizes.pop())


def count_microbatches(batch: Batch, rows_each: int) -> int:
    """Return the number of microbatches of `rows_each` rows in a batch."""
    size = rows_of(microbatch_spec(batch, 1))
    if size % rows_each:
        raise InputError(where="batch", expected=f"a number of rows divisible by the microbatch size {rows_each}", found=size)
    return size // rows_each


def rows_of(spec: Tree) -> int:
    """Return the size of the first dim of every array."""
    return jax.tree.leaves(spec)[0].shape[0]


class Bucket(NamedTuple):
    """One of the shapes that batches may have.

    Attributes:
        spec: shapes and dtypes of one microbatch.
        functions: the functions of each stage, for such microbatches.
    """

    spec: Batch
    functions: Sequence[StageFunctions]


def bucket_of(batch: Any, count: int, specs: Sequence[Batch]) -> int:
    """Return which of `specs` the `count` microbatches of a batch have.

    Raises:
        InputError: none of them, or it is not a pair of arrays with a number of rows that `count` divides.
    """
    for number, spec in enumerate(specs):
        if _has_spec(batch, count, spec):
            return number
    spec = microbatch_spec(batch, count)
    if spec not in specs:
        raise InputError(where="batch", expected=f"microbatches like {_those(specs)}", found=describe(spec))
    return specs.index(spec)


def _has_spec(batch: Any, count: int, spec: Batch) -> bool:
    """Return whether a batch consists of NumPy or JAX arrays that have this spec, each with `count` times as many rows.

    Every step asks, so this is quick. `microbatch_spec` takes other arrays, too, and says what is wrong with a batch.
    """
    try:
        leaves, structure = jax.tree.flatten(batch)
        specs, expected = jax.tree.flatten(spec)
        return (
            structure == expected  # type: ignore[operator]
            and all(
                isinstance(leaf, (np.ndarray, jax.Array))
                and not isinstance(leaf, np.ma.MaskedArray)
                and leaf.shape == (count * one.shape[0], *one.shape[1:])
                and jax.dtypes.canonicalize_dtype(leaf.dtype) == one.dtype
                for leaf, one in zip(leaves, specs, strict=True)
            )
        )
    except (TypeError, ValueError):  # keys of a dict that cannot be sorted, texts, random keys
        return False


def bucket_of_inputs(inputs: Tree, specs: Sequence[Tree]) -> int:
    """Return which of `specs` fits microbatches of these inputs, with any number of rows.

    Raises:
        InputError: none of them.
    """
    _checked_rows(inputs, "predict")
    rows = rows_of(specs[0])
    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), spec_of(leaf).dtype), inputs)
    if spec not in specs:
        raise InputError(where="predict", expected=f"inputs like {_those(specs)} for a microbatch", found=describe(inputs))
    return list(specs).index(spec)


def _those(specs: Sequence[Tree]) -> str:
    return f"{'the one' if len(specs) == 1 else 'one of those'} of init, {describe_shapes(specs)}"


def check_buckets(buckets: Sequence[Bucket]) -> None:
    """Check that shapes can alternate in one run.

    Raises:
        InputError: they differ in their rows or in the names of their arrays, or a layer has other parameters or state with one of them.
    """
    first = buckets[0]
    for bucket in buckets[1:]:
        if rows_of(bucket.spec) != rows_of(first.spec):
            raise InputError(
                f"buckets: expected microbatches of {rows_of(first.spec)} rows, as in the first batch, found {describe(bucket.spec)}; "
                "give each batch as many rows"
            )
        if jax.tree.structure(bucket.spec) != jax.tree.structure(first.spec):  # type: ignore[operator]
            raise InputError(
                f"buckets: expected the arrays of the first batch, {describe(first.spec)}, found {describe(bucket.spec)}; "
                "give each batch the same arrays, which may differ in their shapes"
            )
        for stage, other_stage in zip(first.functions, bucket.functions, strict=True):
            for what, one, other in (
                ("parameters", stage.specs.fresh, other_stage.specs.fresh),
                ("state", stage.specs.state, other_stage.specs.state),
            ):
                changed = [entry for entry in one if one[entry] != other.get(entry)]
                if changed:
                    raise InputError(
                        f"buckets: expected layer '{changed[0]}' to have the same {what} with batches of each shape, found "
                        f"{describe(one[changed[0]])} with microbatches of {describe(first.spec)} and {describe(other.get(changed[0]))} "
                        f"with {describe(bucket.spec)}; make them independent of the shape, or give one shape"
                    )


def describe_shapes(specs: Sequence[Tree]) -> str:
    """Describe the shapes for messages."""
    return " or ".join(map(describe, specs))


class Padded:
    """An array of rows padded with copies of its last row: real values, for layers that check them.

    Args:
        leaf: an array, or anything with a shape, a dtype and slices of rows.
        size: the number of rows with the copies.
    """

    def __init__(self, leaf: Any, size: int) -> None:
        self._leaf, self.shape, self.dtype = leaf, (size, *leaf.shape[1:]), leaf.dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        values = np.asarray(self._leaf[rows.start : min(rows.stop, self._leaf.shape[0])])
        return np.concatenate([values, np.repeat(values[-1:], rows.stop - rows.start - len(values), axis=0)])


def check_outputs(outputs: Tree, rows: int, layer_id: str) -> None:
    """Check that outputs can be joined.

    Args:
        outputs: their specs, for a microbatch.
        rows: the number of rows of a microbatch.
        layer_id: the id of the last layer.

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
    """Return the first `size` rows of the parts of an array, one after the other; the spec describes a part."""
    return np.concatenate([*parts, np.empty((0, *spec.shape[1:]), spec.dtype)])[:size]


def to_host(batch: Tree) -> Tree:
    """Convert the JAX arrays of a batch to NumPy; anything else with rows stays, to be read a microbatch at a time.

    Raises:
        InputError: it has no rows that can be read: only a shape, or arrays that were deleted.
    """
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise InputError(f"batch: expected arrays, found {describe(leaf)} that was deleted, as donated arrays are; give a copy of it")
        if not hasattr(leaf, "__getitem__"):
            raise InputError(where="batch", expected="arrays with rows that can be read", found=type(leaf).__name__, change="give arrays")
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, batch)


def read_rows(batch: Tree, start: int, stop: int) -> Tree:
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
            where="batch", expected=f"rows {start} to {stop - 1} as {describe(expected)}, as its shape and dtype say", found=describe(array)
        )
    return array
