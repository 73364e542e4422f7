"""The most bytes that a file's zstd frames unpack to, from the headers of their blocks (RFC 8878), without unpacking anything."""

import os
from pathlib import Path
from typing import BinaryIO

from jpipe.files import open_to_read

_MAGIC = b"\x28\xb5\x2f\xfd"
_BLOCK = 2**20  # bytes that are searched at once
_LARGEST_BLOCK = 128 * 1024  # bytes that a compressed block unpacks to at most


def unpacked(path: Path) -> int:
    """Bytes of all frames in a file, wherever they begin; of a few bytes that only look like the beginning of a frame nothing is added.

    Args:
        path: a regular file.

    Raises:
        OSError: it cannot be read.
    """
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        total, at = 0, 0
        while at + len(_MAGIC) <= size:
            block = _read(file, at, _BLOCK)
            begin = block.find(_MAGIC)
            while begin >= 0:
                total += _frame(file, at + begin + len(_MAGIC))
                begin = block.find(_MAGIC, begin + len(_MAGIC))
            at += _BLOCK - len(_MAGIC) + 1  # one may begin in this block and end in the next
        return total


def _read(file: BinaryIO, at: int, count: int) -> bytes:
    """Read bytes; fewer at the end of the file. It is not mapped, because whoever cuts off a mapped file kills those who read it."""
    file.seek(at)
    return file.read(count)


def _frame(file: BinaryIO, at: int) -> int:
    """The sum over the blocks of a frame whose header begins at `at`, as far as they are blocks."""
    if not (first := _read(file, at, 1)):
        return 0
    descriptor = first[0]
    single = descriptor >> 5 & 1
    at += 1 + (1 - single) + (0, 1, 2, 4)[descriptor & 3] + (single, 2, 4, 8)[descriptor >> 6]
    total = 0
    while len(content := _read(file, at, 3)) == 3:
        header = int.from_bytes(content, "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind == 3 or size > _LARGEST_BLOCK:
            break
        total += _LARGEST_BLOCK if kind == 2 else size
        at += 3 + (1 if kind == 1 else size)
        if last:
            break
    return total
