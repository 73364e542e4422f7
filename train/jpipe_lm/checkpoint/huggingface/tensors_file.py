"""Write safetensors files one tensor at a time, so that they are never all in memory."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from jpipe.files import create, write_atomically
from jpipe_lm.checkpoint.huggingface.folder import INDEX, WHOLE
from jpipe_train.checkpoint.sources.source import FLOATS, Spec

_CODES = {name: code for code, name in FLOATS.items()}
_ALIGNED = 8


def write_tensors(folder: Path, specs: Mapping[str, Spec], arrays: Iterator[tuple[str, np.ndarray]], limit: int) -> int:
    """Write tensors, in the order of `specs`, and return their bytes; raise OSError if the disk is full, for example.

    There are several files with an index if one would have more than `limit` bytes. A single larger tensor has its own file.
    """
    sizes = {name: np.dtype(_numpy(spec)).itemsize * int(np.prod(spec.shape, dtype=np.int64)) for name, spec in specs.items()}
    parts = _parts(sizes, limit)
    files = [WHOLE] if len(parts) == 1 else [f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors" for i in range(len(parts))]
    for file, names in zip(files, parts, strict=True):
        _write(folder / file, {name: specs[name] for name in names}, sizes, arrays)
    if len(parts) > 1:
        weight_map = {name: file for file, names in zip(files, parts, strict=True) for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_atomically(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return sum(sizes.values())


def _parts(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divide the tensors among files, and return the names for each file."""
    parts: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if size > room and parts[-1]:
            parts.append([])
            room = limit
        parts[-1].append(name)
        room -= size
    return parts


def _write(path: Path, specs: Mapping[str, Spec], sizes: Mapping[str, int], arrays: Iterator[tuple[str, np.ndarray]]) -> None:
    """Write one file: the length of the header, the header, and the tensors without gaps."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers requires it
    end = 0
    for name, spec in specs.items():
        header[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [end, end + sizes[name]]}
        end += sizes[name]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    with create(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for wanted, spec in specs.items():
            name, array = next(arrays)
            assert (name, array.shape, array.dtype) == (wanted, spec.shape, _numpy(spec)), f"{name} in place of {wanted}"
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _numpy(spec: Spec) -> np.dtype:
    return np.dtype(spec.dtype)
