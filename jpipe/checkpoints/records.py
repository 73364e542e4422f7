"""The JSON files of a checkpoint, which record the sizes and hashes of its other files, and their comparison.

`jpipe.checkpoints.writing` shows the folder.
"""

import contextlib
import errno
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import pydantic

from jpipe import InputError
from jpipe.checkpoints.orbax_item import ITEM
from jpipe.files import open_to_read, read_bytes

__all__ = [
    "MARKER",
    "Damaged",
    "describe",
]

FORMAT_1, FORMAT = "jpipe-checkpoint/1", "jpipe-checkpoint/2"
MARKER = "checkpoint.json"
ROWS = "metrics.jsonl"
_FAMILY = "jpipe-checkpoint/"
_MOST_JSON = 2**23  # the most bytes of a marker or of `process-0.json`: plans and configs have lower limits, and 10,000 files take 2 MB
_MOST_ROWS = 2**30  # the most bytes of `metrics.jsonl`, for five million logged steps


class Damaged(InputError):
    """A checkpoint does not have the content that was written.

    Attributes:
        path: the path of the damaged file or folder.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(what, where=str(path), change="restore another checkpoint")
        self.path = path


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class File(_Strict):
    """The size and the SHA-256 hash of a file when it was written."""

    size: int
    sha256: str


class ProcessRecord(_Strict):
    """The content of `process-0.json`: what one process has written."""

    layers: list[str]  # the ids of the layers that it has written
    files: dict[str, File]  # the size and hash of each file that it has written, by the path inside the folder of the step


class Marker(_Strict):
    """The content of `checkpoint.json`, the file that makes a checkpoint complete."""

    format: str  # `FORMAT`
    step: int  # the number of batches that the weights have seen
    processes: int  # the number of processes that wrote a part
    items: dict[str, str]  # the SHA-256 hash of the record of each process, by the name of its file, such as `process-0.json`
    index: dict[str, File]  # the files of the item that belong to no single process, by their paths inside the folder of the step
    rows: str  # the SHA-256 hash of `metrics.jsonl`
    facts: Any  # the facts of the run that were passed to `save`, of any JSON types
    sha256: str  # the SHA-256 hash of the other fields, independent of the layout of the JSON text, in later formats as well


def marker_text(step: int, items: dict[str, str], rows: str, facts: Any, index: dict[str, File]) -> str:
    """Return the marker as JSON; the arguments are its fields."""
    data = {"format": FORMAT, "step": step, "processes": len(items), "items": items, "rows": rows, "facts": facts}
    data["index"] = {name: file.model_dump() for name, file in index.items()}
    return json.dumps(data | {"sha256": _digest(data)}, indent=1)


def read_marker(folder: Path, step: int) -> Marker:
    """Read the marker in the folder of a step.

    Raises:
        Damaged: the marker is missing, was changed, or belongs to another step.
        InputError: the checkpoint has another format.
    """
    _reject_link(folder)
    path = folder / MARKER
    if not path.exists():
        raise Damaged(folder, f"has no {MARKER}, was not finished")
    data = _load(path, _read(path, _MOST_JSON))
    digest = data.pop("sha256", None)
    if digest != _digest(data):
        raise _changed(path)
    written = data.get("format")
    if isinstance(written, str) and written.startswith(_FAMILY) and written != FORMAT:
        raise of_other_format(path, written)
    marker = _validated(path, Marker, data | {"sha256": digest})
    names = {f"process-{process}.json" for process in range(len(marker.items))}
    if marker.format != FORMAT or marker.processes != len(names) or set(marker.items) != names:
        raise _foreign(path)
    if marker.step != step:
        raise Damaged(path, f"is the marker of step {marker.step}, but the folder's name is {step}")
    return marker


def of_other_format(path: Path, found: str) -> InputError:
    """Return the error for a checkpoint that another version of jpipe wrote in another format."""
    hint = "version 0.4 reads it, and saves it in the new format" if found == FORMAT_1 else "a newer jpipe wrote it: update jpipe"
    return InputError(where=path, expected=f"the format {FORMAT}", found=found, change=hint)


def read_parts(folder: Path, marker: Marker) -> list[ProcessRecord]:
    """Return for each process its layers and the files that are needed to read these.

    Raise Damaged if a record is missing or was changed, or names a file outside of the folder.
    """
    _reject_link(folder / ITEM)
    parts = []
    for name, digest in sorted(marker.items.items()):
        path = folder / name
        part = _validated(path, ProcessRecord, _load(path, _read_whole(path, digest, _MOST_JSON)))
        files = marker.index | part.files
        for file in map(PurePosixPath, files):
            if file.is_absolute() or ".." in file.parts:
                raise Damaged(folder, f"names a file outside its folder, '{file}'")
        parts.append(ProcessRecord(layers=part.layers, files=files))
    return parts


def read_rows(folder: Path, marker: Marker) -> bytes:
    """Read the rows that the run had when the checkpoint was completed. Raise Damaged if the file of the rows is missing or was changed."""
    return _read_whole(folder / ROWS, marker.rows, _MOST_ROWS)


def verify_files(item: Path, files: Mapping[Path, File], contents: bool = True) -> None:
    """Check files of an Orbax item, and beside it, against their sizes and, with `contents`, by reading them against their hashes.

    Raises:
        Damaged: a file is missing, cut off or changed, or the item has something that is neither a file nor a folder, such as a FIFO.
        InputError: a file may not be read.
    """
    for path in item.rglob("*"):  # including files without a record, because Orbax and TensorStore open all files
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise Damaged(path, "is no regular file, was not written by jpipe")
    for path, file in files.items():
        with _reading(path):
            exists = path.is_file() and not path.is_symlink()
        if not exists:
            raise Damaged(path, "is missing")
        size = path.stat().st_size
        if size < file.size:
            raise Damaged(path, f"is cut off, {size:,} of {file.size:,} bytes are left")
        with _reading(path):
            equal = size == file.size and (not contents or describe(path) == file)
        if not equal:
            raise _changed(path)


def files_in(folder: Path, parts: Iterable[ProcessRecord]) -> dict[Path, File]:
    """Return the sizes and hashes of the files of these parts, by path; `folder` is the folder of the step."""
    return {folder / name: file for part in parts for name, file in part.files.items()}


def describe(path: Path) -> File:
    """Return the size and hash of a file. Raise OSError if the file cannot be read."""
    with open_to_read(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return File(size=file.tell(), sha256=sha256)


def _reject_link(folder: Path) -> None:
    """Raise `Damaged` if `folder` is a symbolic link: its target could be replaced after the hashes are compared."""
    if folder.is_symlink():
        raise Damaged(folder, "is a symbolic link, not a folder that jpipe has written")


def _read(path: Path, most: int) -> bytes:
    if not path.is_file():
        raise Damaged(path, "is missing")
    if path.stat().st_size > most:
        raise Damaged(path, f"is larger than {most:,} bytes, was not written by jpipe")
    with _reading(path):
        return read_bytes(path, most)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise `Damaged` if the disk has lost the file, and `InputError` if the file cannot be read now."""
    try:
        yield
    except FileNotFoundError:
        raise Damaged(path, "is missing") from None
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENAMETOOLONG):  # a lost sector, or a name too long for any file that jpipe wrote
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
    return Damaged(path, "has the right hashes, but was not written by jpipe")


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
