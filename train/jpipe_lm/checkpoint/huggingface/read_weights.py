"""Read folders in Hugging Face's layout as sources of parameters by jpipe's names, one layer at a time."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jpipe import InputError
from jpipe.errors import short
from jpipe.files import shown
from jpipe_lm.checkpoint.huggingface.folder import Folder, look_into
from jpipe_lm.checkpoint.huggingface.names import Layout, Row, layout
from jpipe_lm.config.huggingface import read_config
from jpipe_train.checkpoint.sources.source import FLOATS, Names, Source, Spec

_SHOWN = 5  # number of tensors that a message lists
_LONGEST = 80  # letters of each of their names


_PARTIAL = "with warm_start.mode=partial all matching tensors are used"


def source(path: Path, *, head: str = "language", strict: bool = True, named_by: str = "warm_start.file", hint: str = _PARTIAL) -> Source:
    """Open a folder in Hugging Face's layout for a model with this head.

    A head other than `language` may begin with a language model: it uses the parameters that both have, such as the pooler; its other
    parameters are optional. Without `strict`, missing tensors, additional ones and other shapes are left out; with it they are
    errors, and `hint` says what the user can change. Raise InputError also if the folder cannot be read, or jpipe does not have its model.
    """
    described = read_config.read(path)
    names = layout(described)
    folder = look_into(path)
    where = f"{named_by}: '{shown(path)}'"
    known = _known(folder, names)
    if strict:
        _check(folder, names, known, where, hint)
    starts = names.optional
    if head != "language" and "head" not in described.keys:
        names = layout(described._replace(keys=described.keys | {"head": "regression"}))  # its layout has the names of every head
        starts = tuple(name for row in names.rows["head"] for name in row.theirs)
    rows = {ours: row for row in names if _has_tensors(folder, known, row) for ours in row.shapes}
    specs = {
        ours: Spec(row.shapes[ours], _dtype([folder.tensors[known[name]][1].dtype for name in row.theirs])) for ours, row in rows.items()
    }

    def read(wanted: Names) -> Iterator[dict[str, Any]]:
        for inner in wanted.values():
            distinct = {id(rows[name]): rows[name] for name in inner}.values()
            arrays = {name: array for row in distinct for name, array in _arrays(folder, names, known, row).items()}
            yield {name: arrays[name] for name in inner}

    optional = frozenset(ours for row in names if all(name.startswith(starts) for name in row.theirs) for ours in row.shapes)
    return Source(where, specs, read, folder.digest, converts=True, optional=optional)


def _known(folder: Folder, names: Layout) -> dict[str, str]:
    """Return a dict from names in the table to names in the folder, without constants."""
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


def _check(folder: Folder, names: Layout, known: dict[str, str], where: str, hint: str) -> None:
    """Check that the folder has the tensors of the model, with their shapes, and no others."""
    actual = {name: folder.tensors[name_in_folder][1].shape for name, name_in_folder in known.items()}
    expected = names.theirs
    missing = [name for name in expected if name not in actual]
    if not any(name.startswith(names.optional) for name in actual):
        missing = [name for name in missing if not name.startswith(names.optional)]
    unexpected = [name for name in actual if name not in expected and name not in names.copies]
    shapes = [name for name in expected if name in actual and actual[name] != expected[name]]
    problems = {
        ("is missing", "are missing"): missing,
        ("is not of this model", "are not of this model"): [
            name if len(name) <= _LONGEST else short(name) for name in map(known.__getitem__, unexpected)
        ],
        ("has another shape", "have another shape"): [
            f"{known[name]} ({_shape(actual[name])}, not {_shape(expected[name])})" for name in shapes
        ],
    }
    words = [f"{len(some)} {one if len(some) == 1 else many}: {_listed(some)}" for (one, many), some in problems.items() if some]
    if words:
        raise InputError(
            where=where,
            expected=f"the {len(expected)} tensors of the model in {read_config.CONFIG}",
            found=f"that {'; '.join(words)}",
            change=hint,
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")


def _shape(shape: Iterable[int]) -> str:
    return str(list(shape))


def _dtype(dtypes: list[str]) -> str:
    """Return the dtype of a parameter that is made of tensors of these dtypes; a dtype other than a float takes precedence."""
    return next((dtype for dtype in dtypes if dtype not in FLOATS.values()), dtypes[0])


def _has_tensors(folder: Folder, known: dict[str, str], row: Row) -> bool:
    return all(name in known and folder.tensors[known[name]][1].shape == shape for name, shape in row.theirs.items())


def _arrays(folder: Folder, names: Layout, known: dict[str, str], row: Row) -> dict[str, np.ndarray]:
    """Read the parameters of a row; check that any copies of its tensors in the folder are equal."""
    inside = [known[name] for name in row.theirs]
    tensors = folder.read(inside)
    for copy, original in names.copies.items():
        if original in row.theirs and copy in known:
            other = folder.read([known[copy]])[known[copy]]
            if not _same(other, tensors[known[original]]):
                raise InputError(
                    f"{shown(folder.path)}: expected {known[copy]} to be the same as {known[original]}, for {read_config.CONFIG} says that "
                    "they are tied (tie_word_embeddings), found other values; correct one of them"
                )
    return row.joined({name: tensors[known[name]] for name in row.theirs})


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Return whether two arrays are equal, bit for bit."""
    return (one.shape, one.dtype) == (other.shape, other.dtype) and np.array_equal(
        one.reshape(-1).view(np.uint8), other.reshape(-1).view(np.uint8)
    )
