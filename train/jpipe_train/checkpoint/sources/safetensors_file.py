"""Read safetensors files: the safetensors library checks the header, and tensors are read without a memory map.

If another process truncates a memory-mapped file, a signal kills its readers.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jpipe import InputError
from jpipe.files import open_to_read
from jpipe_train.checkpoint.sources.source import FLOATS, Spec

_DTYPES = {
    **{code: np.dtype(name) for code, name in FLOATS.items() if code != "BF16"},
    **{f"{kind}{bits}": np.dtype(f"{name}{bits}") for kind, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
    "BF16": np.dtype(jnp.bfloat16),
    "BOOL": np.dtype(bool),
}

_MOST_HEADER = 10**8  # bytes, as in the safetensors library


class TensorsFile:
    """The tensors of an open file.

    Attributes:
        specs: shapes and dtypes of the tensors, in their order in the file.
    """

    def __init__(self, file: BinaryIO, path: Path) -> None:
        with safe_open(path, "np") as checked:
            self.specs: dict[str, Spec] = {}
            codes: dict[str, str] = {}
            for name in checked.offset_keys():
                part = checked.get_slice(name)
                codes[name] = part.get_dtype()
                self.specs[name] = Spec(tuple(part.get_shape()), FLOATS.get(codes[name], codes[name]))
        self._file, self._codes = file, codes
        length = int.from_bytes(os.pread(file.fileno(), 8, 0), "little")
        header = json.loads(os.pread(file.fileno(), length, 8))
        self._offsets = {name: 8 + length + int(header[name]["data_offsets"][0]) for name in self.specs}

    def read(self, name: str) -> np.ndarray:
        """Return a tensor.

        Raise SafetensorError if the file was cut off while it was read, or numbers of this type cannot be read, and OSError if the disk
        fails.
        """
        shape, code = self.specs[name].shape, self._codes[name]
        if code not in _DTYPES:
            raise SafetensorError(f"'{name}' has the type {code}, which jpipe cannot read")
        tensor = np.empty(shape, _DTYPES[code])
        content, at = tensor.reshape(-1).view(np.uint8).data, self._offsets[name]
        while content:
            if not (count := os.preadv(self._file.fileno(), [content], at)):
                raise SafetensorError(f"'{name}' ends too early: the file was cut off while it was read")
            content, at = content[count:], at + count
        return tensor


@contextlib.contextmanager
def tensors_file(path: Path, where: str, expected: str = "a safetensors file", hint: str = "download it again") -> Iterator[TensorsFile]:
    """Open a safetensors file, a regular file or a link to one; `hint` says what to do if it is another kind of file.

    Raise InputError if it is not a safetensors file, cannot be read, or is cut off, perhaps while it is read.
    """
    try:
        with open_to_read(path) as file:
            try:
                tensors = TensorsFile(file, path)
            except (OSError, SafetensorError):
                raise
            except Exception as error:  # the file has changed since the library checked it
                raise SafetensorError(f"the header cannot be read: {error}") from None
            yield tensors
    except (OSError, SafetensorError) as error:
        message = str(error)
    else:
        return
    with contextlib.suppress(OSError), open_to_read(path) as file:
        _check_size(file, path.stat().st_size, where, hint)
    raise InputError(where=where, expected=f"{expected}, found: {message}", change=hint)


def _check_size(file: BinaryIO, size: int, where: str, hint: str) -> None:
    """Check that a file is no Git LFS pointer and as long as its header says, because the library's own errors are unclear."""
    start = file.read(8)
    if start == b"version ":
        raise InputError(
            where=where, expected="a safetensors file", found="a pointer of Git LFS", change="fetch the file itself, with git lfs pull"
        )
    header = int.from_bytes(start, "little")
    end = 8 + header
    if len(start) < 8 or header > _MOST_HEADER:
        return
    with contextlib.suppress(ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        parts = json.loads(file.read(header))
        end += max(int(part["data_offsets"][1]) for name, part in parts.items() if name != "__metadata__")
    if size < end:
        least = "at least " if size < 8 + header else ""
        raise InputError(where=where, expected=f"{least}{end:,} bytes, as its header says", found=f"{size:,}: it is cut off", change=hint)
