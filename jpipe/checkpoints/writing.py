"""Write a checkpoint in parts, one for each process, and complete it with a marker.

A checkpoint of the run in folder RUN, after 40 batches and by two processes, is the folder RUN/checkpoints/40:

    default/                          one Orbax item with the layers of all processes (jpipe/checkpoints/orbax_item.py)
    _CHECKPOINT_METADATA              tells Orbax how to restore the item
    process-0.json  process-1.json    the layers of each process, and the size and SHA-256 hash of each of its files
    metrics.jsonl                     the run's rows up to this batch
    checkpoint.json                   the marker, written last: the hashes of the other files and of itself, and the run's facts

The processes write their parts into RUN/checkpoints/40.orbax-checkpoint-tmp; process 0 joins them and renames the folder at the end.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from jpipe.checkpoints.folders import COMPLETE, STEP_METADATA, publish, remove_part, unfinished_folder
from jpipe.checkpoints.orbax_item import ITEM, Tree, join_parts, step_metadata, write_part
from jpipe.checkpoints.records import MARKER, ROWS, Damaged, File, ProcessRecord, describe, files_in, marker_text, verify_files
from jpipe.files import make_folder, to_disk, write_atomically


def write_layers(folder: Path, step: int, layers: Mapping[str, Tree], process: int) -> None:
    """Write one process's part of a checkpoint. If writing fails, nothing is left of the part.

    `step` is the number of batches that the weights have seen, and `layers` are nested dicts of arrays, on devices or as NumPy arrays. On
    CPUs the copies for writing may share the memory of JAX's arrays, so the caller must copy arrays that are donated later. Raise OSError
    if the disk is full, for example.
    """
    place = unfinished_folder(folder, step)
    make_folder(place.parent)
    make_folder(place)
    remove_part(place, process)
    try:
        path = place / f"process-{process}"
        written = write_part(path, layers, process)
        files = {f"{ITEM}/{file.relative_to(path).as_posix()}": describe(file) for file in written}
        folders = [inner for inner in path.rglob("*") if inner.is_dir()]
        for inner in (*written, *folders, path, place, place.parent, folder):  # TensorStore does not sync, so the system would write later
            to_disk(inner)
        part = ProcessRecord(layers=list(layers), files=files)
        write_atomically(place / f"process-{process}.json", part.model_dump_json(indent=1))
    except BaseException:
        remove_part(place, process)
        raise


def await_parts(folder: Path, step: int, processes: Collection[int], limit: float) -> None:
    """Wait until these processes have written their parts into the shared folder, at most `limit` seconds. Process 0 calls this.

    Raise TimeoutError if parts are missing then; the message names their processes.
    """
    place, end = unfinished_folder(folder, step), time.monotonic() + limit
    while missing := [name for process in processes if not (place / (name := f"process-{process}.json")).exists()]:
        if time.monotonic() > end:
            raise TimeoutError(f"{place}: waited {limit:g} s for {', '.join(missing)}")
        time.sleep(0.02)


def complete(folder: Path, step: int, processes: int, facts: Any, rows: bytes = b"") -> None:
    """Join the parts of all processes, write the marker and give the checkpoint its name. Process 0 calls this.

    `facts` is anything of JSON types, for `Checkpoint.facts`; `rows` of the run's metrics may go beyond the step.
    Raise OSError if the disk is full, for example, or files that were written have vanished.
    """
    place, names = unfinished_folder(folder, step), [f"process-{process}.json" for process in range(processes)]
    parts = [_read_part(place, name) for name in names]
    new = place / COMPLETE
    shutil.rmtree(new, ignore_errors=True)  # left by an earlier attempt
    make_folder(new)
    join_parts(new / ITEM, [place / name.removesuffix(".json") for name in names])
    write_atomically(new / STEP_METADATA, step_metadata())
    written = files_in(new, parts)
    with _vanished():
        verify_files(new / ITEM, written, contents=False)
    remaining = [path for path in new.rglob("*") if path.is_dir() or path not in written]
    index = {path.relative_to(new).as_posix(): describe(path) for path in sorted(remaining) if path.is_file()}
    for path in remaining:
        to_disk(path)
    for name in names:
        os.replace(place / name, new / name)
    digests = {name: hashlib.sha256((new / name).read_bytes()).hexdigest() for name in names}
    write_atomically(new / ROWS, rows)
    write_atomically(new / MARKER, marker_text(step, digests, hashlib.sha256(rows).hexdigest(), facts, index))
    publish(folder, step)


def _read_part(place: Path, name: str) -> ProcessRecord:
    """Read the record of a part that was just written. Raise OSError if it was changed, or files of the part are missing or cut off."""
    path = place / name.removesuffix(".json")
    try:
        part = ProcessRecord.model_validate_json((place / name).read_bytes())
    except pydantic.ValidationError:
        raise OSError(errno.EIO, "is not what was written", str(place / name)) from None
    files: dict[Path, File] = {path / file.removeprefix(f"{ITEM}/"): size for file, size in part.files.items()}
    with _vanished():
        verify_files(path, files, contents=False)
    return part


@contextlib.contextmanager
def _vanished() -> Iterator[None]:
    """Convert `Damaged` to `OSError`: if a checkpoint is damaged while it is written, somebody else has changed it."""
    try:
        yield
    except Damaged as damaged:
        raise OSError(errno.EIO, f"{damaged.path} {damaged.problems[0].what}", str(damaged.path)) from None
