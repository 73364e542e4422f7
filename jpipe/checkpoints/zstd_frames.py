"""The most bytes that a file's zstd frames unpack to, from the headers of their blocks (RFC 8878), without unpacking anything."""

import mmap
from pathlib import Path

_MAGIC = b"\x28\xb5\x2f\xfd"
_LARGEST_BLOCK = 128 * 1024  # bytes that a compressed block unpacks to at most


def unpacked(path: Path) -> int:
    """Bytes of all frames in a file, wherever they begin; of a few bytes that only look like the beginning of a frame nothing is added.

    Args:
        path: a regular file.
    """
    if path.stat().st_size < len(_MAGIC):
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        total, at = 0, content.find(_MAGIC)
        while at >= 0:
            total += _frame(content, at + len(_MAGIC))
            at = content.find(_MAGIC, at + len(_MAGIC))
        return total


def _frame(content: mmap.mmap, at: int) -> int:
    """The sum over the blocks of a frame whose header begins at `at`, as far as they are blocks."""
    if at >= len(content):
        return 0
    descriptor = content[at]
    single = descriptor >> 5 & 1
    at += 1 + (1 - single) + (0, 1, 2, 4)[descriptor & 3] + (single, 2, 4, 8)[descriptor >> 6]
    total = 0
    while at + 3 <= len(content):
        header = int.from_bytes(content[at : at + 3], "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        if kind == 3 or size > _LARGEST_BLOCK:
            break
        total += _LARGEST_BLOCK if kind == 2 else size
        at += 3 + (1 if kind == 1 else size)
        if last:
            break
    return total
