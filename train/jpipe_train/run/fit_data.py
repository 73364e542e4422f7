"""Convert the data that a Python program passes to `fit` into batches with an index."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, SupportsIndex

import jax
import numpy as np

from jpipe import InputError
from jpipe_train.checkpoint.resume import Resumed
from jpipe_train.config.section import MOST_ROWS, as_python
from jpipe_train.console.terminal import count
from jpipe_train.data import position
from jpipe_train.data.arrays.array_rows import RowsOfArrays
from jpipe_train.data.data import Batches, Data
from jpipe_train.data.order import shuffled
from jpipe_train.data.position import Ordered, Position
from jpipe_train.data.rows import Batch, BatchesOfRows, Rows, when_sliced
from jpipe_train.data.target_data import Repeated


def load(
    train: Any,
    held_out: Any,
    batch_size: SupportsIndex | None,
    seed: SupportsIndex,
    steps: SupportsIndex | None = None,
    epochs: float | None = None,
) -> tuple[Data, int]:
    """Return the data of a new run, and the number of rows of a training batch.

    If `train` are arrays, `batch_size` is the number of rows; the run has either `steps` or `epochs`. Raise InputError if the data have the
    wrong form, there are fewer data than the run needs, or the length of an epoch is unknown.
    """
    batches: Batches
    if batch_size is not None:
        rows = as_python(batch_size)
        batches = _shuffled_rows(train, rows, as_python(seed))
        in_epoch: int | None = len(jax.tree.leaves(train)[0])
    else:
        length = None if epochs is None or _is_arrays(train) else _batches_in_epoch(train)
        needed = as_python(steps) or 1 if epochs is None or length is None else position.rows_in(epochs, length)
        again = length is not None and isinstance(train, list | tuple)
        batches = _training_batches(Repeated(train) if again else train, needed)
        rows = len(jax.tree.leaves(batches[0])[0])
        in_epoch = None if length is None else length * rows
    validation = [] if held_out is None else _held_out(held_out, rows)
    amount = f"{count(len(validation), 'batch', 'es')} for evaluation" if len(validation) else "no evaluation"
    digest = partial(_digest, batches, validation)
    loaded = Data(batches, validation, _source(train), amount, digest, rows=in_epoch)
    return _with_steps(loaded, position.start(rows), rows, epochs), rows


def _with_steps(data: Data, first: Position, rows: int, epochs: float | None) -> Data:
    """Return the data, with the number of steps if the length of the run is given in epochs. Raise InputError if there are too many."""
    if epochs is None:
        return data
    assert data.rows is not None
    steps = position.steps_until(position.rows_in(epochs, data.rows), first, rows)
    if steps > MOST_ROWS:
        raise InputError(
            f"fit: epochs: expected at most {MOST_ROWS:,} steps, found {steps:,} with {data.rows:,} rows in an epoch; lower epochs"
        )
    return replace(data, steps=steps)


def continued(data: Data, resumed: Resumed | None, rows: int, epochs: float | None = None) -> Data:
    """Return the data of a run that resumes. If the batch size of arrays has changed, new batches begin at the next row.

    Raise InputError if the program's own batches have another number of rows than before the checkpoint.
    """
    begins = None if resumed is None else resumed.position(rows)
    if resumed is None or begins is None:
        return data
    assert isinstance(data.train, Ordered)
    if isinstance(data.train, OwnBatches) and begins != data.train.first_position:
        raise InputError(
            f"data: expected batches with as many rows as before the checkpoint of step {resumed.step}, found batches of {rows} rows; "
            "give batches of the earlier size, or begin a new run in another run_dir"
        )
    return _with_steps(replace(data, train=data.train.continued(begins), first=begins.batch), begins, rows, epochs)


@dataclass(frozen=True)
class OwnBatches:
    """Batches from an object or a function of the program, made when their rows are read; batch 0 also when its shapes are."""

    make: Callable[[int], Any]  # a function from t to batch t
    name: str  # the name of the object in messages
    length: int | None  # the number of batches; None if the object has no length

    def __len__(self) -> int:
        assert self.length is not None
        return self.length

    def __getitem__(self, index: int) -> Batch:
        batch: Batch = when_sliced(self._spec, lambda: self.at(index))
        return batch

    @property
    def first_position(self) -> Position:
        """The position of the first batch."""
        return position.start(len(jax.tree.leaves(self[0])[0]))

    def position(self, batch: int) -> Position:
        """Return the position of a batch."""
        return self.first_position.later(batch, self.first_position.pieces)

    def continued(self, position: Position) -> "OwnBatches":
        """Return these batches: batch t is the same in a run that resumes."""
        return self

    def at(self, index: int) -> Batch:
        """Return batch `index` as NumPy arrays with the specs of batch 0. Raise InputError if the object returns something else."""
        batch = self._arrays(index)
        if (found := _spec(batch)) != self._spec:
            shapes = [jax.tree.map(lambda spec: f"{spec.dtype}{list(spec.shape)}", specs) for specs in (self._spec, found)]
            raise InputError(
                f"{self.name}: expected batch {index} to have the shapes of batch 0, {shapes[0]}, found {shapes[1]}; make them equal"
            )
        return batch

    @cached_property
    def _spec(self) -> Batch:
        return _spec(self._arrays(0))

    def _arrays(self, index: int) -> Batch:
        batch = jax.tree.map(_as_numpy, self.make(index))
        expected = f"{self.name}: expected batch {index} to be (inputs, labels), arrays or trees of arrays with the same number of rows"
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise InputError(f"{expected}, found a {type(batch).__name__}; return a tuple of two")
        leaves = jax.tree.leaves(batch)
        if other := [leaf for leaf in leaves if not isinstance(leaf, np.ndarray)]:
            raise InputError(f"{expected}, found a {type(other[0]).__name__} in it; convert it with np.asarray")
        if not leaves or any(not leaf.ndim or len(leaf) != len(leaves[0]) for leaf in leaves):
            raise InputError(f"{expected}, found the shapes {', '.join(str(list(leaf.shape)) for leaf in leaves) or 'of none'}; fix them")
        return batch


def _spec(batch: Batch) -> Batch:
    specs: Batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    return specs


def _as_numpy(leaf: Any) -> Any:
    """Convert an array of JAX or of jpipe's loaders to a NumPy array. Return anything else unchanged, so that an error can name it."""
    if isinstance(leaf, Rows):
        return leaf[:]
    return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def _batches_in_epoch(train: Any) -> int:
    """Return the number of batches of an epoch. Raise InputError if the number is unknown."""
    length = len(train) if hasattr(train, "__getitem__") and hasattr(train, "__len__") else None
    if not length or length > MOST_ROWS:
        found = f"a {type(train).__name__} {'without' if length is None else 'of none' if not length else 'without end'}"
        raise InputError(
            f"fit: epochs: expected data with a known length (arrays with batch_size, or batches with len()), found {found}; give steps "
            "instead"
        )
    return length


def _training_batches(train: Any, steps: int) -> Batches:
    """Return the batches of an object that the program passed as `data`. Raise InputError if it has none, or too few for the run."""
    if _is_arrays(train):
        raise InputError(
            "data: expected batches that data[t] returns, found arrays; also give batch_size, so that their rows are "
            "shuffled and batched, or give a list of batches"
        )
    if isinstance(train, Ordered) and isinstance(train, Batches):  # from a loader of jpipe
        return train
    batches = _by_number(train, "data")
    if batches.length is None or batches.length >= steps:
        return batches
    why = (
        f"data: expected one batch for each of {steps} steps, found a {type(train).__name__} of {batches.length} batches; repeat them, or "
        "lower steps"
    )
    if isinstance(train, list | tuple):
        raise InputError(why)
    try:  # the object may start over after its last batch, as a grain.MapDataset does
        batches.at(steps - 1)
    except Exception as error:
        raise InputError(why) from error
    return batches


def _shuffled_rows(train: Any, batch_size: int, seed: int) -> BatchesOfRows:
    """Return batches of the rows of arrays, shuffled anew in each epoch.

    Raise InputError if `train` are not arrays, or they have fewer than `batch_size` rows.
    """
    if not _is_arrays(train):
        raise InputError(
            f"batch_size has no effect for data of type {type(train).__name__}: it is for arrays, (inputs, labels); remove batch_size, "
            "and let each element be a batch"
        )
    rows = _rows(train, "data")
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or not 1 <= batch_size <= len(rows):
        expected = f"a number from 1 to {len(rows):,} (data has {len(rows):,} rows)"
        raise InputError(f"batch_size: expected {expected}, found {batch_size}; change it")
    return BatchesOfRows(shuffled(rows, seed, epochs=True), batch_size, rows.spec)


def _held_out(held_out: Any, batch_size: int) -> Batches:
    """Return the batches of an evaluation from arrays, with `batch_size` rows each, or from an object that has batches.

    Raise InputError if `held_out` is neither, or has no batch.
    """
    if _is_arrays(held_out):
        rows = _rows(held_out, "eval_data")
        return BatchesOfRows(rows, batch_size, rows.spec).with_remainder()
    if isinstance(held_out, Ordered) and isinstance(held_out, Batches):
        return held_out
    batches = _by_number(held_out, "eval_data")
    if not batches.length:
        found = f"a {type(held_out).__name__} {'of none' if batches.length == 0 else 'without a length'}"
        raise InputError(
            f"eval_data: expected at least one batch, eval_data[i] for i < len(eval_data), found {found}; give a list, or arrays"
        )
    return batches


def _by_number(batches: Any, name: str) -> OwnBatches:
    """Return the batches of an object that returns batch t for an index t, or of a function of t. Raise InputError if it is neither."""
    has_items = hasattr(batches, "__getitem__")
    if isinstance(batches, Iterator | Mapping) or not (has_items or callable(batches)):
        kind = "an iterator" if isinstance(batches, Iterator) else f"a {type(batches).__name__}"
        raise InputError(
            f"{name}: expected batches that {name}[t] returns, found {kind}, which cannot give batch t to a run that resumes at step t; "
            f"give an object with {name}[t], a function of t, a grain.MapDataset of batches, or arrays"
        )
    length = len(batches) if has_items and hasattr(batches, "__len__") else None
    return OwnBatches(batches.__getitem__ if has_items else batches, name, length)


def _is_arrays(data: Any) -> bool:
    """Return whether data are a tuple (inputs, labels) of arrays or trees of arrays. A list would be two batches."""
    leaves = jax.tree.leaves(data) if isinstance(data, tuple) and len(data) == 2 else []
    return bool(leaves) and all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves)


def _rows(data: Any, name: str) -> RowsOfArrays:
    """Return the rows of arrays. Raise InputError if the arrays have different numbers of rows, or none."""
    arrays: Batch = jax.tree.map(np.asarray, data)
    shapes = [leaf.shape for leaf in jax.tree.leaves(arrays)]
    if any(shape[:1] != shapes[0][:1] for shape in shapes) or not shapes[0] or not shapes[0][0]:
        listed = ", ".join(str(list(shape)) for shape in shapes)
        raise InputError(f"{name}: expected arrays with the same number of rows, at least one, found the shapes {listed}; fix them")
    return RowsOfArrays(arrays)


def _source(data: Any) -> str:
    """Describe the data in a few words."""
    if _is_arrays(data):
        return f"arrays of {len(jax.tree.leaves(data)[0]):,} rows"
    return str(getattr(data, "__name__", type(data).__name__))


def _digest(*parts: Batches) -> str:
    """Hash the first batch of each part. The processes compare it, because a program may ignore its seed."""
    hasher = hashlib.sha256()
    for batches in parts:
        for leaf in jax.tree.leaves(batches[0]) if not isinstance(batches, list) else ():
            hasher.update(np.ascontiguousarray(leaf[:]).tobytes())
    return hasher.hexdigest()
