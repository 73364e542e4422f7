"""Convert the data that a Python program passes to `fit` into batches with an index."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, SupportsIndex

import jax
import numpy as np

from jpipe import InputError
from jpipe_train.checkpoint.resume import Resumed
from jpipe_train.config.section import MOST_ROWS, as_python
from jpipe_train.console.terminal import count
from jpipe_train.data import position
from jpipe_train.data.arrays.array_rows import RowsOfArrays
from jpipe_train.data.data import Batches, Data, with_steps_of
from jpipe_train.data.order import shuffled
from jpipe_train.data.position import Ordered, Position
from jpipe_train.data.rows import Batch, BatchesOfRows
from jpipe_train.data.target_data import Repeated, UserBatches, digest


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
    hashed = partial(digest, batches, validation)
    loaded = Data(batches, validation, _source(train), amount, hashed, rows=in_epoch)
    return _with_steps(loaded, position.start(rows), rows, epochs), rows


def _with_steps(data: Data, first: Position, rows: int, epochs: float | None) -> Data:
    return data if epochs is None else with_steps_of(data, epochs, first, rows, "fit: epochs")


def continued(data: Data, resumed: Resumed | None, rows: int, epochs: float | None = None) -> Data:
    """Return the data of a run that resumes. If the batch size of arrays has changed, new batches begin at the next row.

    Raise InputError if the program's own batches have another number of rows than before the checkpoint.
    """
    if resumed is None:
        return data
    begins = resumed.position(rows)
    assert isinstance(data.train, Ordered)
    if isinstance(data.train, UserBatches) and begins != data.train.first_position:
        raise InputError(
            f"data: expected batches with as many rows as before the checkpoint of step {resumed.step}, found batches of {rows} rows; "
            "give batches of the earlier size, or begin a new run in another run_dir"
        )
    return _with_steps(replace(data, train=data.train.continued(begins), first=begins.batch), begins, rows, epochs)


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
    if not batches.are_enough(steps):
        found = f"a {type(train).__name__} of {len(batches)} batches"
        raise InputError(f"data: expected one batch for each of {steps} steps, found {found}; repeat them, or lower steps")
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
    if not batches.has_length or not len(batches):
        found = f"a {type(held_out).__name__} {'of none' if batches.has_length else 'without a length'}"
        raise InputError(
            f"eval_data: expected at least one batch, eval_data[i] for i < len(eval_data), found {found}; give a list, or arrays"
        )
    return batches


def _by_number(batches: Any, name: str) -> UserBatches:
    """Return the batches of an object that returns batch t for an index t, or of a function of t. Raise InputError if it is neither."""
    if isinstance(batches, Iterator | Mapping) or not (hasattr(batches, "__getitem__") or callable(batches)):
        kind = "an iterator" if isinstance(batches, Iterator) else f"a {type(batches).__name__}"
        raise InputError(
            f"{name}: expected batches that {name}[t] returns, found {kind}, which cannot give batch t to a run that resumes at step t; "
            f"give an object with {name}[t], a function of t, a grain.MapDataset of batches, or arrays"
        )
    return UserBatches(batches, name, key=name)


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
