"""The folder of one run: `config.yaml` as resolved, `plan.json`, and `metrics.jsonl`, one JSON object a logged step.

A job that `jpipe launch --max-restarts` starts again knows its folder by the file `.job` in it. As long as a run goes on it holds the
lock of the file `.lock`.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from jpipe import InputError, Plan
from jpipe.files import TEMPORARY, open_to_append, read_bytes, resolved, shown, write_atomically
from jpipe.plan import Predicted
from jpipe_train.config.config import Config
from jpipe_train.config.config_file import MOST_BYTES, to_yaml
from jpipe_train.console import interrupt
from jpipe_train.launch.launch import JOB

_RUNS = Path("runs")
METRICS = "metrics.jsonl"
_JOB, _LOCK = ".job", ".lock"
_FILES = ("config.yaml", "plan.json", METRICS)
OUTPUTS = ("report.html", "loss.png", "metrics.png", "timeline.png", "memory.png", "trace.json", "planned.json", "tensorboard", "wandb")
"""What else a run writes into its folder."""


class FolderChanged(OSError):
    """Somebody has moved, removed, cut or replaced files of a run that goes on."""

    def __init__(self, what: str) -> None:
        super().__init__(errno.ESTALE, f"{what} while the run was training")


class RunFolder:
    """Claims a folder for this run and writes into it; close it, or use it in a `with`. Where that fails, nothing is left behind.

    Args:
        config: the run's config; without `run.dir` the next free `runs/0001`, `runs/0002`, … is taken.
        plan: what will run.
        resumes: the run that the folder holds goes on; nothing of it is touched before `go_on`.
        anew: a run of this very config that ended before its first checkpoint is begun anew.
        prepare: what else is to be done with the folder, now that no other process trains in it.

    Attributes:
        path: of the folder.
        begun_anew: whether it held such a run.

    Raises:
        InputError: the folder holds another run already, another process is training in it, or it cannot be written. What an earlier
            attempt of the same job has left is no other run: it is begun anew.
    """

    def __init__(
        self,
        config: Config,
        plan: Plan,
        *,
        resumes: bool = False,
        anew: bool = False,
        prepare: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self.path = folder_of(config) or resolved(str(_RUNS), "run.dir")
        self.begun_anew = False
        self._metrics: BinaryIO | None = None
        self._unwritten = b""  # rows for which the disk had no room yet
        self._written, self._size = hashlib.sha256(), 0  # of the rows in the file
        self._writes_rows = threading.Lock()
        with self._writing() as undo:
            if not resumes:
                self.path = _numbered(self.path, undo) if config.run.dir is None else _given(self.path, undo)
            self._lock = _locked(self.path, undo)
            placed = config.model_copy(update={"run": config.run.model_copy(update={"dir": shown(self.path)})})
            self._texts = {"config.yaml": to_yaml(placed), "plan.json": plan.to_json()}
            if not resumes:
                self.begun_anew = anew and self._ended_early(config)
                ours = self.begun_anew or is_of_this_job(self.path)
                for name in _FILES if ours else ():
                    (self.path / name).unlink(missing_ok=True)
                if any(os.path.lexists(self.path / name) for name in _FILES) or self._has_checkpoints():
                    raise _occupied(self.path)
                if not ours and (others := [name for name in OUTPUTS if os.path.lexists(self.path / name)]):
                    raise _foreign(self.path, others[0])
                try:  # also where the file system has no locks, one of two runs started at once is refused
                    (self.path / METRICS).touch(exist_ok=False)
                except FileExistsError:
                    raise _occupied(self.path) from None
                for name in (*_FILES, _JOB):
                    undo.callback(_try, (self.path / name).unlink)
                undo.callback(self._close)
                self._open("")
            prepare(self.path)

    def go_on(self, rows: str) -> None:
        """Go on with the run that the folder holds, now that nothing is refused any more: from here on these are its rows.

        Raises:
            InputError: the folder cannot be written.
        """
        with self._writing():
            self._open(rows)

    def log(self, *rows: Mapping[str, int | float]) -> None:
        """Append a line for each to `metrics.jsonl`; they are on their way to the disk when this returns.

        Raises:
            OSError: the disk is full, say; the next call, which may be one without rows, writes these lines as well.
            FolderChanged: the lines before are not in the file any more.
        """
        assert self._metrics is not None, "go_on comes first"
        with interrupt.delayed(), self._writes_rows:
            self._unwritten += b"".join(json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows)
            self._check_file()
            while self._unwritten:  # a disk that becomes full takes a part
                count = self._metrics.write(self._unwritten)
                self._written.update(self._unwritten[:count])
                self._size += count
                self._unwritten = self._unwritten[count:]

    def _check_file(self) -> None:
        """Check that the file that is written is still in the folder, as long as it was left.

        Raises:
            FolderChanged: it is not.
        """
        assert self._metrics is not None
        file = self.path / METRICS
        try:
            there, opened = os.lstat(file), os.fstat(self._metrics.fileno())
        except (FileNotFoundError, NotADirectoryError):
            raise FolderChanged(f"'{shown(file if self.path.is_dir() else self.path)}' was moved or removed") from None
        if not os.path.samestat(there, opened):
            raise FolderChanged(f"'{shown(file)}' was replaced by another file")
        if there.st_size != self._size:
            os.fsync(self._metrics.fileno())  # a file system of a network may tell an old size
            there = os.lstat(file)
        if there.st_size != self._size:
            raise FolderChanged(f"'{shown(file)}' was changed: expected {self._size:,} bytes, found {there.st_size:,},")

    def keep_planned(self, predicted: Predicted, measured: Predicted) -> None:
        """Write what the planner predicted and what was measured into `planned.json`.

        Raises:
            OSError: the disk is full, say.
        """
        both = {"predicted": predicted.model_dump(mode="json"), "measured": measured.model_dump(mode="json")}
        write_atomically(self.path / "planned.json", json.dumps(both, indent=2) + "\n")

    def logged(self) -> bytes:
        """The lines of `metrics.jsonl`, and those for which the disk had no room yet.

        Raises:
            FolderChanged: the file is not what was written.
            OSError: it cannot be read.
        """
        file = self.path / METRICS
        with self._writes_rows:
            self._check_file()
            content = file.read_bytes()
            if hashlib.sha256(content).digest() != self._written.digest():
                raise FolderChanged(f"the rows in '{shown(file)}' were changed")
            return content + self._unwritten

    def rows(self) -> list[dict[str, int | float]]:
        """What was logged so far."""
        return [json.loads(line) for line in self.logged().splitlines()]

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._close()
        self._lock.close()

    def _close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[contextlib.ExitStack]:
        """What is on the stack is undone where the inside fails, and what the system says is reported."""
        with contextlib.ExitStack() as undo:
            try:
                yield undo
            except OSError as error:
                where = shown(Path(os.fsdecode(error.filename or self.path)))  # a full disk has no file's name
                raise InputError(f"run.dir: cannot write '{where}': {error.strerror}; choose another folder") from None
            undo.pop_all()

    def _open(self, rows: str) -> None:
        for name, text in self._texts.items():
            write_atomically(self.path / name, text)
        if job := os.environ.get(JOB):
            write_atomically(self.path / _JOB, job)
        write_atomically(self.path / METRICS, rows)
        self._metrics = open_to_append(self.path / METRICS)
        self._written, self._size = hashlib.sha256(rows.encode()), len(rows.encode())
        for left in self.path.glob(TEMPORARY):  # by a process that was killed; nobody else writes here now
            left.unlink(missing_ok=True)

    def _ended_early(self, config: Config) -> bool:
        """Whether the folder holds a run of this config that was to write checkpoints and has not come to the first."""
        try:
            same = read_bytes(self.path / "config.yaml", MOST_BYTES) == self._texts["config.yaml"].encode()
        except OSError:
            return False
        return same and config.checkpoint.every is not None and not self._has_checkpoints()

    def _has_checkpoints(self) -> bool:
        return any(self.path.glob("checkpoints/*/checkpoint.json"))


def folder_of(config: Config) -> Path | None:
    """The folder that `run.dir` names, absolute, without symbolic links; None: one of the numbered ones.

    Raises:
        InputError: no run can be written there.
    """
    return None if config.run.dir is None else resolved(config.run.dir, "run.dir")


def of_same_job(config: Config) -> Config:
    """The config, its `run.dir` filled in where an earlier attempt of this job has taken one of the numbered folders."""
    if config.run.dir is not None or not os.environ.get(JOB):
        return config
    taken = next((file.parent for file in _RUNS.glob(f"*/{_JOB}") if is_of_this_job(file.parent)), None)
    return config if taken is None else config.model_copy(update={"run": config.run.model_copy(update={"dir": str(taken)})})


def _locked(path: Path, undo: contextlib.ExitStack) -> BinaryIO:
    """The folder's lock, held until it is closed or this process is gone; where the file system has no locks, nobody is kept out."""
    is_new = not (path / _LOCK).exists()
    lock = open_to_append(path / _LOCK)
    undo.callback(lock.close)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"run.dir: another process is training in '{shown(path)}'; wait for it or stop it, or choose another folder"
        ) from None
    except OSError:
        pass
    if is_new:
        undo.callback(_try, (path / _LOCK).unlink)
    return lock


def _given(path: Path, undo: contextlib.ExitStack) -> Path:
    if path.exists() and not path.is_dir():
        raise InputError(f"run.dir: expected a folder, found the file '{shown(path)}'; choose another name")
    _make(path, undo)
    return path


def is_of_this_job(path: Path) -> bool:
    """Whether an earlier attempt of this job has taken this folder."""
    try:
        return read_bytes(path / _JOB, 2**20) == os.environ.get(JOB, "").encode() != b""
    except OSError:
        return False


def _numbered(parent: Path, undo: contextlib.ExitStack) -> Path:
    if parent.exists() and not parent.is_dir():
        raise InputError(f"run.dir: expected a folder '{shown(parent)}' for the runs, found a file; move it away, or choose a folder")
    _make(parent, undo)
    taken = [int(entry.name) for entry in parent.iterdir() if entry.name.isdecimal()]
    for number in count(max(taken, default=0) + 1):
        try:
            (parent / f"{number:04d}").mkdir()
        except FileExistsError:  # another run took it in this moment
            continue
        undo.callback(_try, (parent / f"{number:04d}").rmdir)
        return parent / f"{number:04d}"
    raise AssertionError("count() does not end")


def _make(path: Path, undo: contextlib.ExitStack) -> None:
    """Make a folder and those above it; `undo` removes those that did not exist before, unless they are not empty by then."""
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            undo.callback(_try, folder.rmdir)
    path.mkdir(parents=True, exist_ok=True)


def _try(action: Callable[[], None]) -> None:
    """Clear away what is there; the failure that led here is the one to report."""
    with contextlib.suppress(OSError):
        action()


def _occupied(path: Path) -> InputError:
    return InputError(
        f"run.dir: expected a new or empty folder, found another run in '{shown(path)}'; choose another, or move that run away"
    )


def _foreign(path: Path, name: str) -> InputError:
    return InputError(
        f"run.dir: expected a new or empty folder, found '{name}' of something else in '{shown(path)}', which a run would overwrite; "
        "choose another folder"
    )
