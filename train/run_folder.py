"""The folder of one run: `config.yaml` as resolved, `plan.json`, and `metrics.jsonl`, one JSON object a logged step.

A job that `jpipe launch --max-restarts` starts again knows its folder by the file `.job` in it.
"""

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TextIO

from jpipe import InputError, Plan, Predicted
from train.config import Config
from train.config_file import to_yaml
from train.launch import JOB

_RUNS = Path("runs")
_METRICS = "metrics.jsonl"
_JOB = ".job"
_FILES = ("config.yaml", "plan.json", _METRICS)


class RunFolder:
    """Claims a folder for this run and writes into it; close it, or use it in a `with`. Where that fails, nothing is left behind.

    Args:
        config: the run's config; without `run.dir` the next free `runs/0001`, `runs/0002`, … is taken.
        plan: what will run.
        resume_at: the step where the run that the folder holds goes on: what was logged from there on is logged again. None: a new run.

    Raises:
        InputError: the folder holds another run already, or cannot be written. What an earlier attempt of the same job has left is
            no other run: it is begun anew.
    """

    def __init__(self, config: Config, plan: Plan, resume_at: int | None = None) -> None:
        self.path = _RUNS if config.run.dir is None else Path(config.run.dir).expanduser()
        with contextlib.ExitStack() as undo:
            try:
                if resume_at is not None:
                    self._metrics = _reopened(self.path / _METRICS, resume_at)
                else:
                    self.path = _numbered(self.path, undo) if config.run.dir is None else _given(self.path, undo)
                    # Opened to be new, so that of two runs started at once with the same folder one is refused.
                    self._metrics = (self.path / _METRICS).open("x", encoding="utf-8")
                    for name in (*_FILES, _JOB):
                        undo.callback(_try, (self.path / name).unlink)
                undo.callback(_try, self._metrics.close)
                if job := os.environ.get(JOB):
                    write_atomically(self.path / _JOB, job)
                resolved = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(self.path)})})
                write_atomically(self.path / "config.yaml", to_yaml(resolved))
                write_atomically(self.path / "plan.json", plan.to_json())
            except FileExistsError as error:
                raise _occupied(Path(error.filename).parent) from None
            except OSError as error:
                where = error.filename or self.path  # a full disk has no file's name
                raise InputError(f"run.dir: cannot write '{where}': {error.strerror}; choose another folder") from None
            undo.pop_all()

    def log(self, row: Mapping[str, int | float]) -> None:
        """Append a line to `metrics.jsonl`; it is on its way to the disk when this returns.

        Raises:
            OSError: the disk is full, say.
        """
        self._metrics.write(json.dumps(row, allow_nan=False) + "\n")
        self._metrics.flush()

    def keep_planned(self, predicted: Predicted, measured: Predicted) -> None:
        """Write what the planner predicted and what was measured into `planned.json`.

        Raises:
            OSError: the disk is full, say.
        """
        both = {"predicted": predicted.model_dump(mode="json"), "measured": measured.model_dump(mode="json")}
        write_atomically(self.path / "planned.json", json.dumps(both, indent=2) + "\n")

    def rows(self) -> list[dict[str, int | float]]:
        """What was logged so far."""
        return [json.loads(line) for line in (self.path / _METRICS).read_text(encoding="utf-8").splitlines()]

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._metrics.close()


def of_same_job(config: Config) -> Config:
    """The config, its `run.dir` filled in where an earlier attempt of this job has taken one of the numbered folders."""
    if config.run.dir is not None or not os.environ.get(JOB):
        return config
    taken = next((file.parent for file in _RUNS.glob(f"*/{_JOB}") if _is_ours(file.parent)), None)
    return config if taken is None else config.model_copy(update={"run": config.run.model_copy(update={"dir": str(taken)})})


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8) so that a reader finds all of it or, if that fails or the process dies, none of it."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        os.replace(unfinished, path)
    except BaseException:
        _try(unfinished.unlink)
        raise


def _reopened(path: Path, step: int) -> TextIO:
    """The rows of the steps before this one, to be written on; a row that a crash cut off was of a later step."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["step"] < step:
                kept.append(line + "\n")
    write_atomically(path, "".join(kept))
    return path.open("a", encoding="utf-8")


def _given(path: Path, undo: contextlib.ExitStack) -> Path:
    if path.exists() and not path.is_dir():
        raise InputError(f"run.dir: expected a folder, found the file '{path}'; choose another name")
    if _is_ours(path):
        for name in _FILES:
            (path / name).unlink(missing_ok=True)
    if any((path / name).exists() for name in _FILES):
        raise _occupied(path)
    _make(path, undo)
    return path


def _is_ours(path: Path) -> bool:
    """Whether an earlier attempt of this job has taken this folder."""
    try:
        return (path / _JOB).read_bytes() == os.environ.get(JOB, "").encode() != b""
    except OSError:
        return False


def _numbered(parent: Path, undo: contextlib.ExitStack) -> Path:
    if parent.exists() and not parent.is_dir():
        raise InputError(f"run.dir: expected a folder '{parent}' for the runs, found a file; move it away, or choose a folder")
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
    """Make a folder and those above it; those that were not there go again with `undo`, unless they hold something by then."""
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            undo.callback(_try, folder.rmdir)
    path.mkdir(parents=True, exist_ok=True)


def _try(action: Callable[[], None]) -> None:
    """Clear away what is there; the failure that led here is the one to be told."""
    with contextlib.suppress(OSError):
        action()


def _occupied(path: Path) -> InputError:
    return InputError(f"run.dir: expected a new or empty folder, found another run in '{path}'; choose another, or move that run away")
