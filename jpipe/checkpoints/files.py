"""The files of checkpoints: written in parts, completed by a marker, and verified against their hashes before they are read.

A checkpoint of the run in folder RUN, after 40 batches and by two processes, is the folder RUN/checkpoints/40:

    default/                          one Orbax item with the layers of all processes (jpipe/checkpoints/orbax_item.py)
    _CHECKPOINT_METADATA              tells Orbax how to restore it
    process-0.json  process-1.json    the layers of each process, and the size and SHA-256 of each of its files
    metrics.jsonl                     the run's rows up to then
    checkpoint.json                   the marker, written last: the hashes of the other files and of itself, and the run's facts

The processes write their parts into RUN/checkpoints/40.orbax-checkpoint-tmp; process 0 joins them and renames the folder at the end.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from jpipe import InputError
from jpipe.checkpoints.folders import (
    COMPLETE,
    STEP_METADATA,
    begin,
    has_all_files,
    prune,
    publish,
    remove_part,
    step_folder,
    step_folders,
    steps,
    unfinished_folder,
)
from jpipe.checkpoints.orbax_item import ITEM, Tree, item_specs, join_parts, read_item, step_metadata, write_part
from jpipe.checkpoints.records import (
    MARKER,
    ROWS,
    Damaged,
    File,
    ProcessRecord,
    describe,
    files_in,
    marker_text,
    read_marker,
    read_parts,
    read_rows,
    verify_files,
)
from jpipe.files import make_folder, to_disk, write_atomically
from jpipe.runtime._snapshot import layer_of, with_optimizers

__all__ = [
    "begin",
    "digest",
    "has_all_files",
    "layer_specs",
    "newest_good",
    "prune",
    "read_facts",
    "read_layers",
    "read_metrics",
    "steps",
    "verify",
]


def write_layers(folder: Path, step: int, layers: Mapping[str, Tree], process: int) -> None:
    """Write one process's part of a checkpoint, or leave nothing of it.

    Args:
        folder: the run's.
        step: batches that the weights have seen.
        layers: `{layer id: nested dicts of arrays}` of this process, on its devices or as NumPy arrays. On CPUs JAX may share its own
            memory: arrays that are donated later have to be copied before.
        process: its index.

    Raises:
        OSError: the disk is full, for example.
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
        for inner in (*written, *folders, path, place, place.parent, folder):  # TensorStore leaves that to the system, for half a minute
            to_disk(inner)
        part = ProcessRecord(layers=list(layers), files=files)
        write_atomically(place / f"process-{process}.json", part.model_dump_json(indent=1))
    except BaseException:
        remove_part(place, process)
        raise


def gather(folder: Path, step: int, processes: int, limit: float, failed: Callable[[], Collection[int]] = lambda: ()) -> list[int]:
    """Wait until each process has written its part or failed to; process 0 calls this.

    Args:
        folder: the run's, which all processes share.
        step: as in `write_layers`.
        processes: the number of processes that write a part.
        limit: seconds to wait.
        failed: returns the processes that will not write their parts.

    Returns:
        The processes that failed.

    Raises:
        TimeoutError: some parts did not come; it names them.
    """
    place = unfinished_folder(folder, step)
    end = time.monotonic() + limit
    while True:
        without = failed()
        missing = [name for process, name in enumerate(_part_names(processes)) if process not in without and not (place / name).exists()]
        if not missing:
            return sorted(without)
        if time.monotonic() > end:
            raise TimeoutError(f"{place}: waited {limit:g} s for {', '.join(missing)}")
        time.sleep(0.02)


def complete(folder: Path, step: int, processes: int, facts: Any, rows: bytes = b"") -> None:
    """Join the parts of all processes, write the marker and give the checkpoint its name; process 0 calls this.

    Args:
        folder: the run's.
        step: as in `write_layers`.
        processes: the number of processes that have written a part.
        facts: facts of any JSON types, to be read with `read_facts`.
        rows: the rows of the run's metrics so far; some may be of later steps.

    Raises:
        OSError: the disk is full, for example, or files that were written have vanished.
    """
    place, names = unfinished_folder(folder, step), _part_names(processes)
    parts = [_read_part(place, name) for name in names]
    new = place / COMPLETE
    shutil.rmtree(new, ignore_errors=True)  # of an earlier attempt
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


def newest_good(folder: Path, report: Callable[[Damaged], None], before: int | None = None) -> int | None:
    """Return the step of the newest checkpoint that is undamaged and can be read, if any.

    Args:
        folder: the run's.
        report: gets an error for each newer one that is damaged or unfinished; they are left in place.
        before: only consider checkpoints of earlier steps than this; None: all.

    Raises:
        InputError: the newest is of another format.
    """
    for step, path in reversed([(step, path) for step, path in step_folders(folder) if before is None or step < before]):
        try:
            if path != step_folder(folder, step):
                raise Damaged(path, f"has no {MARKER}, was not finished")
            verify(folder, step)
            layer_specs(folder, step)
        except Damaged as damaged:
            report(damaged)
        else:
            return step
    return None


def verify(folder: Path, step: int) -> None:
    """Check every file of a checkpoint against its size and hash.

    Raises:
        Damaged: one of them is missing, cut off or changed.
        InputError: it is of another format.
    """
    path = step_folder(folder, step)
    marker = read_marker(path, step)
    verify_files(path / ITEM, files_in(path, read_parts(path, marker)))
    read_rows(path, marker)


def read_metrics(folder: Path, step: int) -> bytes:
    """Return the rows of a checkpoint, as passed to `complete`.

    Raises:
        Damaged: their file or the marker is missing, cut off or changed.
        InputError: it is of another format.
    """
    path = step_folder(folder, step)
    return read_rows(path, read_marker(path, step))


def read_facts(folder: Path, step: int) -> Any:
    """Return the facts of a checkpoint, as passed to `complete`.

    Raises:
        Damaged: the marker is missing, cut off or changed.
        InputError: it is of another format.
    """
    return read_marker(step_folder(folder, step), step).facts


def digest(folder: Path, step: int) -> str:
    """Return a hash of the whole content of a checkpoint.

    Raises:
        Damaged: the marker is missing, cut off or changed.
    """
    return read_marker(step_folder(folder, step), step).sha256


def layers_in(folder: Path, step: int) -> list[str]:
    """Return the names of the layers in a checkpoint.

    Raises:
        Damaged: a file that lists them is missing, cut off or changed.
    """
    return [layer for part in _parts(folder, step) for layer in part.layers]


def layer_specs(folder: Path, step: int) -> dict[str, Tree]:
    """Return shapes and dtypes of all layers, as `read_layers` returns the arrays; no array is read, and no hash of one is compared.

    Raises:
        Damaged: a file that lists the layers is missing, cut off or changed; another one is missing or cut off.
    """
    path, parts = step_folder(folder, step), _parts(folder, step)
    item = path / ITEM
    verify_files(item, files_in(path, parts), contents=False)
    with _damaged(item):
        in_item = item_specs(item)
        specs = {layer: in_item[layer] for part in parts for layer in part.layers}
    return with_optimizers(specs)


def read_layers(folder: Path, step: int, ids: Iterable[str] | None = None, *, verified: bool = False) -> dict[str, Tree]:
    """Read layers of a checkpoint, whichever processes wrote them, after verifying the hashes of their files.

    Each process can call this by itself, with other layers; none waits for another.

    Args:
        folder: the run's.
        step: the step of the checkpoint.
        ids: which layers; None: all.
        verified: the caller has called `verify`, so that whole files need not be read for a few of their layers.

    Returns:
        `{layer id: nested dicts of NumPy arrays}`, in the order of `ids`; each layer with its optimizer state, whichever replica kept it.

    Raises:
        Damaged: a file that is needed is missing, cut off or changed.
        InputError: there is no such layer, or the checkpoint is of another format.
    """
    path, parts = step_folder(folder, step), _parts(folder, step)
    known = [layer for part in parts for layer in part.layers]
    wanted = list(known if ids is None else ids)
    if unknown := [layer for layer in wanted if layer not in known]:
        raise InputError(f"{path}: expected the layer '{unknown[0]}', found {', '.join(known)}; is it a checkpoint of this model?")
    # The wanted layers, and what other replicas have of them.
    names = set(wanted)
    needed = {name for name in known if name in names or layer_of(name, names) is not None}
    parts = [part for part in parts if needed.intersection(part.layers)]
    verify_files(path / ITEM, files_in(path, parts), contents=not verified)
    with _damaged(path / ITEM):
        layers = read_item(path / ITEM, [layer for part in parts for layer in part.layers if layer in needed])
    layers = with_optimizers(layers)
    return {layer: layers[layer] for layer in wanted}


def _parts(folder: Path, step: int) -> list[ProcessRecord]:
    path = step_folder(folder, step)
    return read_parts(path, read_marker(path, step))


def _read_part(place: Path, name: str) -> ProcessRecord:
    """Read the record of a part that a process has just written.

    Raises:
        OSError: it has been changed, or files in it are missing or cut off.
    """
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
    """Raise `Damaged` as `OSError`: while a checkpoint is written, somebody else has changed it."""
    try:
        yield
    except Damaged as damaged:
        raise OSError(errno.EIO, f"{damaged.path} {damaged.problems[0].what}", str(damaged.path)) from None


@contextlib.contextmanager
def _damaged(item: Path) -> Iterator[None]:
    """Raise all errors of reading an item as `Damaged`: if its hashes are right, it was not written by jpipe."""
    try:
        yield
    except Exception as error:
        text = (str(error).splitlines() or [""])[0].partition(" [tensorstore_spec")[0].replace(f' at local file "{item}/"', "")[:200]
        raise Damaged(item, f"is no Orbax item as jpipe writes it ({type(error).__name__}: {text})") from error


def _part_names(processes: int) -> list[str]:
    return [f"process-{process}.json" for process in range(processes)]
