"""An array of numbers that stays in its file. A slice reads a part of it.

Files are not mapped into memory: if another process truncated a file, a signal would kill this process.
"""

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from jpipe import InputError
from jpipe.files import open_to_read


class FileArray:
    """A one-dimensional array in a file or in a part of a file. Several threads may read it at the same time.

    Args:
        path: the file.
        dtype: the dtype of the numbers.
        start: the byte at which the numbers begin.
        size: the number of numbers; None: up to the end of the file.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], start: int = 0, size: int | None = None) -> None:
        self._path, self.dtype, self._start = path, dtype, start
        with open_to_read(path) as file:
            self._number = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._number)
        self.size: int = (os.fstat(self._number).st_size - start) // dtype.itemsize if size is None else size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> np.ndarray:
        """Read the numbers of a slice with step 1. Raise InputError if the file ends before, and OSError if the disk fails."""
        first, last, step = part.indices(self.size)
        assert step == 1, "only consecutive numbers are read"
        array = np.empty(max(last - first, 0), self.dtype)
        self._read_into(array.view(np.uint8).data, self._start + first * self.dtype.itemsize)
        return array

    def _read_into(self, content: memoryview, at: int) -> None:
        end = at + len(content)
        while content:
            if not (count := os.preadv(self._number, [content], at)):
                raise InputError(
                    f"data: expected at least {end:,} bytes in '{self._path}', found {os.fstat(self._number).st_size:,}: the file was cut "
                    "off during the run; copy it again"
                )
            content, at = content[count:], at + count
