"""The folder of a run: the resolved `config.yaml`, `plan.json`, and `metrics.jsonl` with a JSON object for each logged step.

When `jpipe launch` restarts a job, the file `.job` identifies the job's folder. A run locks the file `.lock` while it trains.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from jpipe import InputError, Plan
from jpipe.files import TEMPORARY, open_to_append, open_to_read, read_bytes, resolved, shown, write_atomically
from jpipe.plan import Predicted
from jpipe_train.config.config import Config
from jpipe_train.config.config_file import MOST_BYTES
from jpipe_train.config.run_settings import RunSettings
from jpipe_train.config.section import MOST_ROWS
from jpipe_train.console import interrupt
from jpipe_train.launch.local.launch import JOB

_RUNS = Path("runs")
METRICS = "metrics.jsonl"
END = "end.json"
"""The file that marks the end of a run, or a save at a signal; a run that continues removes it."""
LENGTH = "length.json"
"""The file with the number of steps of a run if its length is given in epochs."""
_JOB, _LOCK = ".job", ".lock"
_MOST_MARK = 2**16  # largest size of an `end.json` or `length.json`, in bytes
_LAST_BYTES = 2**20  # the last bytes of `metrics.jsonl` that are read to find its last row
_BETWEEN_TRIES = 0.05  # seconds between two tries to lock a folder
_FILES = ("config.yaml", "plan.json", METRICS)
OUTPUTS = (
    *(END, LENGTH),
    *("report.html", "loss.png", "metrics.png", "timeline.png", "memory.png", "trace.json", "planned.json"),
    *("tensorboard", "wandb", "trackio", "mlflow", "profile"),
)
"""The other files and folders that a run writes into its folder."""


class FolderChanged(OSError):
    """Files of a run were moved, removed, cut off or replaced while it trained."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.ESTALE, f"{what} while the run was training")


class RunFolder:
    """Claims a folder for a run and writes into it, as a context manager. If claiming fails, nothing remains in it.

    Args:
        settings: the settings of the run; without `run.dir` the next free `runs/0001`, `runs/0002`, … is used.
        plan: the plan of the run.
        resumes: whether to resume the run in the folder; its files do not change before `go_on`.
        anew: whether to restart a run of the same config that ended before its first checkpoint.
        prepare: a function that is called with the folder once no other process can train in it.

    Attributes:
        path: the path of the folder.
        begun_anew: whether a run that ended early was started again.

    Raises:
        InputError: the folder holds another run, another process is training in it, or it cannot be written. Files of an earlier attempt of
            the same job do not count as another run.
    """

    def __init__(
        self,
        settings: RunSettings,
        plan: Plan,
        *,
        resumes: bool = False,
        anew: bool = False,
        prepare: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self.path = settings.path or resolved(str(_RUNS), "run.dir")
        self.begun_anew = False
        self._metrics: BinaryIO | None = None
        self._unwritten = b""  # rows for which the disk has had no space yet
        self._written, self._size = hashlib.sha256(), 0  # of the rows that are in the file
        self._writes_rows = threading.Lock()
        with _writing(lambda: self.path) as undo:
            if not resumes:
                self.path = _numbered(self.path, undo) if settings.folder is None else _named(self.path, undo)
            self._lock = _locked(self.path, undo)
            self._texts = {"config.yaml": settings.yaml_in(self.path), "plan.json": plan.to_json()}
            train = settings.train
            if train.epochs is not None and train.steps is not None:
                self._texts[LENGTH] = json.dumps({"format": "jpipe-length/1", "steps": train.steps}) + "\n"
            if not resumes:
                self.begun_anew = anew and _ended_early(self.path, settings)
                ours = self.begun_anew or is_of_this_job(self.path)
                for name in _FILES if ours else ():
                    (self.path / name).unlink(missing_ok=True)
                _check_free(self.path, ours)
                try:  # rejects one of two runs that start together, even on a file system without locks
                    (self.path / METRICS).touch(exist_ok=False)
                except FileExistsError:
                    raise _occupied(self.path) from None
                for name in (*_FILES, LENGTH, _JOB):
                    undo.callback(_try, (self.path / name).unlink)
                undo.callback(self._close)
                self._open("")
            prepare(self.path)

    def last_logged(self) -> tuple[int, float] | None:
        """Return the last step in `metrics.jsonl` before `go_on` and its time in seconds since 1970, or None if unknown."""
        try:
            with open_to_read(self.path / METRICS) as file:
                written = os.fstat(file.fileno())
                file.seek(max(written.st_size - _LAST_BYTES, 0))
                lines = file.read(_LAST_BYTES).splitlines()
        except (OSError, InputError):
            return None
        for line in reversed(lines):
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):  # cut off, or not written by jpipe
                if type(step := json.loads(line)["step"]) is int and 0 <= step < 2**53:
                    return step, written.st_mtime
        return None

    def go_on(self, rows: str) -> None:
        """Begin writing into the folder, with these rows of the run so far. Raise InputError if the folder cannot be written."""
        with _writing(lambda: self.path):
            self._open(rows)

    def log(self, *rows: Mapping[str, int | float]) -> None:
        """Append a line for each row to `metrics.jsonl` and flush it to the operating system.

        Raises:
            OSError: the disk is full, for example. The next call writes these lines as well, even if it has no rows.
            FolderChanged: the file has lost earlier lines.
        """
        assert self._metrics is not None, "go_on comes first"
        with interrupt.delayed(), self._writes_rows:
            self._unwritten += b"".join(json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows)
            self._check_file()
            while self._unwritten:  # a disk that becomes full writes only a part
                count = self._metrics.write(self._unwritten)
                self._written.update(self._unwritten[:count])
                self._size += count
                self._unwritten = self._unwritten[count:]

    def _check_file(self) -> None:
        """Check that `metrics.jsonl` is still in the folder and has the size that it had after the last write."""
        assert self._metrics is not None
        file = self.path / METRICS
        try:
            named, opened = os.lstat(file), os.fstat(self._metrics.fileno())
        except (FileNotFoundError, NotADirectoryError):
            raise FolderChanged(f"'{shown(file if self.path.is_dir() else self.path)}' was moved or removed") from None
        if not os.path.samestat(named, opened):
            raise FolderChanged(f"'{shown(file)}' was replaced by another file")
        if named.st_size != self._size:
            os.fsync(self._metrics.fileno())  # a network file system may report an old size
            named = os.lstat(file)
        if named.st_size != self._size:
            raise FolderChanged(f"'{shown(file)}' was changed: expected {self._size:,} bytes, found {named.st_size:,},")

    def keep_planned(self, predicted: Predicted, measured: Predicted) -> None:
        """Write the planner's prediction and the measurement to `planned.json`. Raise OSError if the disk is full, for example."""
        both = {"predicted": predicted.model_dump(mode="json"), "measured": measured.model_dump(mode="json")}
        write_atomically(self.path / "planned.json", json.dumps(both, indent=2) + "\n")

    def mark_end(self, steps: int, length: int, stopped_early: str | None, stopped_by: str | None = None) -> None:
        """Mark that the run has ended, or was saved at a signal, after this number of steps of the planned `length`.

        `stopped_early` says why the run ended with fewer steps, if it did, and `stopped_by` names the signal that stopped it. Raise OSError
        if the disk is full, for example.
        """
        _write_end(self.path, steps, length, stopped_early, stopped_by)

    def logged(self) -> bytes:
        """Return the lines of `metrics.jsonl`, including lines that are not on the disk yet because it was full.

        Raise FolderChanged if something else has changed the file, and OSError if the file cannot be read.
        """
        file = self.path / METRICS
        with self._writes_rows:
            self._check_file()
            content = file.read_bytes()
            if hashlib.sha256(content).digest() != self._written.digest():
                raise FolderChanged(f"the rows in '{shown(file)}' were changed")
            return content + self._unwritten

    def rows(self) -> list[dict[str, int | float]]:
        """Return the rows logged so far."""
        return [json.loads(line) for line in self.logged().splitlines()]

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._close()
        self._lock.close()

    def _close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def _open(self, rows: str) -> None:
        for name in (END, LENGTH):
            (self.path / name).unlink(missing_ok=True)
        for name, text in self._texts.items():
            write_atomically(self.path / name, text)
        if job := os.environ.get(JOB):
            write_atomically(self.path / _JOB, job)
        write_atomically(self.path / METRICS, rows)
        self._metrics = open_to_append(self.path / METRICS)
        self._written, self._size = hashlib.sha256(rows.encode()), len(rows.encode())
        for path in self.path.glob(TEMPORARY):  # left by a killed process; no other process writes here now
            path.unlink(missing_ok=True)


def check_folder(settings: RunSettings, *, anew: bool) -> None:
    """Check that a new run can begin in its folder, and leave nothing there."""
    path = settings.path or resolved(str(_RUNS), "run.dir")
    with _writing(lambda: path) as made, made:  # removes all that is created
        if settings.folder is None:
            _parent(path, made)
        else:
            _named(path, made)
            # A run of epochs is compared once its number of steps is known. A run that is being trained has its own message.
            is_known = settings.train.epochs is None and not is_training(path)
            if is_known and not is_of_this_job(path) and not (anew and _ended_early(path, settings)):
                _check_free(path, ours=False)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@contextlib.contextmanager
def _writing(path: Callable[[], Path]) -> Iterator[contextlib.ExitStack]:
    """Yield a stack of undo functions, which are called if the block fails. Convert operating system errors to `InputError`."""
    with contextlib.ExitStack() as undo:
        try:
            yield undo
        except OSError as error:
            where = shown(Path(os.fsdecode(error.filename or path())))  # the error of a full disk names no file
            raise InputError(f"run.dir: cannot write '{where}': {error.strerror}; choose another folder") from None
        undo.pop_all()


def _ended_early(path: Path, settings: RunSettings) -> bool:
    """Return whether the folder holds a run with these settings that ended before its first checkpoint."""
    try:
        same = read_bytes(path / "config.yaml", MOST_BYTES) == settings.yaml_in(path).encode()
    except OSError:
        return False
    return same and settings.checkpoint.every is not None and not _has_checkpoints(path)


def _has_checkpoints(path: Path) -> bool:
    return any(path.glob("checkpoints/*/checkpoint.json"))


def _check_free(path: Path, ours: bool) -> None:
    """Check that a folder holds no run and, unless this job created it, nothing else that a run would overwrite."""
    if any(os.path.lexists(path / name) for name in _FILES) or _has_checkpoints(path):
        raise _occupied(path)
    if not ours and (existing := [name for name in OUTPUTS if os.path.lexists(path / name)]):
        raise _foreign(path, existing[0])


def of_same_job(config: Config) -> Config:
    """Return the config with `run.dir` set to the numbered folder of an earlier attempt of this job, if there is one."""
    if config.run.dir is not None or not os.environ.get(JOB):
        return config
    earlier = next((file.parent for file in _RUNS.glob(f"*/{_JOB}") if is_of_this_job(file.parent)), None)
    return config if earlier is None else config.model_copy(update={"run": config.run.model_copy(update={"dir": str(earlier)})})


def is_training(path: Path) -> bool | None:
    """Return whether a process is training in a folder, or None if its file system has no locks."""
    try:
        with open_to_read(path / _LOCK) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


def mark_of(path: Path, name: str) -> dict[str, Any] | None:
    """Return the content of `end.json` or `length.json` of a run, or None without such a file. The folder may be another user's."""
    try:
        data = json.loads(read_bytes(path / name, _MOST_MARK))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and data.get("format") == f"jpipe-{Path(name).stem}/1" else None


def length_of(path: Path) -> int | None:
    """Return the number of steps of a run of epochs, from its folder, or None if unknown."""
    steps = (mark_of(path, LENGTH) or {}).get("steps")
    return steps if type(steps) is int and 0 < steps <= MOST_ROWS else None


def mark_missing_end(settings: RunSettings, path: Path, steps: int, stopped_early: str | None) -> None:
    """Mark the end of a complete run that was killed before it could mark the end itself.

    Nothing is written if the folder holds a run with other settings, cannot be written or is in use, or if the run's number of steps is
    unknown. `stopped_early` says why the run ended with fewer steps than planned, if it did.
    """
    length = settings.train.steps or length_of(path)
    if length is None or length < steps or is_training(path) or os.path.lexists(path / END):
        return
    with contextlib.suppress(OSError):
        if read_bytes(path / "config.yaml", MOST_BYTES) == settings.yaml_in(path).encode():
            _write_end(path, steps, length, stopped_early, None)


def _write_end(path: Path, steps: int, length: int, stopped_early: str | None, stopped_by: str | None) -> None:
    mark = {"format": "jpipe-end/1", "steps": steps, "length": length, "stopped_early": stopped_early, "stopped_by": stopped_by}
    write_atomically(path / END, json.dumps(mark, indent=2) + "\n")


def _locked(path: Path, undo: contextlib.ExitStack) -> BinaryIO:
    """Lock a folder until the file is closed or this process ends. On a file system without locks this has no effect."""
    is_new = not (path / _LOCK).exists()
    lock = open_to_append(path / _LOCK)
    undo.callback(lock.close)
    try:
        _lock(lock)
    except BlockingIOError:
        raise InputError(
            f"run.dir: another process is training in '{shown(path)}'; wait for it or stop it, or choose another folder"
        ) from None
    except OSError:
        pass
    if is_new:
        undo.callback(_try, (path / _LOCK).unlink)
    return lock


def _lock(file: BinaryIO, tries: int = 3) -> None:
    """Lock a file, waiting while `is_training` holds the lock for a moment.

    Raise OSError if another process has locked it, or the file system has no locks.
    """
    for attempt in range(tries):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if attempt == tries - 1:
                raise
            time.sleep(_BETWEEN_TRIES)


def _named(path: Path, undo: contextlib.ExitStack) -> Path:
    if path.exists() and not path.is_dir():
        raise InputError(where="run.dir", expected="a folder", found=f"the file '{shown(path)}'", change="choose another name")
    _make(path, undo)
    return path


def is_of_this_job(path: Path) -> bool:
    """Return whether an earlier attempt of this job created a folder."""
    try:
        return read_bytes(path / _JOB, 2**20) == os.environ.get(JOB, "").encode() != b""
    except OSError:
        return False


def _parent(path: Path, undo: contextlib.ExitStack) -> None:
    """Create the parent folder of the numbered runs."""
    if path.exists() and not path.is_dir():
        raise InputError(f"run.dir: expected a folder '{shown(path)}' for the runs, found a file; move it away, or choose a folder")
    _make(path, undo)


def _numbered(parent: Path, undo: contextlib.ExitStack) -> Path:
    _parent(parent, undo)
    numbers = [int(entry.name) for entry in parent.iterdir() if entry.name.isdecimal()]
    for number in count(max(numbers, default=0) + 1):
        try:
            (parent / f"{number:04d}").mkdir()
        except FileExistsError:  # another run has just created it
            continue
        undo.callback(_try, (parent / f"{number:04d}").rmdir)
        return parent / f"{number:04d}"
    raise AssertionError("count() does not end")


def _make(path: Path, undo: contextlib.ExitStack) -> None:
    """Create a folder and its parents; `undo` removes those that are new and still empty."""
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            undo.callback(_try, folder.rmdir)
    path.mkdir(parents=True, exist_ok=True)


def _try(action: Callable[[], None]) -> None:
    """Call an undo function and ignore its errors, because an earlier error is already being reported."""
    with contextlib.suppress(OSError):
        action()


def _occupied(path: Path) -> InputError:
    return InputError(
        f"run.dir: expected a new or empty folder, found another run in '{shown(path)}'; choose another, or move that run away"
    )


def _foreign(path: Path, name: str) -> InputError:
    return InputError(
        f"run.dir: expected a new or empty folder, found '{name}' in '{shown(path)}', which a run would overwrite; choose another folder"
    )
