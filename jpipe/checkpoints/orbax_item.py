"""Write Orbax items in parts, one for each process, and read their arrays with TensorStore.

Orbax's handlers write exports, the metadata of items, and the joined indices of items. But they write only process 0's arrays, and parse a
whole item's metadata whenever a layer is read. So TensorStore writes the arrays of parts, and reads all arrays.
"""

import contextlib
import errno
import functools
import json
import logging
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jpipe import files

__all__ = ["read_tree", "tree_specs", "write_tree"]

Tree = dict[str, Any]
"""Nested dicts with string keys and arrays as leaves."""

ITEM = "default"
"""The folder of the item inside a step's folder, where `ocp.CheckpointManager` looks for it."""

STRUCTURE = "structure.json"
"""The file of a part that describes its nested dicts, with 0 in place of each array."""


def write_part(path: Path, layers: Mapping[str, Tree], process: int) -> list[Path]:
    """Write the layers of one process as a part of an item in the new folder `path`, without waiting for other processes.

    `layers` are nested dicts of arrays, which are copied to the host here. After writing, the arrays are read again and compared, to detect
    files that have vanished or that a disk has lost. Return the files; raise OSError if the disk is full, for example, or they differ.
    """
    tree = escape_names(jax.tree.map(np.asarray, jax.device_get(dict(layers))))  # starts all copies before it waits for one
    arrays = {".".join(key.key for key in keys): array for keys, array in jax.tree_util.tree_flatten_with_path(tree)[0]}
    headers = {name: json.dumps(_zarr_header(array)).encode() for name, array in arrays.items()}  # raises for unsupported dtypes
    path.mkdir()
    files.write_atomically(path / STRUCTURE, json.dumps(jax.tree.map(lambda array: 0, tree)))
    if not arrays:
        return []
    store = path / f"ocdbt.process_{process}"
    with _system_errors(store):
        _write_store(store, arrays, headers)
    written = sorted(file for file in store.rglob("*") if file.is_file())
    _compare(store, arrays)
    return written


def join_parts(path: Path, parts: Sequence[Path]) -> None:
    """Write an Orbax item from the parts of all processes. The files of their arrays are moved into the item, not copied.

    `path` is a new folder in the file system of the parts. Raise OSError if the disk is full, for example, or files have vanished.
    """
    structure: Tree = {}
    for part in parts:
        structure |= json.loads((part / STRUCTURE).read_bytes())
    if not jax.tree.leaves(structure):  # Orbax warns of an item without arrays
        empty = {_NO_LAYER: np.zeros(0)}
        _write_store(parts[0] / "ocdbt.process_0", empty, {_NO_LAYER: json.dumps(_zarr_header(empty[_NO_LAYER])).encode()})
        structure[_NO_LAYER] = 0
    stores = [store for part in parts for store in part.glob("ocdbt.process_*")]
    with _system_errors(path), _without_tracebacks():
        tree = jax.tree.map(lambda leaf: np.zeros(0), structure)  # the stores already hold the arrays
        # The second handler is never used, but Orbax warns if it is missing.
        kinds = (np.ndarray, _MoveStores(stores)), (jax.Array, ocp.type_handlers.ArrayHandler())
        types = ocp.type_handlers.create_type_handler_registry(*kinds)
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=_alone(), type_handler_registry=types)
        with ocp.Checkpointer(handler, multiprocessing_options=_alone()) as checkpointer:
            checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(tree))


def step_metadata() -> str:
    """Return the content of a step's `_CHECKPOINT_METADATA`, from which Orbax knows how to restore the item."""
    return json.dumps({"item_handlers": {ITEM: ocp.PyTreeCheckpointHandler().typestr()}})


def item_specs(path: Path) -> dict[str, Tree]:
    """Return the specs of an item that `join_parts` has written, by layer id, without reading an array. Other items: any Exception."""
    metadata = _read_metadata(path)
    if metadata["use_zarr3"] is not False or metadata["use_ocdbt"] is not True:
        raise ValueError("expected Zarr arrays, version 2, in an OCDBT store")
    specs = tree_specs(path)
    for layer, parts in specs.items():
        if layer != _NO_LAYER and not isinstance(parts, dict):
            raise TypeError(f"expected nested dicts of arrays for each layer, found an array as '{layer}'")
        if any(spec is ... for spec in jax.tree.leaves(parts)):
            raise TypeError(f"expected nested dicts of arrays for each layer, found something else in '{layer}'")
    declared = sum(size for spec in jax.tree.leaves(specs) if (size := math.prod(spec.shape) * spec.dtype.itemsize) > _INLINE)
    on_disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if declared > on_disk:  # the arrays are stored uncompressed
        raise ValueError(f"it declares arrays of {declared:,} bytes, but its files hold {on_disk:,}")
    return unescape_names({layer: parts for layer, parts in specs.items() if layer != _NO_LAYER})


def read_item(path: Path, specs: Mapping[str, Tree]) -> dict[str, Tree]:
    """Read some layers of an item that `join_parts` has written, without waiting for other processes, as nested dicts of NumPy arrays.

    `specs` comes from `item_specs`, which rejects arrays that declare more bytes than the item's files have. The arrays may be read-only.
    If `join_parts` has not written the item, exceptions of any kind are possible.
    """
    return unescape_names(read_tree(path, escape_names(dict(specs))))


def tree_specs(path: Path) -> Tree:
    """Return the specs of the tree of any Orbax item, as nested dicts (also for lists), without reading an array.

    A leaf that is not an array, such as a string, is `...`. If `path` is not an Orbax item, or its dicts are nested too deeply, exceptions
    of any kind are possible.
    """
    metadata, tree = _read_metadata(path), Tree()
    leaves = {tuple(str(part["key"]) for part in e["key_metadata"]): e["value_metadata"] for e in metadata["tree_metadata"].values()}
    arrays = [".".join(keys) for keys, leaf in leaves.items() if leaf["value_type"] in _ARRAYS and not leaf.get("skip_deserialize")]
    stores = _open_arrays(path, metadata, arrays)
    for keys, leaf in leaves.items():
        inside = functools.reduce(lambda tree, key: tree.setdefault(key, {}), keys[:-1], tree)
        name = ".".join(keys)
        inside[keys[-1]] = {} if leaf.get("skip_deserialize") else _spec(name, stores[name]) if name in stores else ...
    return tree


def read_tree(path: Path, specs: Tree) -> Tree:
    """Read arrays of any Orbax item.

    `specs` comes from `tree_specs`, or is a part of it; leaves that are `...` are not read and stay `...`. Exceptions of any kind are
    possible if an array cannot be read.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(specs)
    names = [None if spec is ... else ".".join(key.key for key in keys) for keys, spec in leaves]
    stores = _open_arrays(path, _read_metadata(path), filter(None, names))
    reading = {name: store.read() for name, store in stores.items()}  # all at once
    return jax.tree.unflatten(structure, [... if name is None else reading[name].result() for name in names])


def write_tree(path: Path, tree: Any) -> None:
    """Write a tree as an Orbax item for `ocp.StandardCheckpointer` in place of the empty folder `path`, or raise OSError."""
    with _system_errors(path), _without_tracebacks():
        handler = ocp.StandardCheckpointHandler(multiprocessing_options=_alone())
        with ocp.Checkpointer(handler, multiprocessing_options=_alone()) as checkpointer:
            checkpointer.save(path.absolute(), args=ocp.args.StandardSave(tree), force=True)


def escape_names(tree: Any) -> Any:
    """Escape the dots in the keys of nested dicts, because Orbax joins keys by dots: `block.0` becomes `block%2E0`."""
    if isinstance(tree, dict):
        return {quote(key, safe=" ").replace(".", "%2E"): escape_names(value) for key, value in tree.items()}
    if not isinstance(tree, np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(f"expected nested dicts of arrays, found {type(tree).__name__}")
    return tree


def unescape_names(tree: Any) -> Any:
    """Invert `escape_names`. Raise ValueError if two keys of a dict become equal."""
    if not isinstance(tree, dict):
        return tree
    unescaped = {unquote(key): unescape_names(value) for key, value in tree.items()}
    if len(unescaped) < len(tree):
        raise ValueError(f"a name occurs twice among {', '.join(tree)}")
    return unescaped


@contextlib.contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """Convert the errors of Orbax and TensorStore, which have many types, to `OSError`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        code = _OS_ERROR.search(str(error))
        if code is None:
            text = (str(error).splitlines() or [""])[0][:200]
            raise OSError(errno.EIO, f"Orbax could not write it ({type(error).__name__}: {text})", str(path)) from error
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


@contextlib.contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep Orbax from logging tracebacks of exceptions that it also raises."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return not (record.exc_info and "orbax" in record.pathname)

    logger = logging.getLogger("absl")
    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


def _compare(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Read the arrays of a store again, one at a time, and raise OSError if one differs from what was written or cannot be read."""
    try:
        store = ts.KvStore.open(_store_spec(path)).result()
        equal = all(store.read(_chunk_key(name, array)).result().value == array.tobytes() for name, array in arrays.items())
    except Exception as error:  # TensorStore raises errors of many kinds for missing files
        raise OSError(errno.EIO, f"its files were removed, or cannot be read again ({type(error).__name__})", str(path)) from error
    if not equal:
        raise OSError(errno.EIO, "its files are not what was written", str(path))


_DEEPEST = 64  # nested dicts; far more would overflow the stack of recursive code
_ARRAYS = frozenset({"jax.Array", "np.ndarray", "scalar"})  # Orbax's names of the types of leaves that it stores as arrays
_MOST_METADATA = 2**26  # bytes of `_METADATA`, about 200 for each array
_MOST_INDEX = 2**26  # bytes of the index of a store that are kept while arrays are opened and read
_INLINE = 1024  # bytes of an array that OCDBT may keep in its compressed index; larger arrays are stored as they are


def _read_metadata(path: Path) -> dict[str, Any]:
    """Read an item's metadata. Check that no name leads out of the item's folder, and that the tree is not too deep for recursion."""
    metadata = json.loads(files.read_bytes(path / "_METADATA", _MOST_METADATA))
    entries = metadata["tree_metadata"].values()
    if metadata.get("use_ocdbt") is None:  # written by an old Orbax
        metadata["use_ocdbt"] = (path / "manifest.ocdbt").exists()
    for entry in entries:
        if len(entry["key_metadata"]) > _DEEPEST:
            raise ValueError(f"expected at most {_DEEPEST} nested dicts")
        if metadata["use_ocdbt"] is not True and any("/" in str(part["key"]) for part in entry["key_metadata"]):
            raise ValueError("expected names without '/' for arrays in separate folders")
    return dict(metadata)


def _open_arrays(path: Path, metadata: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Open arrays of an item, all at once. Raise ValueError if an array is missing or cannot be opened."""
    base = {"driver": "file", "path": f"{path.absolute()}/"}
    context, opening = ts.Context({"cache_pool": {"total_bytes_limit": _MOST_INDEX}}), {}  # all together read the index once
    for name in names:
        store = (
            {"driver": "ocdbt", "base": base, "path": f"{name}/"} if metadata["use_ocdbt"] else base | {"path": f"{base['path']}{name}/"}
        )
        spec: dict[str, Any] = {"driver": "zarr3" if metadata.get("use_zarr3") else "zarr", "kvstore": store}
        if metadata.get("store_array_data_equal_to_fill_value"):
            spec["fill_missing_data_reads"] = False  # a missing chunk was lost, so it is an error
        opening[name] = ts.open(spec, read=True, open=True, context=context)
    arrays = {}
    for name, future in opening.items():
        try:
            arrays[name] = future.result()
        except ValueError as error:
            raise (ValueError(f"the index lacks the array '{name}'") if "NOT_FOUND" in str(error) else error) from None
    return arrays


def _spec(name: str, array: Any) -> jax.ShapeDtypeStruct:
    """Return shape and dtype of an opened array."""
    chunk = array.chunk_layout.read_chunk.shape or ()
    if any(inner > max(size, 1) for inner, size in zip(chunk, array.shape, strict=True)):  # a chunk is unpacked as a whole
        raise ValueError(f"'{name}' has chunks of shape {list(chunk)}, larger than the array's, {list(array.shape)}")
    return jax.ShapeDtypeStruct(array.shape, array.dtype.numpy_dtype)


class _MoveStores(ocp.type_handlers.NumpyHandler):  # type: ignore[misc] # Orbax has no types
    """Moves the stores that processes have written into the item, where Orbax merges their indices.

    Orbax's own handler silently leaves out the arrays of all processes but process 0. The single transaction here, for all arrays of a
    process, costs a third of the transactions of Orbax.
    """

    def __init__(self, stores: Sequence[Path]) -> None:
        super().__init__()
        self._stores = stores

    async def serialize(
        self, values: Sequence[Any], infos: Sequence[ocp.type_handlers.ParamInfo], args: Sequence[ocp.SaveArgs] | None = None
    ) -> Sequence[Any]:
        for store in self._stores:
            os.rename(store, infos[0].parent_dir / store.name)
        return []


def _store_spec(path: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path.absolute()}/"}, "config": {"max_inline_value_bytes": _INLINE}}


def _write_store(path: Path, arrays: Mapping[str, np.ndarray], headers: Mapping[str, bytes]) -> None:
    """Write arrays as Orbax reads them: an OCDBT store with Zarr arrays of version 2, each uncompressed and in one chunk."""
    with ts.Transaction() as transaction:
        store = ts.KvStore.open(_store_spec(path), transaction=transaction).result()
        for name, array in arrays.items():
            store.write(f"{name}/.zarray", headers[name])
            store.write(_chunk_key(name, array), array.tobytes())


def _chunk_key(name: str, array: np.ndarray) -> str:
    return f"{name}/{'.'.join('0' * array.ndim) or '0'}"


def _zarr_header(array: np.ndarray) -> dict[str, Any]:
    return {
        "zarr_format": 2,
        "shape": array.shape,
        "chunks": [max(size, 1) for size in array.shape],
        "dtype": array.dtype.str if array.dtype.isbuiltin == 1 else ts.dtype(array.dtype).name,  # bfloat16 and similar only have a name
        "order": "C",
        "fill_value": None,
        "filters": None,
        "compressor": None,
        "dimension_separator": ".",
    }


def _alone() -> ocp.options.MultiprocessingOptions:
    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(process, {process}, f"process-{process}")


# TensorStore reports the error of the operating system only as text; older versions wrote `OS error 28`.
_OS_ERROR = re.compile(r"(?:os_error_code='|OS error )(\d+)")

_NO_LAYER = "%-"  # not the name of any layer, because `escape_names` never returns it
