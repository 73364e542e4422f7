"""Read one array of a NumPy `.npz` file that may be damaged or come from a stranger: within limits, and never as a pickle."""

import errno
import math
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from jpipe import InputError
from jpipe.files import open_to_read
from jpipe_train.console.terminal import first_line


def header(path: Path, name: str, where: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return the shape and dtype of an array; only its header is read.

    Args:
        path: the file.
        name: of the array.
        where: the key that names the file, for messages.

    Raises:
        InputError: the file is damaged, is no `.npz` file or has no such array.
        OSError: it cannot be read.
    """
    with _array(path, name, where) as (_, shape, _, dtype):
        return shape, dtype


def read(path: Path, name: str, where: str, most: int) -> np.ndarray:
    """Return an array.

    Args:
        path: as in `header`.
        name: as in `header`.
        where: as in `header`.
        most: bytes that the array may have.

    Raises:
        InputError: as in `header`; the array is larger, or holds Python objects.
        OSError: the file cannot be read.
    """
    with _array(path, name, where) as (content, shape, in_columns, dtype):
        if dtype.hasobject:
            raise InputError(f"{where}: '{path}': expected numbers, found Python objects, which jpipe never loads; write numbers")
        size = math.prod(shape) * dtype.itemsize
        if size > most:
            raise InputError(f"{where}: '{path}': expected at most {most / 2**30:g} GiB in '{name}', found more; store less")
        data = content.read(size + 1)  # at the end of its content the zip file's checksum is compared
        if len(data) != size:
            raise ValueError(f"expected {size:,} bytes in '{name}', found {'more' if len(data) > size else f'{len(data):,}'}")
        return np.frombuffer(data, dtype).reshape(shape, order="F" if in_columns else "C")


@contextmanager
def _array(path: Path, name: str, where: str) -> Iterator[tuple[IO[bytes], tuple[int, ...], bool, np.dtype[Any]]]:
    """Open an array and read its header.

    Yields the stream of its content, its shape, whether it is in Fortran order, and its dtype.
    """
    with open_to_read(path) as file:
        try:
            with zipfile.ZipFile(file) as archive:
                if f"{name}.npy" not in archive.namelist():
                    raise InputError(f"{where}: '{path}': expected an array '{name}', found none; write it with numpy.savez(…, {name}=…)")
                with archive.open(f"{name}.npy") as content:
                    version: Any = np.lib.format.read_magic(content)
                    parsed = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                    shape, in_columns, dtype = parsed(content)
                    if not all(isinstance(size, int) and size >= 0 for size in shape):
                        raise ValueError(f"expected sizes of 0 or more, found the shape {shape}")
                    yield content, shape, in_columns, dtype
        except InputError:
            raise
        except Exception as error:  # of many kinds: those of zipfile, of each compression, and of the tokenizer that NumPy uses
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):  # a place that no file has is damage, too
                raise
            reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
            raise InputError(f"{where}: cannot read '{path}': {reason}; is it truncated? make it again with numpy.savez") from None
