"""Convert the values of a row to an array, and choose the dtypes of batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jpipe.errors import short
from jpipe_train.data.files.kinds import is_number
from jpipe_train.data.files.wrong_lines import WrongLine, value_of

Key = str | Sequence[str]
"""The name of a column with numbers or lists of numbers, or the names of several columns that have one number each."""
KINDS = "biuf"
"""The kinds of NumPy dtypes that are read: booleans, integers and floating-point numbers."""


def result_type(dtype: np.dtype[Any], *, is_target: bool) -> np.dtype[Any]:
    """Return the dtype that numbers of `dtype` have in a batch. All integer targets have the same dtype.

    Unless 64-bit types are enabled in JAX, float64 becomes float32, and int64 becomes int32.
    """
    whole = is_target and dtype.kind in "biu"
    return np.dtype(jax.dtypes.canonicalize_dtype(np.int64 if whole else dtype.newbyteorder("=")))


def fitted(numbers: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Convert numbers to a dtype. Raise WrongLine if a number is out of the range of the dtype."""
    if numbers.dtype == dtype:
        return numbers
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if numbers.size and (numbers.min() < limits.min or numbers.max() > limits.max):
            wrong = numbers.min() if numbers.min() < limits.min else numbers.max()
            raise WrongLine(f"expected integers from {limits.min:,} to {limits.max:,} (the range of {dtype}), found {wrong:,}")
        return numbers.astype(dtype)
    with np.errstate(over="ignore"):
        result = numbers.astype(dtype)
    if dtype.kind == "f" and (too_large := np.isinf(result) & ~np.isinf(numbers)).any():
        raise WrongLine(f"expected numbers up to {np.finfo(dtype).max:.3g} (the range of {dtype}), found {numbers[too_large].flat[0]}")
    return result


def array_of(record: Mapping[str, Any], key: Key, *, is_target: bool) -> np.ndarray:
    """Return the numbers of a row, with the dtype that they have in a batch.

    In a file without types, such as CSV or JSON lines, inputs are floating-point, and targets are integers if they are written as integers.
    Raise WrongLine if a value is not a number or a list of numbers, or lists have different lengths.
    """
    names = [key] if isinstance(key, str) else list(key)
    values = [value_of(record, name) for name in names]
    has_types = all(isinstance(value, np.ndarray | np.generic) for value in values)
    cells = [value for value in values if isinstance(value, str)]
    arrays = [_array(value, name) for value, name in zip(values, names, strict=True)] if len(cells) < len(values) else None
    if not isinstance(key, str) and arrays is not None:
        for name, array in zip(names, arrays, strict=True):
            if array.ndim:
                raise WrongLine(f"expected a number in {name!r}, because it is one of several columns, found the shape {list(array.shape)}")
    numbers = _of_cells(cells, names, is_target=is_target) if arrays is None else np.stack(arrays)
    if isinstance(key, str):
        numbers = np.asarray(numbers[0])
    stored = numbers.dtype if has_types or is_target else np.dtype(np.float64)
    return fitted(numbers, result_type(stored, is_target=is_target))


def _of_cells(cells: Sequence[str], names: Sequence[str], *, is_target: bool) -> np.ndarray:
    """Return the numbers in cells of a table; raise WrongLine if a cell is not a number."""
    if is_target and all(map(is_integer, cells)):
        return np.asarray([int(cell) for cell in cells], np.int64)
    if (numbers := floats_of(cells)) is None:
        name, cell = next((name, cell) for name, cell in zip(names, cells, strict=True) if floats_of([cell]) is None)
        raise WrongLine(f"expected a {'finite ' if is_number(cell) else ''}number in {name!r}, found {short(cell)[:100]}")
    return numbers


def floats_of(cells: Sequence[str]) -> np.ndarray | None:
    """Return the numbers in cells of a table; None if a cell is not a number (see `kinds.is_number`) or is too large, such as 1e400."""
    whole = "".join(cells)
    if not whole.isascii() or "_" in whole:
        return None
    try:
        numbers = np.fromiter(map(float, cells), np.float64, len(cells))
    except ValueError:
        return None
    return None if np.isinf(numbers).any() else numbers


def first_not_integer(record: Mapping[str, Any], key: Key, numbers: np.ndarray) -> str:
    """Describe the first number of a row that is not a 64-bit integer: the text of a cell, or a number with its dtype."""
    values = [record[name] for name in ([key] if isinstance(key, str) else key)]
    cell = next((value for value in values if isinstance(value, str) and not is_integer(value)), None)
    return f"{numbers.flat[0]} ({numbers.dtype})" if cell is None else short(cell)[:100]


def is_integer(cell: str) -> bool:
    """Return whether a cell is written as an integer of at most 64 bits."""
    cell = cell.strip()
    digits = cell[1:] if cell[:1] in ("-", "+") else cell
    return digits.isdecimal() and digits.isascii() and len(digits) <= 19 and -(2**63) <= int(cell) < 2**63


def _array(value: Any, name: str) -> np.ndarray:
    """Convert a value, which is a number, an array or nested lists, to an array."""
    if value is None or not isinstance(value, np.ndarray | np.generic | int | float | list):
        raise WrongLine(f"expected numbers in {name!r}, found {'null' if value is None else short(value)[:100]}")
    try:
        array = np.asarray(value)
    except ValueError:
        raise WrongLine(f"expected lists of the same length in {name!r}, found different lengths in {short(value)[:100]}") from None
    if array.dtype.kind not in KINDS or array.dtype.itemsize > 8:
        raise WrongLine(f"expected numbers in {name!r}, found {short(value)[:100]}")
    if not array.size:
        raise WrongLine(f"expected numbers in {name!r}, found an empty list")
    if not isinstance(value, np.ndarray | np.generic) and np.isinf(array).any():  # 1e400 in JSON
        raise WrongLine(f"expected finite numbers in {name!r}, found {array[np.isinf(array)].flat[0]}")
    return array
