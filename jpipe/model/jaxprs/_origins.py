"""Origins: which rows of a batch each element of an array is computed from."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

NO_ROW = (1 << 14) - 1
"""A number above any row's."""
_LARGEST = 1 << 26  # elements of an array of origins


class Origin(NamedTuple):
    """What is known of an array of a computation.

    `rows` and `numbers` have a first dim of their own, and then the dims of the array, of size 1 where all elements along a dim are equal.

    Attributes:
        rows: for each element a pair: the first row that it depends on, and the last one with a minus. Both are `NO_ROW` where it depends
            on none; the first is -1 where it is more than a sum over rows. So the pair of a sum is the minimum of the pairs.
        numbers: the values of integers and booleans that depend on no input, NaN where unknown; None where all are unknown.
        of_model: whether the rows belong to the model's inputs or outputs, and not to labels alone.
    """

    rows: np.ndarray
    numbers: np.ndarray | None = None
    of_model: bool = False

    @property
    def depends(self) -> bool:
        """Whether any element depends on any row."""
        return bool((self.rows[0] != NO_ROW).any())

    @property
    def is_more_than_a_sum(self) -> bool:
        """Whether any element depends on several rows in another way than by a sum over them."""
        return bool((self.rows[0] < 0).any())

    def is_apart(self, count: int) -> bool:
        """Return whether each element depends on one row at most, and the rows are in order, perhaps repeated.

        They are along the first dim, or along a dim of `count`, the number of rows; other dims, such as one of time, may vary with it.
        """
        row, sizes = self.rows[0].reshape(-1), self.rows.shape[1:]  # without the dims along which all elements are equal
        if not self.depends or of_several(self.rows).any() or not (sizes[:1] != (1,) or count in sizes):
            return not self.depends
        expected = (np.arange(row.size) // n % count for n in range(1, row.size // count + 1) if row.size % (count * n) == 0)
        return any(((row == numbers) | (row == NO_ROW)).all() for numbers in expected)


def origin_of(shape: Sequence[int], dim: int | None = None, *, of_model: bool = True) -> Origin:
    """Return the origin of an array that has the rows along one dim; without a dim it depends on none."""
    if dim is None:
        return Origin(np.full((2, *[1] * len(shape)), NO_ROW, np.int16))
    row = np.arange(shape[dim], dtype=np.int16).reshape([-1 if i == dim else 1 for i in range(len(shape))])
    return Origin(np.stack([row, -row]), None, of_model)


def of_several(rows: np.ndarray) -> np.ndarray:
    """Return for each element whether it depends on several rows."""
    return np.asarray(rows[0] + rows[1] < 0)


def together(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the rows of sums of elements of several arrays."""
    result = arrays[0]
    for array in arrays[1:]:
        result = np.minimum(result, array)
    return result


def over(rows: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """Return the rows of sums over some dims, which stay with size 1."""
    return np.minimum.reduce(rows, axis=tuple(dim + 1 for dim in dims), keepdims=True)


def mixed(rows: np.ndarray) -> np.ndarray:
    """Return the rows of any function of each element: of several rows, it is more than a sum."""
    return np.stack([np.where(of_several(rows), np.int16(-1), rows[0]), rows[1]])


def whole(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return an array of `rows` or `numbers` with these dims in full."""
    if np.prod(shape, dtype=np.int64) > _LARGEST:
        raise MemoryError("origins of too many elements")
    return np.broadcast_to(array, (len(array), *shape))


def smallest(array: np.ndarray) -> np.ndarray:
    """Return an array of `rows` or `numbers` with size 1 for each dim along which all elements are equal."""
    for axis in range(1, array.ndim):
        first = array[(slice(None),) * axis + (slice(1),)]
        if array.shape[axis] > 1 and np.array_equal(np.broadcast_to(first, array.shape), array, equal_nan=array.dtype == np.float64):
            array = first
    return array


def is_whole(dtype: Any) -> bool:
    """Return whether this is a dtype of integers or booleans, the values that are followed."""
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, jnp.bool_))
