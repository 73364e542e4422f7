"""A folder in Hugging Face's layout as a source of parameters by jpipe's names, read a layer at a time."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jpipe import InputError
from jpipe.errors import short
from jpipe.files import shown
from jpipe_train.checkpoint.huggingface.folder import Folder, look_into
from jpipe_train.checkpoint.huggingface.names import Layout, Row, layout
from jpipe_train.checkpoint.source import FLOATS, Names, Source, Spec
from jpipe_train.config import huggingface

_SHOWN = 5  # tensors that are named
_LONGEST = 80  # letters of the name of one


def source(path: Path, *, strict: bool = True) -> Source:
    """What is in the folder.

    Args:
        path: of the folder.
        strict: refuse if a tensor of the model is missing, or there is another one, or one of another shape; or else it is left out.

    Raises:
        InputError: as `strict` says; a folder that cannot be read, or whose model is none of jpipe's.
    """
    names = layout(huggingface.read(path))
    folder = look_into(path)
    where = f"warm_start.file: '{shown(path)}'"
    known = _known(folder, names)
    if strict:
        _check(folder, names, known, where)
    rows = {row.ours: row for row in names if _is_there(folder, known, row)}
    specs = {ours: Spec(row.shape, _dtype([folder.tensors[known[name]][1].dtype for name in row.theirs])) for ours, row in rows.items()}

    def read(wanted: Names) -> Iterator[dict[str, Any]]:
        for inner in wanted.values():
            yield {name: _array(folder, names, known, rows[name]) for name in inner}

    optional = frozenset(row.ours for row in names if row.theirs[0].startswith(names.optional))
    return Source(where, specs, read, folder.digest, converts=True, optional=optional)


def _known(folder: Folder, names: Layout) -> dict[str, str]:
    """By the name in the table the name in the folder; buffers are left out."""
    known: dict[str, str] = {}
    for name in folder.tensors:
        if (newest := names.known_as(name)) is None:
            continue
        if newest in known:
            raise InputError(f"{shown(folder.path)}: both '{known[newest]}' and '{name}' are {newest}; remove one of them")
        known[newest] = name
    for copy, original in names.copies.items():
        if copy in known and original not in known:
            known[original] = known.pop(copy)
    return known


def _check(folder: Folder, names: Layout, known: dict[str, str], where: str) -> None:
    there = {name: folder.tensors[inside][1].shape for name, inside in known.items()}
    expected = names.theirs
    lacking = [name for name in expected if name not in there]
    if not any(name.startswith(names.optional) for name in there):
        lacking = [name for name in lacking if not name.startswith(names.optional)]
    others = [name for name in there if name not in expected and name not in names.copies]
    shapes = [name for name in expected if name in there and there[name] != expected[name]]
    told = {
        ("is missing", "are missing"): lacking,
        ("is not of this model", "are not of this model"): [_name(known[name]) for name in others],
        ("has another shape", "have another shape"): [
            f"{known[name]} ({_shape(there[name])}, not {_shape(expected[name])})" for name in shapes
        ],
    }
    words = [f"{len(found)} {one if len(found) == 1 else many}: {_listed(found)}" for (one, many), found in told.items() if found]
    if words:
        raise InputError(
            f"{where}: expected the {len(expected)} tensors of the model in {huggingface.CONFIG}, found that {'; '.join(words)}; "
            "with warm_start.mode=partial what fits is taken"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _name(name: str) -> str:
    """Of a tensor, as a stranger calls it."""
    return name if len(name) <= _LONGEST else short(name)


def _shape(shape: Iterable[int]) -> str:
    return str(list(shape))


def _dtype(dtypes: list[str]) -> str:
    """Of a parameter that is made of tensors of these: one that is no float, if there is any."""
    return next((dtype for dtype in dtypes if dtype not in FLOATS.values()), dtypes[0])


def _is_there(folder: Folder, known: dict[str, str], row: Row) -> bool:
    return all(name in known and folder.tensors[known[name]][1].shape == shape for name, shape in zip(row.theirs, row.shapes, strict=True))


def _array(folder: Folder, names: Layout, known: dict[str, str], row: Row) -> np.ndarray:
    """One parameter, after its copies, if there are any, are found to be the same."""
    inside = [known[name] for name in row.theirs]
    tensors = folder.read(inside)
    for copy, original in names.copies.items():
        if original in row.theirs and copy in known:
            other = folder.read([known[copy]])[known[copy]]
            if not _same(other, tensors[known[original]]):
                raise InputError(
                    f"{shown(folder.path)}: expected {known[copy]} to be the same as {known[original]}, for {huggingface.CONFIG} says that "
                    "they are tied (tie_word_embeddings), found other values; correct one of them"
                )
    return row.joined([tensors[name] for name in inside])


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether they are the same, bit for bit."""
    alike = (one.shape, one.dtype) == (other.shape, other.dtype)
    return alike and np.array_equal(one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8))
