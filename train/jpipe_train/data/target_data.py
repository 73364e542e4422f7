"""Check and wrap the batches that a function in `data.target` returns, and report its mistakes."""

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jpipe import InputError
from jpipe_train.config.functions import entry_point
from jpipe_train.data import position
from jpipe_train.data.position import Position
from jpipe_train.data.rows import Batch, Rows, when_sliced


@dataclass(frozen=True)
class Repeated:
    """A list of batches that starts over after its last batch."""

    batches: Sequence[Any]  # the list

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index % len(self.batches)]


@dataclass(frozen=True)
class UserBatches:
    """The batches of a user's object, `batches[t]`, or of a function of t. Mistakes are reported in one line with `name`.

    Every process makes the first batch, for its shapes. Each batch is made again in the processes that read its rows. In a run that resumed
    with another batch size, row r of the data is row r mod b of `batches[r // b]`, so a batch may have rows of two of the object's batches.
    """

    batches: Any  # the user's object or function
    name: str  # the name of the object in messages
    size: int | None = None  # the number of rows in a batch of the user's object; None: as many as in the first batch
    key: str = "data.target"  # the config key that the object comes from, or the argument of `fit`, which does not catch its exceptions
    begins: Position | None = None  # the position of the first batch; None if batch t is `batches[t]`

    @property
    def has_length(self) -> bool:
        """Whether the number of batches is known."""
        return hasattr(self.batches, "__getitem__") and hasattr(self.batches, "__len__")

    def __len__(self) -> int:
        with self._errors_reported(f"len({self.name})"):
            return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        batch: Batch = when_sliced(self._specs, lambda: self._at(self.position(index).total))
        return batch

    @cached_property
    def batch_size(self) -> int:
        """The number of rows in a batch of the user's object."""
        return self.size or len(jax.tree.leaves(self.make(0))[0])

    @property
    def first_position(self) -> Position:
        """The position of the first batch."""
        return self.begins or position.start(self.batch_size)

    def position(self, batch: int) -> Position:
        """Return the position of a batch."""
        return self.first_position.later(batch, self.batch_size)

    def continued(self, position: Position) -> "UserBatches":
        """Return batches of the same data that begin at `position`."""
        return replace(self, begins=position)

    @property
    def rows(self) -> int | None:
        """The number of rows in an epoch; None if the user's object has no length."""
        return len(self) * self.batch_size if self.has_length else None

    def repeated(self) -> "UserBatches":
        """Return the same data; if they are a list of batches, it starts over after its last batch."""
        return replace(self, batches=Repeated(self.batches)) if isinstance(self.batches, list | tuple) else self

    def are_enough(self, steps: int) -> bool:
        """Return whether there are enough batches for a run of `steps` steps.

        An object may start over after its last batch, whatever its `len()` is. So the last batch that the run needs is made.
        """
        need = -(-self.position(steps).total // self.batch_size)
        if not self.has_length or len(self) >= need:
            return True
        if not isinstance(self.batches, list | tuple):
            with contextlib.suppress(Exception):
                self._of_same_shape(need - 1)
                return True
        return False

    def check_length(self, steps: int, key: str) -> None:
        """Check that there are enough batches for a run of `steps` steps, the length that the config key `key` sets."""
        if self.are_enough(steps):
            return
        need = -(-self.position(steps).total // self.batch_size)
        until = f"train.steps {steps}" if key == "train.steps" else f"{steps}, the steps of {key}"
        why = f"every t < {until}" if need == steps else f"every t < {need}, for the rows up to {until}"
        raise InputError(
            f"{self.key}: expected {self.name} to have batch t for {why}, found a {type(self.batches).__name__} of {len(self)} batches; "
            f"repeat them, or lower {key}"
        )

    def _at(self, row: int) -> Batch:
        """Return the batch that begins with row `row` of the data."""
        index, skipped = divmod(row, self.batch_size)
        first = self._of_same_shape(index)
        if not skipped:
            return first
        parts = first, self._of_same_shape(index + 1)
        joined: Batch = jax.tree.map(lambda one, next_: np.concatenate([one[skipped:], next_[:skipped]]), *parts)
        return joined

    @cached_property
    def _specs(self) -> Batch:
        specs: Batch = _specs(self.make(0))
        return specs

    def _of_same_shape(self, index: int) -> Batch:
        batch = self.make(index)
        if _specs(batch) != self._specs:
            first, actual = (jax.tree.map(lambda spec: f"{spec.dtype}{list(spec.shape)}", specs) for specs in (self._specs, _specs(batch)))
            raise InputError(
                f"{self.key}: expected {self.name}[{index}] to have the shapes of {self.name}[0], {first}, found {actual}; make them equal"
            )
        return batch

    def make(self, index: int) -> Batch:
        """Return batch `index` of the user's code as NumPy arrays. Raise InputError if it returns something else."""
        with self._errors_reported(f"{self.name}[{index}]"):
            batch = self.batches[index] if hasattr(self.batches, "__getitem__") else self.batches(index)
        batch = jax.tree.map(_as_numpy, batch)
        each = "the same number of" if self.size is None else str(self.size)
        expected = f"{self.key}: expected {self.name}[{index}] to be (inputs, labels), arrays or trees of arrays with {each} rows"
        if not isinstance(batch, tuple) or len(batch) != 2:
            raise InputError(f"{expected}, found a {type(batch).__name__}; return a tuple of two")
        leaves = jax.tree.leaves(batch)
        if other := [leaf for leaf in leaves if not isinstance(leaf, np.ndarray)]:
            raise InputError(f"{expected}, found a {type(other[0]).__name__} in it; convert it with np.asarray")
        shapes = [leaf.shape for leaf in leaves]
        if not leaves or not shapes[0] or {shape[:1] for shape in shapes} != {shapes[0][:1] if self.size is None else (self.size,)}:
            raise InputError(f"{expected}, found the shapes {', '.join(str(list(shape)) for shape in shapes) or 'of none'}; fix them")
        return batch

    def _errors_reported(self, what: str) -> contextlib.AbstractContextManager[None]:
        return entry_point.user_errors(f"{self.key}: {what} fails") if self.key == "data.target" else contextlib.nullcontext()


def _as_numpy(leaf: Any) -> Any:
    """Convert an array of JAX or of jpipe's loaders to a NumPy array. Return anything else unchanged, so that an error can name it."""
    return leaf[:] if isinstance(leaf, Rows) else np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf


def _specs(batch: Batch) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)


def digest(*parts: Any) -> str:
    """Return a hash of the first batch of each part. Processes compare it, because a function may ignore its seed."""
    hasher = hashlib.sha256()
    for leaf in jax.tree.leaves([batches[0] for batches in parts if not isinstance(batches, list)]):
        hasher.update(np.ascontiguousarray(leaf[:]).tobytes())
    return hasher.hexdigest()


def checked(result: Any, target: str, batch_size: int) -> tuple[UserBatches, UserBatches]:
    """Check the result of `target(seed, batch_size, **arguments)`, and wrap it as (train, validation).

    `train[t]` must be batch t for any t < `train.steps`; it should depend only on the seed and t. `validation[i]`, for i <
    len(validation), must be the same in every run. A batch is (inputs, labels), pytrees of NumPy arrays with rows as first dimension.
    """
    if not isinstance(result, Sequence) or len(result) != 2:
        found = type(result).__name__ + (f" of length {len(result)}" if isinstance(result, Sequence) else "")
        raise InputError(
            f"data.target: expected '{target}' to return (train, validation), found {found}; return a pair: training batches and "
            "validation batches"
        )
    for name, batches in zip(("train", "validation"), result, strict=True):
        if not hasattr(batches, "__getitem__") or (name == "validation" and not hasattr(batches, "__len__")):
            raise InputError(
                f"data.target: expected the {name} batches of '{target}' to be indexable, {name}[t], found {type(batches).__name__}; "
                "return a list, or an object with __getitem__ (and for validation __len__)"
            )
    train, validation = (UserBatches(result[i], name, batch_size) for i, name in enumerate(("train", "validation")))
    if len(validation) == 0:
        raise InputError(where="data.target", expected=f"at least one validation batch from '{target}'", found="none", change="return some")
    return train, validation
