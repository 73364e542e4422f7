"""One process's part of a checkpoint, as an Orbax item that plain Orbax reads as well: the only code here that knows Orbax."""

import contextlib
import errno
import json
import logging
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jpipe import files
from jpipe.checkpoints.zstd_frames import unpacked

Tree = dict[str, Any]
"""Nested dicts with string keys and arrays as leaves."""


def write_item(path: Path, layers: Mapping[str, Tree]) -> list[Path]:
    """Write layers as the Orbax item `path`, which appears whole or not at all; no other process is waited for.

    What was written is read again and compared, so that files that vanish meanwhile, or that a disk has lost, are noticed.

    Args:
        path: a folder that is not there yet; the one above it is.
        layers: `{layer id: nested dicts of arrays}`. The arrays are copied to the host here.

    Returns:
        The files of the item.

    Raises:
        OSError: the disk is full, say, or what is there is not what was written.
    """
    tree = jax.tree.map(np.asarray, jax.device_get(dict(layers)))  # all leaves are on their way before the first is waited for
    item = _escaped(tree)
    if not jax.tree.leaves(item):
        item[_NO_LAYER] = np.zeros(0)  # Orbax warns of an item without any array, and refuses one without anything
    for array in jax.tree.leaves(item):
        _zarr(array)  # a dtype that cannot be stored is the caller's mistake
    try:
        with _without_tracebacks():
            _checkpointer().save(path.absolute(), args=ocp.args.PyTreeSave(item))
    except OSError:
        raise
    except Exception as error:  # of many kinds, as where files vanish while they are written
        code = _OS_ERROR.search(str(error))
        if code is None:
            said = (str(error).splitlines() or [""])[0][:200]
            raise OSError(errno.EIO, f"Orbax could not write it ({type(error).__name__}: {said})", str(path)) from error
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    files = sorted(file for file in path.rglob("*") if file.is_file())
    _compare(path, item)
    return files


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep Orbax from logging the tracebacks of its threads, whose exceptions are raised as well."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return not (record.exc_info and "orbax" in record.pathname)

    logger = logging.getLogger("absl")
    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


def _compare(path: Path, item: Tree) -> None:
    """Read an item again, one array at a time, and compare it with what was written.

    Raises:
        OSError: it is something else, or cannot be read.
    """
    expected = {tuple(key.key for key in names): array for names, array in jax.tree_util.tree_flatten_with_path(item)[0]}
    try:
        store = _store(path)
        specs = {names: spec for names, spec in _specs(path, store).items() if spec is not None}
        lost = expected.keys() - specs.keys()
        same = not lost and all(
            np.array_equal(_bytes(_array(names, specs[names], store.read(_chunk(names, specs[names])).result())), _bytes(array))
            for names, array in expected.items()
        )
    except Exception as error:  # of many kinds, since files are missing
        raise OSError(errno.EIO, f"its files were removed, or cannot be read again ({type(error).__name__})", str(path)) from error
    if not same:
        raise OSError(errno.EIO, "its files are not what was written", str(path))


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def read_item(path: Path, ids: Collection[str]) -> dict[str, Tree]:
    """Read some layers of an item; nothing of the others is read, and no other process is waited for.

    The item may be a stranger's. It is read as `write_item` writes it and in no other way: bytes that are the array, no codec, so that
    what is read is never larger than the files.

    Args:
        path: what `write_item` wrote, in a run of any number of processes.
        ids: layers that the item holds.

    Returns:
        `{layer id: nested dicts of NumPy arrays}`, which may be read-only.

    Raises:
        ValueError, TypeError, KeyError, OSError: it is not as `write_item` writes items.
    """
    wanted = {_escape(layer) for layer in ids}
    store = _store(path)
    specs = {names: spec for names, spec in _specs(path, store).items() if names[0] in wanted}
    chunks = {names: store.read(_chunk(names, spec)) for names, spec in specs.items() if spec is not None}
    return _nested({names: None if spec is None else _array(names, spec, chunks[names].result()) for names, spec in specs.items()})


def item_specs(path: Path) -> dict[str, Tree]:
    """Shapes and dtypes of all that `read_item` can read, by layer id; no array is read.

    Raises:
        ValueError, TypeError, KeyError, OSError: it is not as `write_item` writes items.
    """
    return _nested({names: spec for names, spec in _specs(path, _store(path)).items() if names[0] != _NO_LAYER})


_Names = tuple[str, ...]
_DEEPEST = 64  # dicts in dicts; far more would exhaust the stack of those who use the tree
_MOST_METADATA = 2**26  # bytes of `_METADATA`, about 200 for each array
_MOST_ZARRAY = 2**16
_LARGEST_INDEX = 2**28  # bytes; about 200 for each array and 1,024 at most for a small one
_INLINE = 1024  # bytes of an array that OCDBT may hold in its own compressed nodes; larger ones are there as they are


def _store(path: Path) -> Any:
    """The item's OCDBT store. TensorStore unpacks the nodes of its index as they come, so what they unpack to is bounded before."""
    index = sum(unpacked(file) for file in path.rglob("*") if file.is_file())
    if index > _LARGEST_INDEX:
        raise ValueError(f"its index would take {index:,} bytes of memory, more than {_LARGEST_INDEX:,}")
    return ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{path.absolute()}/"}}).result()


def _specs(path: Path, store: Any) -> dict[_Names, jax.ShapeDtypeStruct | None]:
    """By the escaped names on the way to it each array's shape and dtype; None: an empty dict."""
    leaves = {_names(entry): entry["value_metadata"]["value_type"] for entry in _entries(path)}
    for names, kind in leaves.items():
        if kind not in ("np.ndarray", "Dict") or (kind == "np.ndarray" and len(names) < 2 and names != (_NO_LAYER,)):
            raise TypeError(f"expected nested dicts of arrays for each layer, found '{kind}' as '{'/'.join(names)}'")
    headers = {names: store.read(f"{'.'.join(names)}/.zarray") for names, kind in leaves.items() if kind == "np.ndarray"}
    specs = {names: _spec(names, headers[names].result()) if names in headers else None for names in leaves}
    declared = sum(size for spec in specs.values() if spec is not None and (size := _size(spec)) > _INLINE)
    there = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if declared > there:
        raise ValueError(f"it declares arrays of {declared:,} bytes, and its files hold {there:,}")
    return specs


def _entries(path: Path) -> Collection[Any]:
    """What `_METADATA` says of each leaf."""
    metadata = json.loads(files.read_bytes(path / "_METADATA", _MOST_METADATA))
    if metadata["use_zarr3"] is not False or metadata["use_ocdbt"] is not True:
        raise ValueError("expected Zarr arrays, version 2, in an OCDBT store")
    entries: dict[str, Any] = metadata["tree_metadata"]
    return entries.values()


def _names(entry: Any) -> _Names:
    names = tuple(part["key"] for part in entry["key_metadata"])
    if not 1 <= len(names) <= _DEEPEST or not all(isinstance(name, str) and "." not in name for name in names):
        raise ValueError("expected names of jpipe's, without dots, in at most 64 dicts")
    return names


def _spec(names: _Names, header: Any) -> jax.ShapeDtypeStruct:
    """What `.zarray` says, if that is what `_zarr` writes."""
    if len(header.value) > _MOST_ZARRAY:
        raise ValueError(f"'{'/'.join(names)}' has a header of {len(header.value):,} bytes")
    said = json.loads(header.value)
    shape, name = said["shape"], said["dtype"]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"'{'/'.join(names)}' has a shape that is none")
    dtype = np.dtype(name) if name[0] in "<>|" else ts.dtype(name).numpy_dtype
    if dtype.hasobject or dtype.itemsize > 16:
        raise TypeError(f"'{'/'.join(names)}' holds no numbers")
    spec = jax.ShapeDtypeStruct(tuple(shape), dtype)
    if said != json.loads(json.dumps(_zarr(spec))):
        raise ValueError(f"'{'/'.join(names)}' is not stored as jpipe stores arrays, in one piece and uncompressed")
    return spec


def _size(spec: jax.ShapeDtypeStruct) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _chunk(names: _Names, spec: Any) -> str:
    return f"{'.'.join(names)}/{'.'.join('0' * spec.ndim) or '0'}"


def _array(names: _Names, spec: jax.ShapeDtypeStruct, chunk: Any) -> np.ndarray:
    if len(chunk.value) != _size(spec):
        raise ValueError(f"'{'/'.join(names)}' declares {_size(spec):,} bytes and has {len(chunk.value):,}")
    return np.frombuffer(chunk.value, spec.dtype).reshape(spec.shape)


def _nested(leaves: Mapping[_Names, Any]) -> dict[str, Tree]:
    """Nested dicts by unescaped names."""
    tree: Tree = {}
    for names, leaf in leaves.items():
        *outer, last = map(unquote, names)
        inner = tree
        for name in outer:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise TypeError(f"'{'/'.join(names)}' is inside an array")
        if inner.setdefault(last, {} if leaf is None else leaf) is not leaf and leaf is not None:
            raise ValueError(f"'{'/'.join(names)}' occurs twice")
    return tree


class _OwnArrays(ocp.type_handlers.NumpyHandler):  # type: ignore[misc] # Orbax has no types
    """Writes the arrays of this very process; Orbax's own handler leaves out, silently, those of any process but 0.

    What is written is what Orbax reads: a Zarr array (version 2, in one piece, uncompressed) for each leaf, all in one OCDBT store, in
    the folder that Orbax takes into the item by its name. One transaction for all of them costs a third of Orbax's way.
    """

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ocp.type_handlers.ParamInfo], args: Sequence[ocp.SaveArgs] | None = None
    ) -> Sequence[Any]:
        folder = infos[0].parent_dir / f"ocdbt.process_{jax.process_index()}"
        spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}, "config": {"max_inline_value_bytes": 1024}}
        with ts.Transaction() as transaction:
            staged = ts.KvStore.open(spec, transaction=transaction).result()
            for value, info in zip(values, infos, strict=True):
                staged.write(f"{info.name}/.zarray", json.dumps(_zarr(value)).encode())
                staged.write(_chunk((info.name,), value), value.tobytes())
        return []


def _zarr(value: np.ndarray | jax.ShapeDtypeStruct) -> dict[str, Any]:
    return {
        "zarr_format": 2,
        "shape": value.shape,
        "chunks": [max(size, 1) for size in value.shape],
        "dtype": value.dtype.str if value.dtype.isbuiltin == 1 else ts.dtype(value.dtype).name,  # bfloat16 and its like go by name
        "order": "C",
        "fill_value": None,
        "filters": None,
        "compressor": None,
        "dimension_separator": ".",
    }


def _checkpointer() -> ocp.Checkpointer:
    """Orbax for this process alone: it neither waits for the others nor leaves the writing to process 0."""
    process = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(process, {process}, f"process-{process}")
    handlers = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, _OwnArrays()),
        (jax.Array, ocp.type_handlers.ArrayHandler()),  # never used; Orbax warns where there is none
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone, type_handler_registry=handlers)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


# TensorStore passes the error of the system on as text only; older versions wrote `OS error 28`.
_OS_ERROR = re.compile(r"(?:os_error_code='|OS error )(\d+)")


def _escaped(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {_escape(key): _escaped(value) for key, value in tree.items()}
    if not isinstance(tree, np.ndarray):
        raise TypeError(f"expected nested dicts of arrays, found {type(tree).__name__}")
    return tree


_NO_LAYER = "%-"  # no layer has this name: `_escape` never makes it


def _escape(name: str) -> str:
    """A name without the characters that Orbax joins names with: `block.0` becomes `block%2E0`; `unquote` takes it back."""
    return quote(name, safe=" ").replace(".", "%2E")
