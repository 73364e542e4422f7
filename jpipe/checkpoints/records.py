"""What the JSON files of a checkpoint say, and whether its files are still what they say (train/checkpoint_files.py shows the folder)."""

import contextlib
import errno
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import pydantic

from jpipe import InputError, files

__all__ = [
    "MARKER",
    "Damaged",
    "describe",
]

FORMAT = "jpipe-checkpoint/1"
MARKER = "checkpoint.json"
ROWS = "metrics.jsonl"
_FAMILY = FORMAT.partition("/")[0] + "/"
_MOST_JSON = 2**23  # bytes of a marker or of `process-0.json`: plans and configs have limits below that, 10,000 files take 2 MB
_MOST_ROWS = 2**30  # bytes of `metrics.jsonl`: five million logged steps


class Damaged(InputError):
    """A checkpoint that is not what was written: the message names the file and what is wrong with it.

    Attributes:
        path: of the file or folder.
        found: what is wrong.
    """

    def __init__(self, path: Path, found: str) -> None:
        super().__init__(f"{path}: {found}; take another checkpoint")
        self.path, self.found = path, found


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class File(_Strict):
    """A file of an item as it was written."""

    size: int
    sha256: str


class Item(_Strict):
    """`process-0.json`: what one process wrote.

    Attributes:
        layers: their ids.
        files: by the path in the item's folder.
    """

    layers: list[str]
    files: dict[str, File]


class Marker(_Strict):
    """`checkpoint.json`: the checkpoint is complete.

    Attributes:
        format: `FORMAT`.
        step: batches that the weights have seen.
        processes: how many wrote an item.
        items: the SHA-256 of each `process-0.json`, by its name.
        rows: the SHA-256 of `metrics.jsonl`.
        facts: of the run; whatever JSON can say.
        sha256: of all the rest, however it is laid out; this rule holds for later formats too.
    """

    format: str
    step: int
    processes: int
    items: dict[str, str]
    rows: str
    facts: Any
    sha256: str


def marker_text(step: int, items: dict[str, str], rows: str, facts: Any) -> str:
    """The marker as JSON; the arguments are its fields."""
    data = {"format": FORMAT, "step": step, "processes": len(items), "items": items, "rows": rows, "facts": facts}
    return json.dumps(data | {"sha256": _digest(data)}, indent=1)


def read_marker(place: Path, step: int) -> Marker:
    """The marker of the checkpoint in the folder `place`.

    Raises:
        Damaged: it is missing, was changed, or is that of another step.
        InputError: a newer jpipe wrote it.
    """
    _refuse_link(place)
    path = place / MARKER
    if not path.exists():
        raise Damaged(place, f"has no {MARKER}, was not finished")
    data = _load(path, _read(path, _MOST_JSON))
    said = data.pop("sha256", None)
    if said != _digest(data):
        raise _changed(path)
    found = data.get("format")
    if isinstance(found, str) and found.startswith(_FAMILY) and found != FORMAT:
        raise InputError(f"{path}: expected the format {FORMAT}, found {found}; a newer jpipe wrote it: update jpipe")
    marker = _validated(path, Marker, data | {"sha256": said})
    names = {f"process-{process}.json" for process in range(len(marker.items))}
    if marker.format != FORMAT or marker.processes != len(names) or set(marker.items) != names:
        raise _foreign(path)
    if marker.step != step:
        raise Damaged(path, f"is the marker of step {marker.step}, not of {step} as the folder's name says")
    return marker


def read_items(place: Path, marker: Marker) -> dict[str, Item]:
    """What each process wrote, by the name of its item's folder: `process-0`.

    Raises:
        Damaged: a file that says so is missing or was changed.
    """
    items = {}
    for name, digest in sorted(marker.items.items()):
        path = place / name
        _refuse_link(path.with_suffix(""))
        items[path.stem] = _validated(path, Item, _load(path, _read_whole(path, digest, _MOST_JSON)))
    return items


def read_rows(place: Path, marker: Marker) -> bytes:
    """The rows of the run as they were when the checkpoint was completed.

    Raises:
        Damaged: their file is missing or was changed.
    """
    return _read_whole(place / ROWS, marker.rows, _MOST_ROWS)


def verify_item(folder: Path, item: Item, contents: bool = True) -> None:
    """Hold the files in an item's folder against what was written.

    Args:
        folder: the item's.
        item: what was written.
        contents: read them; or else only look for them and for their sizes.

    Raises:
        Damaged: one is missing, cut off or changed, or among them is something else than a file or folder, such as a FIFO.
        InputError: one may not be read.
    """
    for path in folder.rglob("*"):  # those that are not named, too: Orbax and TensorStore open what they find
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise Damaged(path, "is no regular file, was not written by jpipe")
    for name, file in item.files.items():
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts:
            raise Damaged(folder, f"names a file outside of itself, '{name}'")
        path = folder / inside
        with _reading(path):
            there = path.is_file()
        if not there:
            raise Damaged(path, "is missing")
        size = path.stat().st_size
        if size < file.size:
            raise Damaged(path, f"is cut off, {size:,} of {file.size:,} bytes are left")
        with _reading(path):
            same = size == file.size and (not contents or describe(path) == file)
        if not same:
            raise _changed(path)


def describe(path: Path) -> File:
    """Size and hash of a file.

    Raises:
        OSError: it cannot be read.
    """
    with files.open_to_read(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return File(size=file.tell(), sha256=sha256)


def _refuse_link(folder: Path) -> None:
    """What is behind a link can be changed by others, even after it was held against the hashes."""
    if folder.is_symlink():
        raise Damaged(folder, "is a symbolic link, not a folder that jpipe has written")


def _read(path: Path, most: int) -> bytes:
    if not path.is_file():
        raise Damaged(path, "is missing")
    if path.stat().st_size > most:
        raise Damaged(path, f"is larger than {most:,} bytes, was not written by jpipe")
    with _reading(path):
        return files.read_bytes(path, most)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A disk that has lost a file has damaged it; one that may not be read, or not now, is as good as it was."""
    try:
        yield
    except FileNotFoundError:
        raise Damaged(path, "is missing") from None
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENAMETOOLONG):  # no file has such a name, and so jpipe wrote none
            raise Damaged(path, f"cannot be read ({error.strerror})") from None
        raise InputError(f"{path}: cannot be read: {error.strerror}; make it readable, and try again") from None


def _read_whole(path: Path, digest: str, most: int) -> bytes:
    content = _read(path, most)
    if hashlib.sha256(content).hexdigest() != digest:
        raise _changed(path)
    return content


def _load(path: Path, content: bytes) -> dict[str, Any]:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise _changed(path)
    return data


_Model = TypeVar("_Model", bound=_Strict)


def _validated(path: Path, model: type[_Model], data: dict[str, Any]) -> _Model:
    try:
        return model.model_validate(data)
    except pydantic.ValidationError:
        raise _foreign(path) from None


def _changed(path: Path) -> Damaged:
    return Damaged(path, "is not what was written (cut off or changed)")


def _foreign(path: Path) -> Damaged:
    return Damaged(path, "has the hashes of a checkpoint, but was not written by jpipe")


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
