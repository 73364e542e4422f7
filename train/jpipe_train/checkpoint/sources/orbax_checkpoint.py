"""Begin a run with the parameters of any Orbax checkpoint, such as an `nnx.State`, Linen variables or a plain tree."""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jpipe import InputError
from jpipe.files import read_bytes, shown
from jpipe_train.checkpoint.sources.source import Names, Source, Spec

_TREE = "_METADATA"  # the file that makes a folder an Orbax item
_STEP = re.compile(r"(?:.*_)?(\d+)")
_MARKER = "checkpoint.json"
_MOST_INDEX = 2**26  # the largest file, in bytes, that goes into the digest with its content


def is_meant(path: Path) -> bool:
    """Return whether a folder is an Orbax item, a step with items, or a folder of such steps; a run folder is none of these."""
    return bool(_items(path) or _steps(path))


def source(path: Path) -> Source:
    """Open an Orbax checkpoint, to read its arrays later.

    If the tree has the key `params`, as Linen variables do, only the part below it is used. The last part of a name is left out if it is
    `value` everywhere, as in an `nnx.State`. The path is an item; a step with a single item, or with an item `params`; or a folder of
    steps, where the newest is used. Raise InputError if it is none of these, or its metadata cannot be read.
    """
    item = _find(path)
    where = f"warm_start.file: '{shown(item)}'"
    from jpipe.checkpoints.orbax_item import read_tree, tree_specs

    for file in item.rglob("*"):
        if file.is_symlink() or not (file.is_file() or file.is_dir()):
            raise InputError(
                where=where, expected="files and folders", found=f"'{file.relative_to(item)}', which is neither", change="remove it"
            )
    try:
        tree = tree_specs(item)
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        names = _names([jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in leaves])
        specs = {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True) if name is not None and leaf is not ...}
    except Exception as error:  # Orbax and TensorStore raise errors of many kinds
        raise _unreadable(where, error) from None

    def read(wanted: Names) -> Iterator[dict[str, Any]]:
        for inner in wanted.values():
            selected = [specs[name] if name is not None and name in inner else ... for name in names]
            try:
                arrays = jax.tree.leaves(read_tree(item, jax.tree.unflatten(structure, selected)))
            except Exception as error:
                raise _unreadable(where, error) from None
            yield {name: array for name, array in zip(names, arrays, strict=True) if name is not None and name in inner}

    return Source(where, {name: Spec(spec.shape, str(spec.dtype)) for name, spec in specs.items()}, read, lambda: _digest(item))


def _names(paths: list[str]) -> list[str | None]:
    """Return parameter names by leaf path, with None for a leaf that is not a parameter."""
    if any(path.startswith("params/") for path in paths):
        inside = [path.removeprefix("params/") if path.startswith("params/") else None for path in paths]
    else:
        inside = list(paths)
    if all(path is None or path.endswith("/value") for path in inside):
        return [path and path.removesuffix("/value") for path in inside]
    return inside


def _find(path: Path) -> Path:
    if (path / _MARKER).is_file():
        raise InputError(
            where="warm_start.file",
            key=f"'{shown(path)}'",
            expected="the folder of the run",
            found="one of its checkpoints",
            change="give that folder",
        )
    if (path / _TREE).is_file():
        return path
    items = {inner.name: inner for inner in _items(path)}
    if steps := _steps(path):
        return _find(steps[max(steps)])
    if len(items) > 1 and "params" not in items:
        names = ", ".join(sorted(items))
        raise InputError(
            where="warm_start.file",
            key=f"'{shown(path)}'",
            expected="a single item, or an item called params",
            found=names,
            change="give the folder of an item",
        )
    return items["params"] if "params" in items else next(iter(items.values()))


def _items(path: Path) -> list[Path]:
    try:
        return [inner for inner in (path, *(path / name for name in os.listdir(path))) if (inner / _TREE).is_file()]
    except OSError:
        return []


def _steps(path: Path) -> Mapping[int, Path]:
    """Return the step folders in a folder, by number."""
    try:
        names = {int(match[1]): path / name for name in os.listdir(path) if (match := _STEP.fullmatch(name))}
    except OSError:
        return {}
    return {step: inner for step, inner in names.items() if _items(inner)}


def _digest(item: Path) -> str:
    """Hash the names and sizes of the files, and the indices, which differ between any two checkpoints."""
    total = hashlib.sha256()
    for file in sorted(file for file in item.rglob("*") if file.is_file()):
        total.update(f"{file.relative_to(item)} {file.stat().st_size} ".encode())
        if file.name in (_TREE, "manifest.ocdbt"):
            total.update(read_bytes(file, _MOST_INDEX))
    return total.hexdigest()


def _unreadable(where: str, error: Exception) -> InputError:
    text = (str(error).splitlines() or [""])[0].partition(" [tensorstore_spec")[0][:200]
    return InputError(where=where, expected="an Orbax checkpoint", found=f"one that cannot be read ({type(error).__name__}: {text})")
