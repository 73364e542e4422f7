"""Read the folder of a run without running code from it and without importing JAX. The folder may be untrusted."""

import errno
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import jpipe
from jpipe import InputError
from jpipe.files import open_to_read, read_text, shown
from jpipe_planner.machine.plain_yaml import parse
from jpipe_train.checkpoint.run_folder import END, METRICS, is_training, length_of, mark_of
from jpipe_train.config.config import MOST_PLAN_BYTES
from jpipe_train.config.section import MOST_ROWS
from jpipe_train.console.terminal import count

CONFIG, PLAN = "config.yaml", "plan.json"
Row = dict[str, int | float]

_MOST_CONFIG, _MOST_METRICS, _TAIL = 2**20, 2**28, 2**18  # bytes; the tail has hundreds of rows
_FAR, _LONGEST_LINE = 2**24, 2**20  # the last bytes of the file that are searched for the last validation; the most bytes of a row
_MOST_IN_MEMORY = 2**17  # the most rows; of more rows, about every second is left out, repeatedly
_LARGEST = {"loss": 1e100, "val_loss": 1e100, "seconds": 1e9}  # the numbers of a row that are read, and their largest values


class State(NamedTuple):
    """The state of a run."""

    # `running`, `complete`, `stopped early`, `stopped` or `unfinished`
    name: Literal["running", "complete", "stopped early", "stopped", "unfinished"]
    why: str  # how this state was determined


class End(NamedTuple):
    """The mark of a run that has ended, or has saved at a signal."""

    steps: int  # the number of steps that the run has done, or saved at a signal
    length: int  # the number of steps in its config; epochs are converted to steps
    stopped_early: str | None  # why the run ended with fewer steps; None if it did not
    stopped_by: str | None = None  # the signal at which the run saved these steps and stopped; None if no signal stopped it


@dataclass(frozen=True)
class Run:
    """A run, as read from its folder."""

    path: Path  # the folder
    config: Mapping[str, Any]  # the resolved config as plain data; its keys may be from another version of jpipe
    plan: str  # the plan in a few words
    steps: int | None  # the number of steps in the run's config, or None if it is unknown
    # step, losses and seconds from the rows of `metrics.jsonl`, in ascending order of steps: all rows, or only the last rows and the last
    # row with a validation. If there are very many, every second row is left out until few enough remain.
    rows: Sequence[Row]
    damaged: int  # the number of lines that could not be read as rows and were left out
    state: State  # the state of the run
    changed: float  # the time of the last change of `metrics.jsonl`, in seconds since 1970
    end: End | None  # the mark that the run has ended or was stopped by a signal; None if there is none, or a process is training

    @property
    def done(self) -> int:
        """The number of logged steps."""
        return int(self.rows[-1]["step"]) + 1 if self.rows else 0

    def last(self, name: str) -> int | float | None:
        """Return the last value of `name` in the rows, or None."""
        return next((row[name] for row in reversed(self.rows) if name in row), None)


def read(path: Path, *, whole: bool) -> Run:
    """Read the folder of a run, with all rows (`whole`) or only the last ones.

    Raise InputError if the folder is not a run, or its files are damaged or cannot be read.
    """
    try:
        missing = next((name for name in (CONFIG, PLAN, METRICS) if not os.path.lexists(path / name)), None)
        if missing is not None:
            raise InputError(f"'{shown(path)}' is not a run folder: it has no {missing}")
        config = _config(path / CONFIG)
        rows, damaged, changed = _rows(path / METRICS, whole)
    except OSError as error:
        raise InputError(f"'{shown(path)}' cannot be read: {error.strerror or error}") from None
    training, end, saved = is_training(path), end_of(path), saved_steps(path)
    if end is not None:
        is_there = saved[-1:] == [end.steps] if end.stopped_by is not None else bool(rows) and rows[-1]["step"] + 1 >= end.steps
        end = end if is_there and not training else None
    steps = (_number(config, "train", "steps") or length_of(path)) if end is None else end.length
    state = state_of(rows, steps, saved, training, end)
    return Run(path, config, plan_words(_plan(path / PLAN)), steps, rows, damaged, state, changed, end)


def state_of(rows: Sequence[Row], steps: int | None, saved: Sequence[int], training: bool | None, end: End | None) -> State:
    """Return the state of a run from its last rows, its planned steps, if known, its checkpoints, ascending, and its mark of the end.

    `training` tells whether a process is training in the folder; None if this cannot be determined.
    """
    if training:
        return State("running", "a process holds the lock of the folder")
    if end is not None and end.stopped_early is not None:
        return State("stopped early", end.stopped_early)
    if end is not None and end.stopped_by is not None:
        return State("stopped", f"{end.stopped_by} made it save step {end.steps}, where it resumes")
    if end is not None:
        return State("complete", f"{END} says that it has done all steps")
    done, newest = int(rows[-1]["step"]) + 1 if rows else 0, saved[-1] if saved else 0
    unknown = "" if training is False else "; the file system cannot tell whether a process is training in the folder"
    if steps is not None and newest >= steps:
        return State("complete", f"the checkpoint of its last step is saved{unknown}")
    if steps is not None and not saved and done >= steps and "val_loss" in rows[-1]:
        return State("complete", f"the row of the last step has the final validation{unknown}")
    if saved and newest >= done:
        return State("stopped", f"everything up to step {newest} is saved, where it resumes{unknown}")
    where = f"resumes at step {newest}" if saved else "has no checkpoint"
    return State("unfinished", f"it failed or was killed after {count(done, 'step')}, and {where}{unknown}")


def end_of(path: Path) -> End | None:
    """Return the mark that a run has ended or has saved at a signal; None if there is no readable mark."""
    if (data := mark_of(path, END)) is None:
        return None
    steps, length, reasons = data.get("steps"), data.get("length"), (data.get("stopped_early"), data.get("stopped_by"))
    if not (type(steps) is int and type(length) is int and 0 <= steps <= length <= MOST_ROWS):
        return None
    return End(steps, length, *reasons) if all(isinstance(reason, str | None) for reason in reasons) else None


def saved_steps(path: Path) -> list[int]:
    """Return the steps of the complete checkpoints of a run in ascending order; some checkpoints may be damaged."""
    try:
        names = os.listdir(path / "checkpoints")
    except OSError:
        return []
    numbers = {int(name): name for name in names if name.isascii() and name.isdecimal() and len(name) <= len(str(MOST_ROWS))}
    return sorted(number for number, name in numbers.items() if os.path.isfile(path / "checkpoints" / name / "checkpoint.json"))


def plan_words(plan: jpipe.Plan) -> str:
    """Describe a plan in a few words, such as `gpipe, 4 stages × 2 replicas`."""
    slices, replicas = plan.counted.row_slices, plan.replicas
    words = f"{plan.schedule}, {f'{slices} slices, ' if slices > 1 else ''}{count(plan.depth, 'stage')}"
    if len(set(replicas)) > 1:
        return f"{words}, replicas {jpipe.errors.shortened([str(number) for number in replicas])}"
    return words if replicas[0] == 1 else f"{words} × {replicas[0]} replicas"


def _number(config: Mapping[str, Any], section: str, key: str) -> int | None:
    """Return a positive whole number from a config, or None if the config has no valid number there."""
    values = config.get(section)
    number = values.get(key) if isinstance(values, dict) else None
    return number if type(number) is int and 0 < number <= MOST_ROWS else None


def _config(path: Path) -> dict[str, Any]:
    text, where = _text(path, _MOST_CONFIG)
    data = parse(text, where)
    if not isinstance(data, dict):
        raise InputError(where=where, expected="a mapping of keys", found=type(data).__name__)
    return data


def _plan(path: Path) -> jpipe.Plan:
    text, where = _text(path, MOST_PLAN_BYTES)
    return jpipe.Plan.from_json(text, where=where)


def _text(path: Path, most: int) -> tuple[str, str]:
    """Return the text of a file of limited size, and its name for messages."""
    where = f"'{shown(path)}'"
    unread = f"{where} cannot be read", "restore the file", f"{where}: expected text in UTF-8, found other bytes"
    return read_text(path, most, *unread), where


def _rows(path: Path, whole: bool) -> tuple[list[Row], int, float]:
    """Return the rows of a `metrics.jsonl`, the number of its other lines, and the time of its last change."""
    with open_to_read(path) as file:
        status = os.fstat(file.fileno())
        if whole and status.st_size > _MOST_METRICS:
            raise OSError(errno.EFBIG, f"{METRICS} is larger than {_MOST_METRICS // 2**20} MiB")
        start = 0 if whole else max(0, status.st_size - _TAIL)
        file.seek(start)
        if start:
            file.readline(_TAIL)  # skip the end of a row
        rows, damaged = _parsed(file, status.st_size)
        if start and rows and not any("val_loss" in row for row in rows):
            file.seek(max(0, status.st_size - _FAR))
            row = _last_validation(file.read(_FAR))
            rows = [row, *rows] if row is not None and row["step"] < rows[0]["step"] else rows
    return rows, damaged, status.st_mtime


def _parsed(file: BinaryIO, end: int) -> tuple[list[Row], int]:
    """Return the rows up to the position `end` of the file, and the number of other lines. The last line may be incomplete."""
    rows: list[Row] = []
    damaged, last = 0, -1
    while file.tell() < end:
        line = file.readline(_LONGEST_LINE)
        if not line.endswith(b"\n") and len(line) < _LONGEST_LINE:
            break
        row = _row(line)
        if row is None or row["step"] <= last:
            damaged += 1
            continue
        rows.append(row)
        last = int(row["step"])
        if len(rows) > _MOST_IN_MEMORY:
            rows = _thinned(rows)
    return rows, damaged


def _thinned(rows: list[Row]) -> list[Row]:
    """Leave out every second row, but keep the last row, the lowest training loss and, unless there are too many, all validations."""
    lowest = min(range(len(rows)), key=lambda number: rows[number].get("loss", math.inf))
    kept = [row for number, row in enumerate(rows) if number % 2 == 0 or number in (lowest, len(rows) - 1) or "val_loss" in row]
    return kept if len(kept) < 0.75 * len(rows) else rows[::2]


def _last_validation(text: bytes) -> Row | None:
    """Return the last row with a validation in a part of `metrics.jsonl`; None if there is none."""
    at = text.rfind(b'"val_loss"')
    begin, end = text.rfind(b"\n", 0, max(at, 0)) + 1, text.find(b"\n", max(at, 0))
    return _row(text[begin:end]) if at >= 0 and end >= 0 else None


def _row(line: bytes) -> Row | None:
    """Return the step, the losses and the seconds in a line of `metrics.jsonl`, or None if the line is not a row."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or type(step := data.get("step")) is not int or not 0 <= step <= MOST_ROWS:
        return None
    found = {name: data[name] for name, most in _LARGEST.items() if type(data.get(name)) in (int, float) and -most < data[name] < most}
    return {"step": step} | {name: float(value) for name, value in found.items()}
