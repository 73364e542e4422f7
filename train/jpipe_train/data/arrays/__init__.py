"""Arrays of numbers for a user's own model: inputs and targets, from rows of files or from NumPy's files."""

from jpipe_train.data.arrays.reading import Arrays, read
from jpipe_train.data.arrays.rows import RowsOfArrays

__all__ = ["Arrays", "RowsOfArrays", "read"]
