"""Open files as streams, also those compressed with gzip or zstd, in constant memory and within limits."""

import errno
import gzip
import io
import os
import zlib
from io import BufferedReader
from pathlib import Path
from typing import Any

from jpipe import InputError
from jpipe.files import open_to_read

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""What compressed files begin with."""
_BLOCK = 2**20  # bytes that are read at once
_PACKED = {GZIP: "gzip", ZSTD: "zstd"}
_FREE, _MOST_TIMES = 2**28, 200  # bytes that any file may unpack to; otherwise how many times its own


def pyarrow(file: Path, what: str) -> Any:
    """Import the library pyarrow, which is optional.

    Args:
        file: what is to be read, for the message.
        what: its kind, such as "a Parquet file".

    Raises:
        InputError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            f"'{file}' is {what}: expected the library pyarrow, which reads it, found that it is not installed; install it with "
            "pip install pyarrow"
        ) from None
    return pyarrow


def check_unpacked(count: int, packed: int, file: Path) -> None:
    """Check that a compressed file does not unpack to far more than data usually do, which would fill memory or disk.

    Args:
        count: the bytes that it unpacks to.
        packed: its own.
        file: its path, for messages.

    Raises:
        OSError: they are too many.
    """
    if count > max(_FREE, most := _MOST_TIMES * packed):
        words = (
            f"it has {packed:,} bytes and unpacks to more than {max(_FREE, most):,}, as no file of data does; save it without compression"
        )
        raise OSError(errno.EFBIG, words, str(file))


def compression(head: bytes) -> str | None:
    """Return the compression of a file that begins with these bytes, if it can be read."""
    return next((name for start, name in _PACKED.items() if head.startswith(start)), None)


def unpacked(opened: BufferedReader, file: Path) -> BufferedReader:
    """Return a stream of the content of an open file, decompressed if necessary.

    Args:
        opened: the file, at its beginning.
        file: its path, for messages.

    Raises:
        InputError: pyarrow is not installed, and the file needs it.
    """
    kind = compression(opened.peek(4))
    if kind is None:
        return opened
    source: Any
    if kind == "gzip":
        source = gzip.GzipFile(fileobj=opened, mode="rb")
    else:
        source = pyarrow(file, "compressed with zstd").CompressedInputStream(opened, "zstd")
    return BufferedReader(_Unpacked(source, file, kind, os.fstat(opened.fileno()).st_size), _BLOCK // 16)


class _Unpacked(io.RawIOBase):
    """The content of a compressed file; errors in it become OSErrors with the name of the file."""

    def __init__(self, source: Any, file: Path, kind: str, size: int) -> None:
        self._source, self._file, self._kind, self._size, self._position = source, file, kind, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            content = self._source.read(len(buffer))
        except (EOFError, zlib.error, OSError, ValueError):  # pyarrow's errors are ValueError or OSError
            words = f"it is compressed with {self._kind}, and damaged or cut off"
            raise OSError(errno.EINVAL, words, str(self._file)) from None
        buffer[: len(content)] = content
        self._position += len(content)
        check_unpacked(self._position, self._size, self._file)
        return len(content)

    def tell(self) -> int:
        return self._position


def skip(opened: BufferedReader, count: int) -> None:
    """Read and drop `count` bytes, or fewer at the end."""
    if opened.seekable():
        opened.seek(count, os.SEEK_CUR)
        return
    while count > 0 and (block := opened.read(min(count, _BLOCK))):
        count -= len(block)


def size(file: Path) -> int:
    """Return the decompressed size of a file in bytes; a compressed file is read completely.

    Raises:
        OSError: it cannot be read.
    """
    with open_to_read(file) as opened:
        if compression(opened.peek(4)) is None:
            return os.fstat(opened.fileno()).st_size
        stream, total = unpacked(opened, file), 0
        while block := stream.read(_BLOCK):
            total += len(block)
        return total
