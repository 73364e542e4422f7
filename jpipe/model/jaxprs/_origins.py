"""Origins: for each element of an array, the rows of a batch from which it is computed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

NO_ROW = (1 << 14) - 1
"""A number above the number of any row."""
_LARGEST = 1 << 26  # the most elements of an array of origins


class Origin(NamedTuple):
    """The known facts about an array of a computation.

    `rows` and `numbers` have an additional first dim, and then the dims of the array. A dim has size 1 if all elements along it are equal.
    """

    # for each element a pair: the first row on which it depends, and minus the last row. Both are `NO_ROW` if it depends on no row. The
    # first is -1 if the element is more than a sum over rows. Therefore the pair of a sum is the minimum of the pairs.
    rows: np.ndarray
    # the values of integers and booleans that depend on no input; NaN stands for an unknown value. None: all are unknown.
    numbers: np.ndarray | None = None
    of_model: bool = False  # whether some rows belong to the model's inputs or outputs, not only to labels

    @property
    def depends(self) -> bool:
        """Whether any element depends on any row."""
        return bool((self.rows[0] != NO_ROW).any())

    def is_apart(self, count: int) -> bool:
        """Return whether each element depends on at most one row, with the rows in order; rows may be repeated.

        The rows are along the first dim, or along a dim of size `count`, the number of rows. They may be spread over further dims, such as
        time.
        """
        row, sizes = self.rows[0].reshape(-1), self.rows.shape[1:]  # sizes are 1 for dims along which all elements are equal
        if not self.depends or of_several(self.rows).any() or not (sizes[:1] != (1,) or count in sizes):
            return not self.depends
        expected = (np.arange(row.size) // n % count for n in range(1, row.size // count + 1) if row.size % (count * n) == 0)
        return any(((row == numbers) | (row == NO_ROW)).all() for numbers in expected)


def origin_of(shape: Sequence[int], dim: int | None = None, *, of_model: bool = True) -> Origin:
    """Return the origin of an array that has the rows along one dim; without a dim the array depends on no row."""
    if dim is None:
        return Origin(np.full((2, *[1] * len(shape)), NO_ROW, np.int16))
    row = np.arange(shape[dim], dtype=np.int16).reshape([-1 if i == dim else 1 for i in range(len(shape))])
    return Origin(np.stack([row, -row]), None, of_model)


def of_several(rows: np.ndarray) -> np.ndarray:
    """Return for each element whether it depends on several rows."""
    return np.asarray(rows[0] + rows[1] < 0)


def together(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the rows of elementwise sums of several arrays."""
    result = arrays[0]
    for array in arrays[1:]:
        result = np.minimum(result, array)
    return result


def over(rows: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """Return the rows of sums over some dims, which get size 1."""
    return np.minimum.reduce(rows, axis=tuple(dim + 1 for dim in dims), keepdims=True)


def mixed(rows: np.ndarray) -> np.ndarray:
    """Return the rows of any function of each element. An element that depends on several rows becomes more than a sum."""
    return np.stack([np.where(of_several(rows), np.int16(-1), rows[0]), rows[1]])


def whole(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Expand an array of `rows` or `numbers` to these dims."""
    if np.prod(shape, dtype=np.int64) > _LARGEST:
        raise MemoryError("origins of too many elements")
    return np.broadcast_to(array, (len(array), *shape))


def smallest(array: np.ndarray) -> np.ndarray:
    """Reduce each dim of an array of `rows` or `numbers` along which all elements are equal to size 1."""
    for axis in range(1, array.ndim):
        first = array[(slice(None),) * axis + (slice(1),)]
        if array.shape[axis] > 1 and np.array_equal(np.broadcast_to(first, array.shape), array, equal_nan=array.dtype == np.float64):
            array = first
    return array


def is_whole(dtype: Any) -> bool:
    """Return whether a dtype is for integers or booleans: only these values are tracked."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.bool_))
