"""The folders of a run's checkpoints: how they are listed, chosen, kept, renamed and removed.

A checkpoint after 40 batches is the folder `checkpoints/40` of the run, the name that `ocp.CheckpointManager` uses. Until it is complete,
its files are in `checkpoints/40.orbax-checkpoint-tmp`, which Orbax also treats as unfinished.
"""

import contextlib
import errno
import itertools
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from jpipe import InputError
from jpipe._numbers import is_int
from jpipe.checkpoints.checkpoint import Checkpoint, run_folder
from jpipe.checkpoints.orbax_item import ITEM
from jpipe.checkpoints.records import FORMAT_1, MARKER, Damaged, of_other_format
from jpipe.files import make_folder, shown, to_disk

__all__ = ["at", "begin", "newest", "prune", "steps"]

STEP_METADATA = "_CHECKPOINT_METADATA"
"""The file in the folder of a step that tells Orbax what the step contains."""

COMPLETE = "complete"
"""The folder inside an unfinished checkpoint that is renamed to become the complete checkpoint."""

_UNFINISHED = ".orbax-checkpoint-tmp"
_OF_FORMAT_1 = re.compile(r"0\d{7}")  # the name of a folder, such as 00000040


def steps(folder: str | Path) -> list[int]:
    """Return the steps of the complete checkpoints of a run, ascending; some may be damaged."""
    return sorted({step for step, path in step_folders(run_folder(folder)) if _is_complete(path)})


def step_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return the step and the folder of each checkpoint of a run, ascending, unfinished checkpoints included.

    Raise InputError if the folder of the checkpoints is a file or a link, or all of them are of format 1.
    """
    parent = folder / "checkpoints"
    if parent.is_symlink():  # the link may lead to somebody else's folder, and old checkpoints are removed
        raise InputError(f"{parent}: expected a folder, found a symbolic link; move the checkpoints here, or choose another run.dir")
    try:
        names = os.listdir(parent)
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise InputError(where=parent, expected="a folder", found="a file in its place", change="choose another run.dir") from None
    numbers = {name: name.removesuffix(_UNFINISHED) for name in names}
    found = sorted((int(number), parent / name) for name, number in numbers.items() if number.isdecimal() and number == str(int(number)))
    if not found and (old := [parent / name for name in names if _OF_FORMAT_1.fullmatch(name) and (parent / name / MARKER).exists()]):
        raise of_other_format(max(old), FORMAT_1)
    return found


def at(folder: str | Path, step: int, where: str = "step") -> Checkpoint:
    """Return the complete checkpoint of a step, without reading any file of it.

    Args:
        folder: the folder of the run.
        step: the number of batches that the weights have seen.
        where: the argument or option that gives the step, for messages.

    Raises:
        InputError: the run has no complete checkpoint of this step.
    """
    if step not in (known := steps(folder)):
        expected = f"one of {', '.join(map(str, known)) or 'none at all'}, the checkpoints in '{shown(run_folder(folder))}'"
        raise InputError(where=where, expected=expected, found=step)
    return Checkpoint(folder, step)


def newest(folder: str | Path, report: Callable[[Damaged], None], before: int | None = None) -> Checkpoint | None:
    """Return the newest checkpoint of a run that is undamaged and can be read, if any.

    Args:
        folder: the folder of the run.
        report: a function that gets an error for each damaged or unfinished newer checkpoint; these stay in place.
        before: consider only checkpoints of earlier steps than this; None: consider all.

    Raises:
        InputError: the newest checkpoint has another format.
    """
    for step, path in reversed(step_folders(run_folder(folder))):
        if before is not None and step >= before:
            continue
        try:
            if path.name != str(step):
                raise Damaged(path, f"has no {MARKER}, was not finished")
            checkpoint = Checkpoint(folder, step)
            checkpoint.verify()
            checkpoint.specs()
        except Damaged as damaged:
            report(damaged)
        else:
            return checkpoint
    return None


def unfinished_folder(folder: Path, step: int) -> Path:
    """Return the folder in which the checkpoint of a step is written."""
    return folder / "checkpoints" / f"{step}{_UNFINISHED}"


def publish(folder: Path, step: int) -> None:
    """Give the finished checkpoint of a step its final name, after removing an earlier one of that step. Raise OSError if that fails."""
    unfinished = unfinished_folder(folder, step)
    path = unfinished.with_name(str(step))
    if os.path.lexists(path):
        remove(path)
    os.rename(unfinished / COMPLETE, path)
    to_disk(path.parent)
    shutil.rmtree(unfinished, ignore_errors=True)


def begin(folder: Path, step: int | None) -> list[str]:
    """Make room for the checkpoints that a run will write after `step`. Process 0 calls this before any process writes.

    Without this, a part that an earlier attempt has written could be mistaken for a part of the next checkpoint. Unfinished checkpoints are
    removed. Complete checkpoints of later steps are renamed, for example to `40.old`, because they are damaged, or the user went back to
    `step`; their new names are returned.

    Raise InputError if the folder cannot be written, or if it has a complete checkpoint although the run starts from nothing (None).
    """
    parent = folder / "checkpoints"
    try:
        make_folder(parent)
    except OSError as error:
        raise InputError(f"{parent}: checkpoints cannot be written there: {error.strerror}; choose another run.dir") from None
    if step is None and (complete := steps(folder)):
        raise InputError(
            f"{parent}: expected no checkpoint where a run begins, found one of step {complete[-1]}; resume, or choose another run.dir"
        )
    renamed = []
    for path in [path for number, path in step_folders(folder) if step is None or number > step]:
        try:
            if _is_complete(path) and not path.is_symlink():
                renamed.append(_set_aside(path).name)
            else:
                remove(path)
        except OSError as error:
            raise InputError(
                f"{path}: it is in the way of later checkpoints, and cannot be removed: {error.strerror}; move it away"
            ) from None
    return renamed


def discard(folder: Path, step: int) -> None:
    """Remove an unfinished checkpoint that no process is writing, if possible."""
    with contextlib.suppress(OSError):
        remove(unfinished_folder(folder, step))


def check_keep(keep: Any) -> None:
    """Check that `keep` is a number of checkpoints to keep."""
    if not is_int(keep) or keep < 1:
        raise InputError(where="keep", expected="a number of checkpoints, 1 or more", found=repr(keep))


def prune(
    folder: str | Path, keep: int, keep_every: int | None = None, keep_hours: float | None = None, also: Collection[int] = ()
) -> None:
    """Remove old checkpoints, and unfinished checkpoints that will not be finished; process 0 calls this after a save.

    The newest `keep` checkpoints stay, and older checkpoints that `keep_every`, `keep_hours` or `also` selects. If files of the newest
    checkpoint are missing or cut off (contents are not read), nothing is removed. Older checkpoints with missing or cut-off files are
    neither removed nor counted.

    Args:
        folder: the folder of the run.
        keep: the number of newest checkpoints to keep, at least 1.
        keep_every: also keep each checkpoint of a step that is a multiple of this.
        keep_hours: also keep one checkpoint for each period of this many hours, by the time of the marker file.
        also: further steps to keep, such as the steps of the best checkpoints.

    Raises:
        OSError: something cannot be removed.
        InputError: `folder` is not a folder, or `keep` is below 1.
    """
    check_keep(keep)
    folder = run_folder(folder)
    complete = steps(folder)
    if not complete or not Checkpoint(folder, complete[-1]).has_all_files():
        return
    to_keep = _steps_to_keep(folder, complete, keep, keep_every, keep_hours).union(also)
    for step, path in step_folders(folder):
        is_wanted = _is_complete(path) and (step in to_keep or not Checkpoint(folder, step).has_all_files())
        if step < complete[-1] and not is_wanted and _not_ours(path) is None:
            remove(path)


def remove(path: Path) -> None:
    """Remove the folder of a checkpoint, complete or not.

    The marker is removed first, so that the remainder counts as unfinished, not as damaged, if the process dies before the end. Raise
    OSError if the folder cannot be removed, or is left as it is because it holds something that jpipe has not written.
    """
    if path.is_symlink():
        path.unlink()
        return
    if problem := _not_ours(path):
        raise OSError(errno.EPERM, problem, str(path))
    (path / MARKER).unlink(missing_ok=True)
    shutil.rmtree(path)


def remove_part(path: Path, process: int) -> None:
    """Remove what a process wrote into an unfinished checkpoint. Errors are ignored: remaining files hinder only the next attempt."""
    for part in (path / f"process-{process}", *path.glob(f"process-{process}.*")):
        if not _OURS.fullmatch(part.name):
            continue
        if part.is_symlink() or part.is_file():
            part.unlink()
        shutil.rmtree(part, ignore_errors=True)


def _steps_to_keep(folder: Path, complete: list[int], keep: int, keep_every: int | None, keep_hours: float | None) -> set[int]:
    """Return the steps of the complete checkpoints that `prune` keeps."""
    whole = itertools.islice((step for step in reversed(complete) if Checkpoint(folder, step).has_all_files()), keep)
    oldest = min(whole)  # the newest is complete
    to_keep = {step for step in complete if step >= oldest}
    if keep_every is not None:
        to_keep |= {step for step in complete if step % keep_every == 0}
    if keep_hours is not None:
        last = float("-inf")
        for step in complete:
            written = (Checkpoint(folder, step).path / MARKER).stat().st_mtime
            if written - last >= 3600 * keep_hours:
                to_keep.add(step)
                last = written
    return to_keep


def _is_complete(path: Path) -> bool:
    return not path.name.endswith(_UNFINISHED) and (path / MARKER).exists()


def _set_aside(path: Path) -> Path:
    """Give a checkpoint a new name. Raise OSError if that fails, or if it holds something that jpipe has not written."""
    if problem := _not_ours(path):
        raise OSError(errno.EPERM, problem, str(path))
    names = itertools.chain([f"{path.name}.old"], (f"{path.name}.old-{number}" for number in itertools.count(2)))
    return path.rename(next(renamed for renamed in map(path.with_name, names) if not os.path.lexists(renamed)))


_OURS = re.compile(
    rf"checkpoint\.json|metrics\.jsonl|({ITEM}|process-\d+)(\.orbax-checkpoint-tmp.*)?|process-\d+\.json|{STEP_METADATA}|{COMPLETE}"
    r"|\.jpipe-\w+\.tmp|\.(checkpoint\.json|metrics\.jsonl|process-\d+\.json)\.unfinished"
)
"""The names that jpipe gives to files in the folder of a checkpoint, unfinished files included."""


_OURS_INSIDE = re.compile(r"[_.].*|structure\.json|commit_success\.txt|array_metadatas/.*|(ocdbt\.process_\d+/)?(manifest\.ocdbt|d/).*")
"""The names that Orbax and TensorStore write into an item, unfinished files included."""


def _not_ours(path: Path) -> str | None:
    """Return why `path` must not be removed (no folder, or it has files that jpipe does not write), or None. Links can be removed."""
    if path.is_symlink():
        return None
    if not path.is_dir():
        return os.strerror(errno.ENOTDIR)
    foreign = [name for name in sorted(os.listdir(path)) if not _OURS.fullmatch(name)]
    for inner in (inner for inner in path.iterdir() if inner.is_dir() and not inner.is_symlink()):
        if inner.name == COMPLETE:
            if problem := _not_ours(inner):
                return problem
            continue
        names = (file.relative_to(path).as_posix() for file in sorted(inner.rglob("*")) if not file.is_dir() or file.is_symlink())
        foreign += [name for name in names if not _OURS_INSIDE.fullmatch(name.partition("/")[2])]
    return f"it holds '{foreign[0]}', which jpipe has not written" if foreign else None
