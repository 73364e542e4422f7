"""Batches and their microbatches: checks of shapes, buckets, padding, and reading rows on the host."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe.context import Positions
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
    """Check that all arrays have the same number of rows, and return this number."""
    try:
        leaves = jax.tree.leaves(batch)
    except ValueError:  # keys of a dict that cannot be sorted
        raise InputError(
            where=where, expected="dicts with keys that can be sorted", found="keys of several types", change="make all keys strings"
        ) from None
    if masked := [leaf for leaf in leaves if isinstance(leaf, np.ma.MaskedArray)]:
        raise InputError(
            f"{where}: expected arrays without masks, found a masked array {describe(masked[0])}: its mask would be dropped; give filled "
            "values (numpy.ma.filled), and the mask as a separate array"
        )
    sizes = {leaf.shape[0] if getattr(leaf, "ndim", 0) else -1 for leaf in leaves}
    if len(sizes) != 1 or -1 in sizes:
        numbers = any(isinstance(leaf, int | float | complex) for leaf in leaves)
        hint = "; make an array of a list of numbers with numpy.asarray" if numbers else ""
        raise InputError(where=where, expected="arrays with the same number of rows (first dim)", found=f"{describe(batch)}{hint}")
    for leaf in leaves:
        try:
            spec_of(leaf)
        except (TypeError, ValueError):  # text, objects, dates, random keys
            actual = getattr(leaf, "dtype", type(leaf).__name__)
            raise InputError(f"{where}: expected arrays of numbers, found {describe(batch)}; convert {actual} to numbers") from None
    return int(sizes.pop())


class InMicrobatches(NamedTuple):
    """A batch of any number of rows in whole microbatches. The rows that do not fill a microbatch are repeated, all equally often."""

    batch: Batch  # the rows
    microbatches: int  # their number
    whole: int  # how many of them have no repeated rows
    copies: int  # how often the rows of the others are repeated


def in_microbatches(batch: Batch, rows_each: int) -> InMicrobatches:
    """Return a batch in microbatches of `rows_each` rows."""
    size = rows_of(microbatch_spec(batch, 1))
    odd, whole = size % rows_each, size // rows_each
    copies = rows_each // math.gcd(odd, rows_each)
    count = whole + odd * copies // rows_each
    repeated = jax.tree.map(lambda leaf: Repeated(leaf, whole * rows_each, count * rows_each), batch) if odd else batch
    return InMicrobatches(repeated, count, whole, copies)


def rows_of(spec: Tree) -> int:
    """Return the size of the first dim of every array."""
    return jax.tree.leaves(spec)[0].shape[0]


class Bucket(NamedTuple):
    """One of the shapes that batches may have."""

    spec: Batch  # the shapes and dtypes of one microbatch
    functions: Sequence[StageFunctions]  # the functions of each stage, for microbatches of these shapes
    slices: Sequence[Sequence[StageFunctions]] = ()  # for each slice of the rows the functions of each stage; empty for whole rows

    @property
    def positions(self) -> list[Positions]:
        """The positions of each slice of the rows; empty for whole rows."""
        return [positions for functions in self.slices if (positions := functions[0].positions) is not None]

    @property
    def trained(self) -> Sequence[Sequence[StageFunctions]]:
        """The functions that train: for each slice, or for whole rows."""
        return self.slices or [self.functions]

    @property
    def variants(self) -> list[Sequence[StageFunctions]]:
        """The functions that are compiled: for each slice, and for whole rows, which are only evaluated if there are slices."""
        return [*self.slices, self.functions]


def bucket_of(batch: Any, count: int, specs: Sequence[Batch]) -> int:
    """Return the index of the spec that the `count` microbatches of a batch have."""
    for number, spec in enumerate(specs):
        if _has_spec(batch, count, spec):
            return number
    spec = microbatch_spec(batch, count)
    if spec not in specs:
        raise InputError(where="batch", expected=f"microbatches like {_those(specs)}", found=describe(spec))
    return specs.index(spec)


def _has_spec(batch: Any, count: int, spec: Batch) -> bool:
    """Return whether a batch consists of NumPy or JAX arrays that fit this spec, each with `count` times as many rows.

    This check is quick, because every step makes it. `microbatch_spec` accepts other arrays as well, and says what is wrong with a batch.
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
    """Return the index of the spec that fits inputs with any number of rows. Raise InputError if none does."""
    _checked_rows(inputs, "predict")
    rows = rows_of(specs[0])
    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), spec_of(leaf).dtype), inputs)
    if spec not in specs:
        raise InputError(where="predict", expected=f"inputs like {_those(specs)} for a microbatch", found=describe(inputs))
    return list(specs).index(spec)


def _those(specs: Sequence[Tree]) -> str:
    return f"{'the shape' if len(specs) == 1 else 'one of the shapes'} given to init, {describe_shapes(specs)}"


def check_buckets(buckets: Sequence[Bucket]) -> None:
    """Check that batches of these shapes can alternate in one run."""
    first = buckets[0]
    for bucket in buckets[1:]:
        if rows_of(bucket.spec) != rows_of(first.spec):
            raise InputError(
                f"buckets: expected microbatches of {rows_of(first.spec)} rows, as in the first batch, found {describe(bucket.spec)}; "
                "give each batch the same number of rows"
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
                        f"with {describe(bucket.spec)}; make the layer independent of the shape, or use batches of one shape"
                    )


def describe_shapes(specs: Sequence[Tree]) -> str:
    """Return the shapes as text, for messages."""
    return " or ".join(map(describe, specs))


class Repeated:
    """An array that repeats its rows from `first` on in turn.

    Args:
        leaf: an array, or any object with a shape, a dtype and slices of rows.
        first: the first repeated row.
        size: the number of rows including the copies.
    """

    def __init__(self, leaf: Any, first: int, size: int) -> None:
        self._leaf, self._first, self.shape, self.dtype, self.ndim = leaf, first, (size, *leaf.shape[1:]), leaf.dtype, len(leaf.shape)

    def __getitem__(self, rows: slice) -> np.ndarray:
        first, size = self._first, self._leaf.shape[0]
        if rows.stop <= size:
            return np.asarray(self._leaf[rows.start : rows.stop])
        odd, repeated = np.asarray(self._leaf[first:size]), np.arange(max(rows.start - first, 0), rows.stop - first)
        return np.concatenate([np.asarray(self._leaf[rows.start : max(first, rows.start)]), odd[repeated % len(odd)]])


class Cut:
    """An array of a batch with only some positions, which are in the second dim.

    Args:
        leaf: an array, or any object with a shape, a dtype and slices of rows.
        positions: the positions.
    """

    def __init__(self, leaf: Any, positions: Positions) -> None:
        count = positions.stop - positions.start
        self._leaf, self._positions, self.shape, self.dtype = leaf, positions, (leaf.shape[0], count, *leaf.shape[2:]), leaf.dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        return np.asarray(self._leaf[rows])[:, self._positions.start : self._positions.stop]


def check_outputs(outputs: Tree, rows: int, layer_id: str) -> None:
    """Check that the outputs of microbatches of `rows` rows, given as specs, can be concatenated."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(outputs)[0]:
        if leaf.shape[:1] != (rows,):
            where = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise InputError(
                f"predict: expected every output of layer '{layer_id}' to have one row for each row of the inputs, {rows} for a "
                f"microbatch, found {describe(leaf)}{where}; return one row for each input row, or remove this output from the layer"
            )


def joined_rows(spec: Any, parts: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Concatenate the parts of an array and return the first `size` rows; `spec` describes one part."""
    return np.concatenate([*parts, np.empty((0, *spec.shape[1:]), spec.dtype)])[:size]


def to_host(batch: Tree) -> Tree:
    """Convert the JAX arrays of a batch to NumPy. Other objects with rows are not converted: they are read one microbatch at a time."""
    for leaf in jax.tree.leaves(batch):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise InputError(f"batch: expected arrays, found {describe(leaf)} that was deleted, as donated arrays are; give a copy of it")
        if not hasattr(leaf, "__getitem__"):
            raise InputError(where="batch", expected="arrays with rows that can be read", found=type(leaf).__name__, change="give arrays")
    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, batch)


def read_rows(batch: Tree, start: int, stop: int) -> Tree:
    """Copy rows start .. stop - 1 of every array of a batch, because `device_put` reads late and the caller may overwrite the batch."""
    return jax.tree.map(lambda leaf: _rows_of_leaf(leaf, start, stop), batch)


def _rows_of_leaf(leaf: Any, start: int, stop: int) -> np.ndarray:
    array = np.array(leaf[start:stop])
    expected = jax.ShapeDtypeStruct((stop - start, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype))
    if array.dtype == object or (array.shape, jax.dtypes.canonicalize_dtype(array.dtype)) != (expected.shape, expected.dtype):
        raise InputError(
            where="batch",
            expected=f"rows {start} to {stop - 1} as {describe(expected)}, like the whole array",
            found=describe(array),
        )
    return array
