"""Writing of Orbax items in parts, one for each process, and reading of them through Orbax's handlers."""

import asyncio
import contextlib
import errno
import json
import logging
import math
import os
import re
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
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
"""The file of a part that holds its nested dicts, with 0 in place of each array."""


def write_part(path: Path, layers: Mapping[str, Tree], process: int) -> list[Path]:
    """Write the layers of one process as a part of an item, without waiting for other processes.

    The arrays are read again and compared, so that files that vanish meanwhile, or that a disk has lost, are noticed.

    Args:
        path: a new folder in an existing one.
        layers: `{layer id: nested dicts of arrays}`. The arrays are copied to the host here.
        process: the index of the process.

    Returns:
        The files of the part's arrays.

    Raises:
        OSError: the disk is full, for example, or the files do not hold what was written.
    """
    tree = escape_names(jax.tree.map(np.asarray, jax.device_get(dict(layers))))  # starts all copies before it waits for the first
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
    """Write an Orbax item from the parts of all processes; their arrays are moved into it, not copied.

    Args:
        path: the item, a new folder in an existing one of the same file system.
        parts: the folders of `write_part`.

    Raises:
        OSError: the disk is full, for example, or files of a part have vanished.
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
        with ocp.Checkpointer(_handler(_MoveStores(stores)), multiprocessing_options=_alone()) as checkpointer:
            checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(tree))


def step_metadata() -> str:
    """Return the content of a step's `_CHECKPOINT_METADATA`, from which Orbax knows how to restore the item."""
    return json.dumps({"item_handlers": {ITEM: ocp.PyTreeCheckpointHandler().typestr()}})


def item_specs(path: Path) -> dict[str, Tree]:
    """Return shapes and dtypes of an item of jpipe's, by layer id; no array is read.

    Raises:
        Exception: of any kind, if it is not an item that `join_parts` has written.
    """
    metadata = _read_metadata(path)
    if metadata["use_zarr3"] is not False or metadata["use_ocdbt"] is not True:
        raise ValueError("expected Zarr arrays, version 2, in an OCDBT store")
    specs = tree_specs(path, _handler(_ReadArrays()))
    for layer, parts in specs.items():
        if layer != _NO_LAYER and not isinstance(parts, dict):
            raise TypeError(f"expected nested dicts of arrays for each layer, found an array as '{layer}'")
    declared = sum(size for spec in jax.tree.leaves(specs) if (size := math.prod(spec.shape) * spec.dtype.itemsize) > _INLINE)
    on_disk = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    if declared > on_disk:  # the arrays are stored uncompressed
        raise ValueError(f"it declares arrays of {declared:,} bytes, and its files hold {on_disk:,}")
    return unescape_names({layer: parts for layer, parts in specs.items() if layer != _NO_LAYER})


def read_item(path: Path, ids: Collection[str]) -> dict[str, Tree]:
    """Read some layers of an item of jpipe's, without waiting for other processes.

    The item may come from a stranger: arrays that declare more bytes than its files hold are not read.

    Args:
        path: the item.
        ids: the layers to read, all of which it has.

    Returns:
        `{layer id: nested dicts of NumPy arrays}`, which may be read-only.

    Raises:
        Exception: of any kind, if it is not an item that `join_parts` has written.
    """
    specs = item_specs(path)
    tree = {layer: parts if layer in ids else jax.tree.map(lambda spec: ..., parts) for layer, parts in specs.items()}
    read = unescape_names(read_tree(path, escape_names(tree), _handler(_ReadArrays())))
    return {layer: parts for layer, parts in read.items() if layer in ids}


def tree_specs(path: Path, handler: ocp.PyTreeCheckpointHandler | None = None) -> Any:
    """Return shapes and dtypes of the tree of any Orbax item, without reading an array.

    Args:
        path: the item.
        handler: reads the metadata; by default one that knows all types of leaves.

    Returns:
        The tree with `jax.ShapeDtypeStruct`s as leaves; leaves that are no arrays, such as strings, are `...`.

    Raises:
        Exception: of any kind, if it is not an Orbax item or its names are nested too deeply.
    """
    _check_arrays(path, _read_metadata(path))
    with _without_tracebacks():
        tree = (handler or _handler()).metadata(path.absolute()).tree
    return jax.tree.map(_spec, tree)


def read_tree(path: Path, specs: Any, handler: ocp.PyTreeCheckpointHandler | None = None) -> Any:
    """Read arrays of any Orbax item.

    Args:
        path: the item.
        specs: its tree as `tree_specs` returns it, with `...` in place of the arrays that are not needed.
        handler: as in `tree_specs`.

    Returns:
        The tree with NumPy arrays as leaves, and with `...` where `specs` has it.

    Raises:
        Exception: of any kind, if an array cannot be read.
    """
    if all(spec is ... for spec in jax.tree.leaves(specs)):
        return specs
    arguments = jax.tree.map(lambda spec: ocp.RestoreArgs(restore_type=np.ndarray), specs)
    with _without_tracebacks():
        return (handler or _handler()).restore(path.absolute(), args=ocp.args.PyTreeRestore(item=specs, restore_args=arguments))


def write_tree(path: Path, tree: Any) -> None:
    """Write a tree as an Orbax item that `ocp.StandardCheckpointer` restores, in place of the empty folder `path`.

    Raises:
        OSError: the disk is full, for example.
    """
    with _system_errors(path), _without_tracebacks():
        handler = ocp.StandardCheckpointHandler(multiprocessing_options=_alone())
        with ocp.Checkpointer(handler, multiprocessing_options=_alone()) as checkpointer:
            checkpointer.save(path.absolute(), args=ocp.args.StandardSave(tree), force=True)


def escape_names(tree: Any) -> Any:
    """Escape the keys of nested dicts, so that none has the dot with which Orbax joins them: `block.0` becomes `block%2E0`.

    Raises:
        TypeError: there is something else than dicts and arrays.
    """
    if isinstance(tree, dict):
        return {quote(key, safe=" ").replace(".", "%2E"): escape_names(value) for key, value in tree.items()}
    if tree is not ... and not isinstance(tree, np.ndarray | jax.ShapeDtypeStruct):
        raise TypeError(f"expected nested dicts of arrays, found {type(tree).__name__}")
    return tree


def unescape_names(tree: Any) -> Any:
    """Invert `escape_names`.

    Raises:
        ValueError: two keys become the same.
    """
    if not isinstance(tree, dict):
        return tree
    unescaped = {unquote(key): unescape_names(value) for key, value in tree.items()}
    if len(unescaped) < len(tree):
        raise ValueError(f"a name occurs twice among {', '.join(tree)}")
    return unescaped


@contextlib.contextmanager
def _system_errors(path: Path) -> Iterator[None]:
    """Raise the errors of Orbax and TensorStore, which are of many kinds, as `OSError`."""
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
    """Keep Orbax from logging the tracebacks of exceptions that it raises as well."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return not (record.exc_info and "orbax" in record.pathname)

    logger = logging.getLogger("absl")
    logger.addFilter(is_wanted)
    try:
        yield
    finally:
        logger.removeFilter(is_wanted)


def _compare(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Read the arrays of a store again, one at a time, and compare them with what was written.

    Raises:
        OSError: they differ or cannot be read.
    """
    try:
        store = ts.KvStore.open(_store_spec(path)).result()
        equal = all(store.read(_chunk_key(name, array)).result().value == array.tobytes() for name, array in arrays.items())
    except Exception as error:  # TensorStore raises errors of many kinds for missing files
        raise OSError(errno.EIO, f"its files were removed, or cannot be read again ({type(error).__name__})", str(path)) from error
    if not equal:
        raise OSError(errno.EIO, "its files are not what was written", str(path))


_DEEPEST = 64  # dicts in dicts; far more would overflow the stack of code that walks the tree
_ARRAYS = frozenset({"jax.Array", "np.ndarray", "scalar"})  # Orbax's names of the types of leaves that it stores as arrays
_MOST_METADATA = 2**26  # bytes of `_METADATA`, about 200 for each array
_INLINE = 1024  # bytes of an array that OCDBT may keep in its compressed index; larger arrays are stored as they are


def _read_metadata(path: Path) -> dict[str, Any]:
    """Read an item's metadata and check that no name leads out of its folder or is nested too deeply for code that walks the tree."""
    metadata = json.loads(files.read_bytes(path / "_METADATA", _MOST_METADATA))
    entries = metadata["tree_metadata"].values()
    if metadata.get("use_ocdbt") is None:  # written by an old Orbax
        metadata["use_ocdbt"] = (path / "manifest.ocdbt").exists()
    for entry in entries:
        if len(entry["key_metadata"]) > _DEEPEST:
            raise ValueError(f"expected at most {_DEEPEST} dicts in each other")
        if metadata["use_ocdbt"] is not True and any("/" in str(part["key"]) for part in entry["key_metadata"]):
            raise ValueError("expected names without '/' for arrays in folders of their own")
    return dict(metadata)


def _check_arrays(path: Path, metadata: Mapping[str, Any]) -> None:
    """Check that an item has the header of every array before Orbax reads them all at once.

    When one of Orbax's requests fails, TensorStore prints a traceback for each other one to standard error.
    """
    header = "zarr.json" if metadata.get("use_zarr3") else ".zarray"
    names = [
        ".".join(str(part["key"]) for part in entry["key_metadata"])
        for entry in metadata["tree_metadata"].values()
        if entry["value_metadata"]["value_type"] in _ARRAYS and not entry["value_metadata"].get("skip_deserialize")
    ]
    if metadata["use_ocdbt"]:
        keys = set(ts.KvStore.open(_store_spec(path)).result().list().result())
        missing = [name for name in names if f"{name}/{header}".encode() not in keys]
    else:
        missing = [name for name in names if not (path / name / header).is_file()]
    if missing:
        raise ValueError(f"the index lacks the array '{missing[0]}'")


def _spec(leaf: Any) -> Any:
    """Return shape and dtype of a leaf of Orbax's metadata; `...` for one that is not an array."""
    shape, dtype, storage = (getattr(leaf, name, None) for name in ("shape", "dtype", "storage"))
    if shape is None or dtype is None:
        return ...
    chunk = shape if storage is None or storage.chunk_shape is None else storage.chunk_shape
    if any(inner > max(size, 1) for inner, size in zip(chunk, shape, strict=True)):  # a chunk is unpacked as a whole
        raise ValueError(f"'{leaf.name}' has chunks of shape {list(chunk)}, larger than the array's, {list(shape)}")
    return jax.ShapeDtypeStruct(shape, dtype)


class _ReadArrays(ocp.type_handlers.NumpyHandler):  # type: ignore[misc] # Orbax has no types
    """Reads arrays, and waits for all of them before it raises the error of one.

    Orbax closes its event loop at the first error. Where one of TensorStore's requests ends later, its callback fails in a thread of
    TensorStore, and Python prints "Exception ignored in: None" and a traceback to standard error.
    """

    async def metadata(self, infos: Sequence[ocp.type_handlers.ParamInfo]) -> Sequence[Any]:
        one = super().metadata
        return await _all_first_items([one([info]) for info in infos])

    async def deserialize(
        self, infos: Sequence[ocp.type_handlers.ParamInfo], args: Sequence[ocp.RestoreArgs] | None = None
    ) -> Sequence[np.ndarray]:
        one = super().deserialize
        return await _all_first_items(
            [one([info], [arg]) for info, arg in zip(infos, args or [ocp.RestoreArgs()] * len(infos), strict=True)]
        )


async def _all_first_items(requests: Sequence[Coroutine[Any, Any, Sequence[Any]]]) -> list[Any]:
    """Wait for all requests, raise the first error, or else return the first item of each result."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [items[0] for items in results if not isinstance(items, BaseException)]


class _MoveStores(ocp.type_handlers.NumpyHandler):  # type: ignore[misc] # Orbax has no types
    """Moves the stores that processes have written into the item, where Orbax merges their indices.

    Orbax's own handler leaves out, silently, the arrays of any process but 0. One transaction for all arrays of a process costs a third of
    Orbax's way.
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
    """Write arrays as Orbax reads them: Zarr arrays of version 2, uncompressed and in one piece, in an OCDBT store."""
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
        "dtype": array.dtype.str if array.dtype.isbuiltin == 1 else ts.dtype(array.dtype).name,  # bfloat16 and similar go by name
        "order": "C",
        "fill_value": None,
        "filters": None,
        "compressor": None,
        "dimension_separator": ".",
    }


def _handler(numpy_handler: ocp.type_handlers.NumpyHandler | None = None) -> ocp.PyTreeCheckpointHandler:
    """Return Orbax's handler of trees for this process alone, which does not wait for others.

    Args:
        numpy_handler: reads or writes NumPy arrays, which are then the only leaves; None: all types of leaves can be read.
    """
    handlers = ocp.type_handlers
    if numpy_handler is None:
        kinds = [(kind, handlers.get_type_handler(kind)) for kind in handlers.supported_types()]
        kinds = [(kind, _ReadArrays() if kind is np.ndarray else handler) for kind, handler in kinds]
    else:
        kinds = [
            (np.ndarray, numpy_handler),
            (jax.Array, handlers.ArrayHandler()),
        ]  # the second is never used; Orbax warns where there is none
    types = handlers.create_type_handler_registry(*kinds)
    return ocp.PyTreeCheckpointHandler(multiprocessing_options=_alone(), type_handler_registry=types)


def _alone() -> ocp.options.MultiprocessingOptions:
    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(process, {process}, f"process-{process}")


# TensorStore passes the error of the system on as text only; older versions wrote `OS error 28`.
_OS_ERROR = re.compile(r"(?:os_error_code='|OS error )(\d+)")

_NO_LAYER = "%-"  # no layer has this name, for `escape_names` never returns it
