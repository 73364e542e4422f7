"""Find the data files at a path, in a fixed order, and split them into training and validation files."""

import functools
import glob
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from jpipe import InputError
from jpipe.errors import shortened
from jpipe_train.config.data_section import DataSection
from jpipe_train.data.files import arrow, saved_datasets, streams
from jpipe_train.data.files.kinds import kind_of, rows_in
from jpipe_train.registry import located


def named(path: str | None) -> str:
    """Describe a path for messages; None means the source code of the standard library."""
    return f"'{path}'" if path is not None else "the standard library's source"


@contextmanager
def readable(where: str = "data.path") -> Iterator[None]:
    """Convert an OSError about an unreadable file into an InputError. Raise InputError if a file cannot be read."""
    try:
        yield
    except OSError as error:
        what = "a file" if error.filename is None else f"'{error.filename}'"  # the error of a failing disk has no file name
        raise InputError(f"cannot read {what}: {error.strerror}", where=where, change="give files that can be read") from None


def guess(file: Path) -> str:
    """Return the end of a message that a file is not UTF-8 text: the kind of file that it seems to be, or "" if unknown."""
    kind = kind_of(file)
    return "" if kind is None or kind.is_unpacked else f" (it seems to be {kind.name})"


def validation_names(names: Sequence[str], fraction: float) -> frozenset[str]:
    """Choose the validation files among at least two files: the files with hashed names below `fraction`.

    So a choice does not depend on the other files. At least one file is chosen, but never all.
    """
    rank = {name: place_of(os.fsencode(name)) for name in names}
    ordered = sorted(rank, key=lambda name: rank[name])
    held_out = sum(rank[name] < fraction for name in rank)
    return frozenset(ordered[: min(max(held_out, 1), len(ordered) - 1)])


def place_of(name: bytes) -> float:
    """Hash bytes to a number that is uniform in [0, 1)."""
    return int.from_bytes(hashlib.sha256(name).digest()[:8]) / 2**64


def find_files(path: str | None, where: str = "data.path", content: str = "text") -> tuple[list[str], list[Path]]:
    """Return the names and the paths of the files to read, in a fixed order.

    The path is a file, a folder or a glob; None means the source code of the standard library. The names are relative to the searched
    folder. They decide the split into training and validation files. Raise InputError if the path does not exist, or has no regular file.
    """
    if path is None:
        return _ordered(_walk(Path(sysconfig.get_path("stdlib")), suffix=".py", leave_out=_NOT_LIBRARY, links=False))
    root = located(path, where)
    if root.is_dir():
        names, files = _in_folder(path, root, where)
    elif root.exists():
        names, files = [root.name], [root] if root.is_file() else []
    elif glob.has_magic(path):
        names, files = _match(str(root))
    else:
        raise InputError(f"'{path}' does not exist", where=where, change="give a file, a folder or a glob")
    if not files:
        links = ", without links to folders, which are not followed" if root.is_dir() and any(map(Path.is_symlink, root.iterdir())) else ""
        raise InputError(
            f"found no regular file at '{path}'{links}, so 0 bytes",
            where=where,
            change=f"give a file, a folder or a glob that holds {content}",
        )
    return names, files


def left_out_of(data: DataSection, path: str | None = None) -> tuple[str, ...]:
    """Return the result of `left_out` for the paths of a section, or for another path."""
    return left_out(data.path, data.validation_path) if path is None else left_out(path)


def left_out(*paths: str | None) -> tuple[str, ...]:
    """Return a line for each folder with files that `find_files` leaves out because they only describe the data."""
    lines = []
    for path in paths:
        root = None if path is None else located(path, "data.path")
        if root is None or not root.is_dir() or saved_datasets.is_saved(root):
            continue
        with readable():
            names = sorted(_beside(_walk(root)))
        if names:
            lines.append(f"left out of {named(path)}, which has files with rows: {shortened(names)}")
    return tuple(lines)


def with_validation(path: str | None, where: str) -> tuple[str | None, str | None]:
    """Return the paths of the training and the validation split of a folder; without splits, `path` and None.

    A folder has splits if it is a saved `DatasetDict`, or if its files are named after splits, such as `train-00000-of-00002.parquet`. The
    path is as in `find_files`; the validation split may be None. Raise InputError if a `DatasetDict` has no split `train`.
    """
    root = None if path is None else located(path, where)
    if root is None or not root.is_dir():
        return path, None
    splits = {name: str(folder) for name, folder in saved_datasets.splits(root, where).items()}
    if splits and "train" not in splits:
        raise InputError(
            where=where, expected=f"a split 'train' in '{path}'", found=shortened(list(splits)), change=f"name one, such as '{path}/test'"
        )
    if not splits:
        with readable(where):
            named = {match[1] for name in _walk(root) if (match := _OF_SPLIT.fullmatch(Path(name).name))}
        splits = {name: f"{glob.escape(str(root))}/**/{name}[-.]*" for name in named} if "train" in named else {}
    return splits.get("train", path), next((splits[name] for name in saved_datasets.VALIDATION if name in splits), None)


class DataPath(NamedTuple):
    """The data at a path. A share of them, or all, are held out for validation."""

    path: str | None  # a file, a folder or a glob
    share: float  # the share to hold out for validation; 1 means all data
    where: str  # the config key that names the path, for messages


def parts_of(data: DataSection, path: str | None = None) -> list[DataPath]:
    """Return the paths to read, and the share of each that is held out: the data at another `path` are all held out.

    If a folder has splits, the validation split is used.
    """
    if path is not None:
        return [DataPath(path, 1.0, "data.path")]
    with readable():
        train, validation = with_validation(data.path, "data.path")
    if data.validation_path is not None:
        with readable("data.validation_path"):
            own, split = with_validation(data.validation_path, "data.validation_path")
        return [DataPath(train, 0.0, "data.path"), DataPath(split or own, 1.0, "data.validation_path")]
    if validation is not None:
        return [DataPath(train, 0.0, "data.path"), DataPath(validation, 1.0, "data.path")]
    return [DataPath(train, data.validation_fraction, "data.path")]


def check_rows(data: DataSection, path: str | None = None) -> None:
    """Check that the files with rows, or those at another path, exist, and that the library to read them is installed.

    No rows are read.
    """
    for file, _, where in parts_of(data, path):
        with readable(where):
            _, files = find_files(file, where, content=data.content)
            if (kind := rows_in(files[0])) is not None and kind.reader in arrow.NAMES:
                streams.pyarrow(files[0], arrow.NAMES[kind.reader])


def _in_folder(path: str, root: Path, where: str) -> tuple[list[str], list[Path]]:
    """Return the names and paths of the files in a folder. For a saved dataset, return only the files with its rows, in their order."""
    if splits := saved_datasets.splits(root, where):
        raise InputError(
            f"'{path}' has the splits {shortened(list(splits))}",
            where=where,
            change=f"name one of them, such as '{root / next(iter(splits))}'",
        )
    if (saved := saved_datasets.files(root, where)) is not None:
        return [file.name for file in saved], saved
    found = _walk(root)
    beside = _beside(found)
    return _ordered({name: file for name, file in found.items() if name not in beside})


_OF_SPLIT = re.compile(r"(train|validation|valid|val|dev|test)[-.].*(?:parquet|arrow|feather|jsonl?|ndjson|csv|tsv)(?:\.gz|\.zst)?")
"""A pattern for names of files with the rows of a split, as on the Hugging Face Hub."""
_ROWS = re.compile(r".*\.(?:parquet|arrow|feather|jsonl|ndjson|csv|tsv)(?:\.gz|\.zst)?")
_ABOUT = frozenset({"README.md", "LICENSE", "LICENSE.md", "LICENSE.txt", "dataset_info.json", "dataset_infos.json", "state.json"})
"""Names of files about a dataset. They are left out if the folder has files with rows."""
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def _beside(found: Mapping[str, Path]) -> frozenset[str]:
    """Return the names of files that only describe a dataset, if there are files with rows.

    Files with rows are recognized by their endings; a `.json` file has rows if it contains JSON lines.
    """
    about = frozenset(name for name, file in found.items() if file.name in _ABOUT)
    if not about:
        return about
    have_rows = any(_ROWS.fullmatch(name) for name in found) or any(
        file.suffix == ".json" and (kind := kind_of(file)) is not None and kind.reader is not None
        for name, file in found.items()
        if name not in about
    )
    return about if have_rows else frozenset()


def _walk(root: Path, suffix: str = "", leave_out: frozenset[str] = frozenset(), *, links: bool = True) -> dict[str, Path]:
    """Find all regular files under `root`, except hidden files. Links to files are followed with `links`; links to folders never are."""
    files = {}
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if name not in leave_out and not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and file.is_file() and (links or not file.is_symlink()):
                files[file.relative_to(root).as_posix()] = file
    return files


def _ordered(found: Mapping[str, Path]) -> tuple[list[str], list[Path]]:
    """Sort files by name, each file once: under its own name, or else under the link to it with the shortest path."""
    real = functools.cache(os.path.realpath)
    first: dict[str, str] = {}
    for is_link, _, name in sorted((file.is_symlink(), len(file.parts), name) for name, file in found.items()):
        file = found[name]
        first.setdefault(real(file) if is_link else os.path.join(real(file.parent), file.name), name)
    names = sorted(first.values())
    return names, [found[name] for name in names]


def _raise(error: OSError) -> None:
    raise error


def _match(pattern: str) -> tuple[list[str], list[Path]]:
    """Return each matching regular file once. Names are relative to the part of the pattern before the first wildcard."""
    parts = Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    files = {Path(match).relative_to(root).as_posix(): Path(match) for match in glob.glob(pattern, recursive=True) if Path(match).is_file()}
    return _ordered(files)
