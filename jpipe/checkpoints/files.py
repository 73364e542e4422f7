"""The files of checkpoints: written piece by piece, complete by a marker, held against their hashes before they are believed.

A checkpoint of the run in folder RUN, after 40 batches and by two processes, is the folder RUN/checkpoints/00000040:

    process-0/  process-1/            one Orbax item for each process: the layers it owns (jpipe/checkpoints/orbax_item.py)
    process-0.json  process-1.json    written when that item is whole: its layers, and the size and SHA-256 of each of its files
    metrics.jsonl                     the run's rows up to then
    checkpoint.json                   the marker, written last: SHA-256 of the files above and of itself, and the run's facts

Everything below a marker is what was written then, or is reported as damaged. A folder without a marker is unfinished.
"""

import contextlib
import errno
import hashlib
import itertools
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from jpipe import InputError
from jpipe.checkpoints.orbax_item import Tree, item_specs, read_item, write_item
from jpipe.checkpoints.records import MARKER, ROWS, Damaged, Item, describe, marker_text, read_items, read_marker, read_rows, verify_item
from jpipe.files import make_folder, resolved, to_disk, write_atomically
from jpipe.runtime._snapshot import layer_of, with_optimizers

__all__ = [
    "begin",
    "digest",
    "is_all_there",
    "layer_specs",
    "newest_good",
    "prune",
    "read_facts",
    "read_layers",
    "read_metrics",
    "steps",
    "verify",
]


def begin(folder: Path, step: int | None) -> list[str]:
    """Make room for what a run that goes on after `step` will write again; process 0 calls this before any process writes.

    Without that, an item of an earlier attempt at a checkpoint could be taken for a part of the next attempt. An unfinished checkpoint is
    removed. A later one that was complete is kept under another name, such as `00000040.old`: it is damaged, or the user went back.

    Args:
        folder: the run's.
        step: the checkpoint that the run resumes from; None: it starts from nothing, and must not find a complete one.

    Returns:
        The new names of later checkpoints that were complete.

    Raises:
        InputError: the folder cannot be written, or holds what a run from nothing would remove.
    """
    place = folder / "checkpoints"
    try:
        make_folder(place)
    except OSError as error:
        raise InputError(f"{place}: checkpoints cannot be written there: {error.strerror}; choose another run.dir") from None
    if step is None and (found := steps(folder)):
        raise InputError(
            f"{place}: expected no checkpoint where a run begins, found that of step {found[-1]}; resume, or choose another run.dir"
        )
    kept = []
    for later in [number for number in _numbers(folder) if step is None or number > step]:
        at = _place(folder, later)
        try:
            if at.is_symlink() or not (at / MARKER).exists():
                _remove(at)
            else:
                kept.append(_renamed(at).name)
        except OSError as error:
            raise InputError(f"{at}: in the way of checkpoints to come, and is not removed: {error.strerror}; move it away") from None
    return kept


def write_layers(folder: Path, step: int, layers: Mapping[str, Tree], process: int) -> int:
    """Write one process's part of a checkpoint; returns when it is whole, or leaves nothing of it.

    Args:
        folder: the run's.
        step: batches that the weights have seen.
        layers: `{layer id: nested dicts of arrays}`, those that this process owns, on its devices or as NumPy arrays. On CPUs JAX may
            give out its own memory: arrays that are donated later have to be copied before.
        process: which one this is.

    Returns:
        The bytes of its files.

    Raises:
        OSError: the disk is full, say.
    """
    place = _place(folder, step)
    make_folder(place.parent)
    make_folder(place)
    _remove_item(place, process)
    try:
        item = place / f"process-{process}"
        written = write_item(item, layers)
        files = {path.relative_to(item).as_posix(): describe(path) for path in written}
        folders = [path for path in item.rglob("*") if path.is_dir()]
        for path in (*written, *folders, item, place.parent, folder):  # Orbax leaves that to the system, for half a minute
            to_disk(path)
        whole = Item(layers=list(layers), files=files)
        write_atomically(place / f"process-{process}.json", whole.model_dump_json(indent=1))
    except BaseException:
        _remove_item(place, process)
        raise
    return sum(file.size for file in files.values())


def gather(folder: Path, step: int, processes: int, limit: float, failed: Callable[[], Collection[int]] = lambda: ()) -> list[int]:
    """Wait until each process has written its part or cannot; process 0 calls this.

    Args:
        folder: the run's, which all processes share.
        step: as in `write_layers`.
        processes: how many write a part.
        limit: seconds to wait.
        failed: gives the processes whose parts will not come.

    Returns:
        Those that could not.

    Raises:
        TimeoutError: some parts did not come; it names them.
    """
    place = _place(folder, step)
    end = time.monotonic() + limit
    while True:
        without = failed()
        missing = [name for process, name in enumerate(_item_names(processes)) if process not in without and not (place / name).exists()]
        if not missing:
            return sorted(without)
        if time.monotonic() > end:
            raise TimeoutError(f"{place}: waited {limit:g} s for {', '.join(missing)}")
        time.sleep(0.02)


def complete(folder: Path, step: int, processes: int, facts: Any, rows: bytes = b"") -> None:
    """Write the marker, now that the parts of all processes are there; process 0 calls this.

    Args:
        folder: the run's.
        step: as in `write_layers`.
        processes: how many have written a part.
        facts: anything that JSON can say, to be read with `read_facts`.
        rows: of the run's metrics so far; some of later steps may be among them.

    Raises:
        OSError: the disk is full, say, or files that were written are gone.
    """
    place = _place(folder, step)
    items = {name: _digest_of_item(place, name) for name in _item_names(processes)}
    write_atomically(place / ROWS, rows)
    write_atomically(place / MARKER, marker_text(step, items, hashlib.sha256(rows).hexdigest(), facts))


def discard(folder: Path, step: int) -> None:
    """Remove what there is of a checkpoint that will not be complete, as far as that can be; nobody may be writing it."""
    with contextlib.suppress(OSError):
        _remove(_place(folder, step))


def run_folder(folder: str | Path) -> Path:
    """The folder of a run as a user names it, as an absolute path.

    Raises:
        InputError: it is no path, or one that no folder can have.
    """
    if not isinstance(folder, str | Path):
        raise InputError(f"folder: expected the path of a run's folder, found {type(folder).__name__}")
    return resolved(str(folder), "folder")


def check_keep(keep: Any) -> None:
    """Refuse what is no number of checkpoints to keep."""
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise InputError(f"keep: expected a number of checkpoints, 1 or more, found {keep!r}")


def steps(folder: str | Path) -> list[int]:
    """The steps of the checkpoints that are complete (they may be damaged since), ascending."""
    folder = run_folder(folder)
    return [step for step in _numbers(folder) if (_place(folder, step) / MARKER).exists()]


def newest_good(folder: Path, report: Callable[[str], None], before: int | None = None) -> int | None:
    """Return the newest checkpoint that is what was written and that can be read, if any.

    Args:
        folder: the run's.
        report: gets a line for each newer one that is damaged or unfinished; they are left where they are.
        before: only checkpoints of earlier steps than this; None: all.

    Raises:
        InputError: a newer jpipe wrote the newest.
    """
    for step in reversed([step for step in _numbers(folder) if before is None or step < before]):
        try:
            verify(folder, step)
            layer_specs(folder, step)
        except Damaged as damaged:
            report(str(damaged))
        else:
            return step
    return None


def verify(folder: Path, step: int) -> None:
    """Hold every file of a checkpoint against its size and hash.

    Raises:
        Damaged: one of them is missing, cut off or changed.
        InputError: a newer jpipe wrote it.
    """
    place = _place(folder, step)
    marker = read_marker(place, step)
    for name, item in read_items(place, marker).items():
        verify_item(place / name, item)
    read_rows(place, marker)


def is_all_there(folder: Path, step: int) -> bool:
    """Return whether a checkpoint is complete and its files have their sizes; the contents of large files are not read."""
    place = _place(folder, step)
    try:
        marker = read_marker(place, step)
        for name, item in read_items(place, marker).items():
            verify_item(place / name, item, contents=False)
        read_rows(place, marker)
    except InputError:
        return False
    return True


def read_metrics(folder: Path, step: int) -> bytes:
    """The rows that `complete` was given.

    Raises:
        Damaged: their file or the marker is missing, cut off or changed.
        InputError: a newer jpipe wrote it.
    """
    place = _place(folder, step)
    return read_rows(place, read_marker(place, step))


def read_facts(folder: Path, step: int) -> Any:
    """What `complete` was given.

    Raises:
        Damaged: the marker is missing, cut off or changed.
        InputError: a newer jpipe wrote it.
    """
    return read_marker(_place(folder, step), step).facts


def digest(folder: Path, step: int) -> str:
    """A hash of all that a checkpoint holds.

    Raises:
        Damaged: the marker is missing, cut off or changed.
    """
    return read_marker(_place(folder, step), step).sha256


def layers_in(folder: Path, step: int) -> list[str]:
    """The names that `read_layers` knows.

    Raises:
        Damaged: a file that says so is missing, cut off or changed.
    """
    place = _place(folder, step)
    return [layer for item in read_items(place, read_marker(place, step)).values() for layer in item.layers]


def layer_specs(folder: Path, step: int) -> dict[str, Tree]:
    """Shapes and dtypes of what `read_layers` gives, for all layers; no array is read, and no hash of one is looked at.

    Raises:
        Damaged: a file that says which layers there are is missing, cut off or changed; one of the others is missing or cut off.
    """
    place = _place(folder, step)
    found: dict[str, Tree] = {}
    for name, item in read_items(place, read_marker(place, step)).items():
        verify_item(place / name, item, contents=False)
        with _told_as_damaged(place / name):
            specs = item_specs(place / name)
            found |= {layer: specs[layer] for layer in item.layers}
    return with_optimizers(found)


def read_layers(folder: Path, step: int, ids: Iterable[str] | None = None, *, verified: bool = False) -> dict[str, Tree]:
    """Read layers of a checkpoint, whichever processes wrote them, after holding their files against the hashes.

    Each process can call this by itself, with other layers; none waits for another.

    Args:
        folder: the run's.
        step: of the checkpoint.
        ids: which layers; None: all.
        verified: the caller has called `verify`, so that the files need not be read whole for a few layers of them.

    Returns:
        `{layer id: nested dicts of NumPy arrays}`, in the order of `ids`; each layer with its optimizer state, whichever replica kept it.

    Raises:
        Damaged: a file that is needed is missing, cut off or changed.
        InputError: there is no such layer, or a newer jpipe wrote the checkpoint.
    """
    place = _place(folder, step)
    items = read_items(place, read_marker(place, step))
    owner = {layer: name for name, item in items.items() for layer in item.layers}
    wanted = list(owner if ids is None else ids)
    if unknown := [layer for layer in wanted if layer not in owner]:
        raise InputError(f"{place}: expected the layer '{unknown[0]}', found {', '.join(owner)}; is it a checkpoint of this model?")
    # What other replicas have of these layers, and what is wanted.
    known = set(wanted)
    needed = list(dict.fromkeys([*wanted, *(name for name in owner if layer_of(name, known) is not None)]))
    found: dict[str, Tree] = {}
    for name in dict.fromkeys(owner[layer] for layer in needed):
        verify_item(place / name, items[name], contents=not verified)
        with _told_as_damaged(place / name):
            own = [layer for layer in needed if owner[layer] == name]
            read = read_item(place / name, own)
            found |= {layer: read[layer] for layer in own}
    found = with_optimizers(found)
    return {layer: found[layer] for layer in wanted}


def prune(folder: str | Path, keep: int, keep_every: int | None = None, keep_hours: float | None = None) -> None:
    """Remove checkpoints that are no longer wanted, and unfinished ones that will not be finished; process 0 calls this after a save.

    Kept are the last `keep`; of the older ones those that `keep_every` or `keep_hours` asks for. If the newest is not all there (the
    sizes of its files are looked at, not what is in them), nothing is removed. An older one that is not all there is left where it is, and
    is not counted.

    Args:
        folder: the run's.
        keep: at least 1.
        keep_every: also those whose step is a multiple of this.
        keep_hours: also one each so many hours, by the time of the marker file.

    Raises:
        OSError: something cannot be removed.
        InputError: `folder` is no folder, or `keep` is below 1.
    """
    check_keep(keep)
    folder = run_folder(folder)
    whole = steps(folder)
    if not whole or not is_all_there(folder, whole[-1]):
        return
    kept: set[int] = set()
    good = 0
    for step in reversed(whole):
        if good == keep:
            break
        kept.add(step)
        good += is_all_there(folder, step)
    if keep_every is not None:
        kept |= {step for step in whole if step % keep_every == 0}
    if keep_hours is not None:
        last = float("-inf")
        for step in whole:
            written = (_place(folder, step) / MARKER).stat().st_mtime
            if written - last >= 3600 * keep_hours:
                kept.add(step)
                last = written
    for step in _numbers(folder):
        if step >= whole[-1] or step in kept or _not_ours(_place(folder, step)):
            continue
        if step not in whole or is_all_there(folder, step):
            _remove(_place(folder, step))


def _digest_of_item(place: Path, name: str) -> str:
    """The hash of what a process says it has written, all of which is still there.

    Raises:
        OSError: it is not.
    """
    content = (place / name).read_bytes()
    try:
        verify_item((place / name).with_suffix(""), Item.model_validate_json(content), contents=False)
    except Damaged as damaged:
        raise OSError(errno.EIO, f"{damaged.path} {damaged.found}", str(damaged.path)) from None
    except pydantic.ValidationError:
        raise OSError(errno.EIO, "is not what was written", str(place / name)) from None
    return hashlib.sha256(content).hexdigest()


def _place(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"{step:08d}"


@contextlib.contextmanager
def _told_as_damaged(item: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # where its files are those of the hashes, whoever wrote them, it was not jpipe
        said = (str(error).splitlines() or [""])[0][:200]
        raise Damaged(item, f"is no Orbax item as jpipe writes it ({type(error).__name__}: {said})") from error


def _item_names(processes: int) -> list[str]:
    return [f"process-{process}.json" for process in range(processes)]


_OURS = re.compile(
    r"checkpoint\.json|metrics\.jsonl|process-\d+(\.json|\.orbax-checkpoint-tmp.*)?|\.jpipe-\w+\.tmp"
    r"|\.(checkpoint\.json|metrics\.jsonl|process-\d+\.json)\.unfinished"
)
"""The names of what a checkpoint holds, unfinished files among them, those of earlier versions too."""


_OURS_INSIDE = re.compile(r"[_.].*|commit_success\.txt|array_metadatas/.*|(ocdbt\.process_\d+/)?(manifest\.ocdbt|d/).*")
"""The names of what Orbax and TensorStore write into an item, what is still being written included."""


def _numbers(folder: Path) -> list[int]:
    """The steps of all checkpoints, unfinished ones too, ascending."""
    place = folder / "checkpoints"
    if place.is_symlink():  # what is behind it may be anybody's, and old checkpoints are removed
        raise InputError(f"{place}: expected a folder, found a symbolic link; move the checkpoints here, or choose another run.dir")
    try:
        names = os.listdir(place)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise InputError(f"{place}: expected a folder, found a file in its place; choose another run.dir") from None
    return sorted(int(name) for name in names if name.isdecimal() and f"{int(name):08d}" == name)


def _remove(place: Path) -> None:
    """Remove a checkpoint, or what there is of one.

    The marker goes first: what is left if the process dies here is unfinished, not damaged.

    Raises:
        OSError: it cannot be removed, or holds something that no checkpoint has, and so is not removed.
    """
    if place.is_symlink():
        place.unlink()
        return
    if other := _not_ours(place):
        raise OSError(errno.EPERM, other, str(place))
    (place / MARKER).unlink(missing_ok=True)
    shutil.rmtree(place)


def _renamed(place: Path) -> Path:
    """Give a checkpoint a name that no other has, and that is not the name of a checkpoint.

    Raises:
        OSError: it cannot be renamed, or holds something that no checkpoint has.
    """
    if other := _not_ours(place):
        raise OSError(errno.EPERM, other, str(place))
    for number in itertools.count(1):
        renamed = place.with_name(f"{place.name}.old" + (f"-{number}" if number > 1 else ""))
        if not os.path.lexists(renamed):
            return place.rename(renamed)
    raise AssertionError("count() does not end")


def _not_ours(place: Path) -> str | None:
    """Why it is not what jpipe has written of a checkpoint, and so is not removed; None: it is. Of a link only the link is removed."""
    if place.is_symlink():
        return None
    if not place.is_dir():
        return os.strerror(errno.ENOTDIR)
    others = [name for name in sorted(os.listdir(place)) if not _OURS.fullmatch(name)]
    for item in (path for path in place.glob("process-*") if path.is_dir() and not path.is_symlink()):
        inside = (path.relative_to(place).as_posix() for path in sorted(item.rglob("*")) if not path.is_dir() or path.is_symlink())
        others += [name for name in inside if not _OURS_INSIDE.fullmatch(name.partition("/")[2])]
    return f"it holds '{others[0]}', which jpipe has not written" if others else None


def _remove_item(place: Path, process: int) -> None:
    """Remove what a process wrote, its unfinished files too; what cannot be removed is in the way of nothing but the next attempt."""
    for path in (place / f"process-{process}", *place.glob(f"process-{process}.*")):
        if not _OURS.fullmatch(path.name):
            continue
        if path.is_symlink() or path.is_file():
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)
