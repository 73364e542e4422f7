"""Open files as streams, in constant memory and within limits. Files may be compressed with gzip or zstd."""

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
"""The first bytes of compressed files."""
_BLOCK = 2**20  # bytes that are read at once
_PACKED = {GZIP: "gzip", ZSTD: "zstd"}
_FREE, _MOST_TIMES = 2**28, 200  # a file may unpack to this many bytes, or to this many times its own size


def pyarrow(file: Path, what: str) -> Any:
    """Import the optional library pyarrow for a file such as "a Parquet file", or raise InputError."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            f"'{file}' is {what}: expected the library pyarrow to read it, but pyarrow is not installed; install it with "
            "pip install pyarrow"
        ) from None
    return pyarrow


def check_unpacked(count: int, packed: int, file: Path) -> None:
    """Check that a compressed file does not unpack to unusually many bytes, which could fill the memory or the disk.

    `count` bytes are unpacked so far, and the file has `packed` bytes.
    """
    if count > max(_FREE, most := _MOST_TIMES * packed):
        words = f"it has {packed:,} bytes and unpacks to more than {max(_FREE, most):,}, which is unusual for data; save it uncompressed"
        raise OSError(errno.EFBIG, words, str(file))


def compression(head: bytes) -> str | None:
    """Return the name of the compression of a file that begins with `head`; None if it is not compressed with gzip or zstd."""
    return next((name for start, name in _PACKED.items() if head.startswith(start)), None)


def unpacked(opened: BufferedReader, file: Path) -> BufferedReader:
    """Return a stream of the content of an open file, at its beginning, decompressed if necessary.

    Raise InputError if the file needs pyarrow, which is not installed.
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
    """The content of a compressed file. Errors while decompressing become OSErrors with the name of the file."""

    def __init__(self, source: Any, file: Path, kind: str, size: int) -> None:
        self._source, self._file, self._kind, self._size, self._position = source, file, kind, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        try:
            content = self._source.read(len(buffer))
        except (EOFError, zlib.error, OSError, ValueError):  # pyarrow's errors are ValueError or OSError
            words = f"it is compressed with {self._kind}, but damaged or cut off"
            raise OSError(errno.EINVAL, words, str(self._file)) from None
        buffer[: len(content)] = content
        self._position += len(content)
        check_unpacked(self._position, self._size, self._file)
        return len(content)

    def tell(self) -> int:
        return self._position


def skip(opened: BufferedReader, count: int) -> None:
    """Skip `count` bytes, or fewer if the stream ends before."""
    if opened.seekable():
        opened.seek(count, os.SEEK_CUR)
        return
    while count > 0 and (block := opened.read(min(count, _BLOCK))):
        count -= len(block)


def size(file: Path) -> int:
    """Return the decompressed size of a file in bytes. A compressed file is read completely. Raise OSError if the file cannot be read."""
    with open_to_read(file) as opened:
        if compression(opened.peek(4)) is None:
            return os.fstat(opened.fileno()).st_size
        stream, total = unpacked(opened, file), 0
        while block := stream.read(_BLOCK):
            total += len(block)
        return total
