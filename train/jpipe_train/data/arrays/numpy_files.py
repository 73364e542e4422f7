"""Read arrays from a folder of `.npy` files or from an `.npz` archive. No pickle is loaded.

Rows stay in the file and are read when they are needed. Compressed arrays and arrays in Fortran order are read into memory.
"""

import errno
import hashlib
import lzma
import math
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np

from jpipe import InputError
from jpipe.errors import short, shortened
from jpipe.files import open_to_read
from jpipe_train.console.terminal import first_line
from jpipe_train.data.arrays.numbers import KINDS, Key
from jpipe_train.data.files import kinds
from jpipe_train.data.files.file_array import FileArray
from jpipe_train.data.files.streams import check_unpacked

_LOCAL = 30  # bytes of a file's header in an archive, before the file name
_LONGEST_HEADER = 10_000  # characters
_MOST_DIMS, _MOST_NUMBERS = 32, 2**59  # the most dimensions and numbers of an array
_HEADERS: Mapping[tuple[int, int], Callable[..., Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,  # version 3 has UTF-8 names of fields, but arrays of numbers have no fields
}
_ENDINGS = ".npy", ".npz"
_BLOCK, _MOST_CHECKED = 2**24, 2**28  # bytes that are read at once, and of the largest array in which the largest number is searched for


@dataclass(frozen=True)
class FileRows:
    """An array of numbers, in memory or in a file. From a file, rows are read when they are needed."""

    numbers: FileArray | np.ndarray  # all numbers, in C order
    shape: tuple[int, ...]  # the shape of the array
    name: str  # the name of the array in messages

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, row: int) -> np.ndarray:
        size = math.prod(self.shape[1:])
        return self.numbers[row * size : (row + 1) * size].reshape(self.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in the file."""
        return self.numbers.dtype

    def place(self, row: int) -> str:
        """Name a row for messages."""
        return f"{self.name}[{row}]"

    def largest(self) -> tuple[int, str] | None:
        """Return the largest number and the name of its row; None if the array is empty, or too large to search."""
        most: tuple[int, int] | None = None
        if self.numbers.size * self.dtype.itemsize <= _MOST_CHECKED:
            at_once = _BLOCK // self.dtype.itemsize
            for start in range(0, self.numbers.size, at_once):
                block = self.numbers[start : start + at_once]
                place = int(np.argmax(block))
                if most is None or block[place] > most[0]:
                    most = int(block[place]), start + place
        return None if most is None else (most[0], self.place(most[1] // math.prod(self.shape[1:])))

    def digest(self) -> str:
        """Return a hash of the shape, the dtype and some rows."""
        hasher = hashlib.sha256(f"{self.shape} {self.dtype}".encode())
        for row in sorted({0, len(self) // 2, len(self) - 1}) if len(self) else ():
            hasher.update(self[row].tobytes())
        return hasher.hexdigest()


def find(names: Sequence[str], files: Sequence[Path], keys: Sequence[Key], where: str) -> list[FileRows] | None:
    """Open the arrays with the names `keys`, or return None if none of the files is in NumPy's format.

    `names` are relative to the folder of the files. Raise InputError if an array does not exist, or has no numbers, if there are
    several archives, or arrays differ in their number of rows; and OSError if a file is damaged.
    """
    found = {name: file for name, file in zip(names, files, strict=True) if _kind(file) in (kinds.NPY, kinds.NPZ)}
    if not found:
        if other := next((file for file in files if file.suffix in _ENDINGS), None):
            raise _no_array(other)
        return None
    wanted = [key.removesuffix(".npy") for key in keys if isinstance(key, str)]
    if len(wanted) < len(keys):
        raise InputError(
            f"'{next(iter(found.values()))}' is a NumPy file, so data.inputs_key and data.targets_key must name one array each, found a "
            "list",
            where=where,
            change="replace the list by a name",
        )
    archives = [file for file in found.values() if _kind(file) == kinds.NPZ]
    if archives and len(found) > 1:
        listed = shortened([f"'{name}'" for name in found])
        raise InputError(where=where, expected="one .npz, or a folder of .npy files", found=listed, change="name one of them")
    if archives:
        arrays = _of_archive(archives[0], wanted, where)
    else:
        for name, file in zip(names, files, strict=True):
            if name not in found and name.removesuffix(".npy") in wanted and name.endswith(".npy"):
                raise _no_array(file)
        arrays = _of_folder(found, wanted, where)
    if len({len(array) for array in arrays}) > 1:
        counts = ", ".join(f"{len(array):,} in {array.name}" for array in arrays)
        raise InputError(where=where, expected="arrays with the same number of rows", found=counts, change="correct one of them")
    return arrays


def _kind(file: Path) -> str | None:
    kind = kinds.kind_of(file)
    return None if kind is None else kind.name


def _no_array(file: Path) -> OSError:
    """Return an error for a file that has the name of a NumPy file, but other content."""
    kind = kinds.kind_of(file)
    it_is = "it is empty" if not file.stat().st_size else "it is damaged" if kind is None else f"it seems to be {kind.name}"
    return OSError(errno.EINVAL, f"expected the content of a {file.suffix} file of NumPy, but {it_is}", str(file))


def _of_folder(found: Mapping[str, Path], wanted: Sequence[str], where: str) -> list[FileRows]:
    missing = [name for name in wanted if f"{name}.npy" not in found]
    if missing:
        folder = next(iter(found.values())).parent / f"{missing[0]}.npy"
        if folder.is_dir():
            raise InputError(
                where=where, expected=f"a file '{folder}'", found="a folder of this name", change="save the array as a file there"
            )
        listed = shortened([f"'{name}'" for name in found])
        raise InputError(
            where=where,
            expected=f"the file '{missing[0]}.npy' in a folder of NumPy files",
            found=listed,
            change="name the folder, and its arrays in data.inputs_key and data.targets_key",
        )
    arrays = []
    for name in wanted:
        file = found[f"{name}.npy"]
        with open_to_read(file) as opened:
            shape, dtype, is_fortran = _header(opened, f"'{file}'", where, file)
            start, end = opened.tell(), os.fstat(opened.fileno()).st_size
        _check_size(math.prod(shape) * dtype.itemsize, end - start, file)
        numbers: FileArray | np.ndarray = FileArray(file, dtype, start, math.prod(shape))
        arrays.append(FileRows(_in_order(numbers[:], shape) if is_fortran else numbers, shape, f"'{file}'"))
    return arrays


def _of_archive(file: Path, wanted: Sequence[str], where: str) -> list[FileRows]:
    try:
        with open_to_read(file) as opened, zipfile.ZipFile(opened) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            if missing := [name for name in wanted if name not in members]:
                listed = shortened([f"'{name}'" for name in members])
                raise InputError(
                    where=where,
                    expected=f"an array '{missing[0]}' in '{file}'",
                    found=listed,
                    change="name other arrays in data.inputs_key and data.targets_key",
                )
            return [_of_member(file, opened, archive, members[name], where) for name in wanted]
    except InputError:
        raise
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, RuntimeError, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # for damaged content, bz2 raises an OSError without a number
            raise
        raise OSError(
            errno.EINVAL, f"it begins like {kinds.NPZ}, but is damaged, cut off or not supported ({first_line(error)[:100]})", str(file)
        ) from None


def _of_member(file: Path, opened: BufferedReader, archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> FileRows:
    """Return an array of an archive. If it is stored uncompressed, its rows stay in the file; otherwise its numbers are read."""
    name = f"'{file}', {info.filename.removesuffix('.npy')}"
    with archive.open(info) as stream:
        shape, dtype, is_fortran = _header(stream, name, where, file)
        header, count = stream.tell(), math.prod(shape)
        _check_size(count * dtype.itemsize, info.file_size - header, file)
        if is_fortran or info.compress_type != zipfile.ZIP_STORED:
            check_unpacked(count * dtype.itemsize, os.fstat(opened.fileno()).st_size, file)
            content = stream.read(count * dtype.itemsize)
            _check_size(count * dtype.itemsize, len(content), file)
            numbers = np.frombuffer(content, dtype)
            return FileRows(_in_order(numbers, shape) if is_fortran else numbers, shape, name)
    opened.seek(info.header_offset)
    local = opened.read(_LOCAL)
    start = info.header_offset + _LOCAL + sum(struct.unpack("<HH", local[26:])) + header
    _check_size(start + count * dtype.itemsize, os.fstat(opened.fileno()).st_size, file)
    return FileRows(FileArray(file, dtype, start, count), shape, name)


def _header(stream: Any, name: str, where: str, file: Path) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    """Return the shape of an array, its dtype and whether it is in Fortran order, from its header.

    Raise InputError if the array has no numbers, or no rows, and OSError if the header is damaged.
    """
    try:
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise ValueError(f"version {version[0]}.{version[1]} of the format is unknown")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns about headers that Python 2 wrote
            shape, is_fortran, dtype = _HEADERS[version](stream, max_header_size=_LONGEST_HEADER)
        # NumPy also accepts booleans, and numbers too large for any array, as sizes.
        if (
            len(shape) > _MOST_DIMS
            or any(type(size) is not int for size in shape)
            or math.prod(size or 1 for size in shape) > _MOST_NUMBERS
        ):
            raise ValueError(f"the shape {short(shape)}")
    except OSError:
        raise
    except Exception as error:  # NumPy parses the header as Python: damage raises TokenError, RecursionError, MemoryError and more
        reason = first_line(error).partition(": <ast.")[0][:100] if str(error) else type(error).__name__
        words = f"it begins like {kinds.NPY}, but its header is damaged or not supported ({reason})"
        raise OSError(errno.EINVAL, words, str(file)) from None
    if dtype.kind not in KINDS or dtype.itemsize > 8:
        found = "Python objects (a pickle), which jpipe never loads" if dtype.hasobject else str(dtype)
        raise InputError(where=where, expected=f"numbers in {name}", found=found, change="save the array as float32 or integers")
    if not shape or min(shape) < 0 or not math.prod(shape[1:]):
        raise InputError(
            where=where,
            expected=f"an array of rows in {name}",
            found=f"the shape {list(shape)}",
            change="save an array with rows along its first dimension",
        )
    return tuple(shape), dtype, is_fortran


def _check_size(need: int, have: int, file: Path) -> None:
    """Check that a file has as many bytes as its header requires."""
    if have < need:
        raise OSError(errno.EINVAL, f"it is cut off: expected {need:,} bytes, found {have:,}", str(file))


def _in_order(numbers: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Convert numbers from Fortran order to C order."""
    return numbers.reshape(shape, order="F").ravel()
