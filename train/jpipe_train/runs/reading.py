"""Read the folder of a run, which may be a stranger's, without running code and without JAX."""

import errno
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jpipe
from jpipe import InputError
from jpipe.files import open_to_read, read_text, shown
from jpipe_planner.machine.plain_yaml import parse
from jpipe_train.checkpoint.run_folder import METRICS, is_training
from jpipe_train.config.config import MOST_PLAN_BYTES
from jpipe_train.config.section import MOST_ROWS
from jpipe_train.console.terminal import count

CONFIG, PLAN = "config.yaml", "plan.json"
Row = dict[str, int | float]

_MOST_CONFIG, _MOST_METRICS, _TAIL = 2**20, 2**28, 2**18  # bytes; the tail has hundreds of rows
_LARGEST = 1e300  # numbers in rows; a larger one is no loss


class State(NamedTuple):
    """The state of a run.

    Attributes:
        name: `running`, `complete`, `stopped` or `unfinished`.
        why: how that is known.
    """

    name: Literal["running", "complete", "stopped", "unfinished"]
    why: str


@dataclass(frozen=True)
class Run:
    """A run as its folder shows it.

    Attributes:
        path: the folder.
        config: the resolved config as plain data; its keys may be those of another version of jpipe.
        plan: the plan in a few words.
        steps: the number of steps in the config, if it is known.
        rows: the rows of `metrics.jsonl`, ascending by step: all of them, or the last ones.
        damaged: the number of lines that are no such rows, and were left out.
        state: the state.
        changed: the time at which `metrics.jsonl` was changed last, in seconds since the epoch.
    """

    path: Path
    config: Mapping[str, Any]
    plan: str
    steps: int | None
    rows: Sequence[Row]
    damaged: int
    state: State
    changed: float

    @property
    def done(self) -> int:
        """The number of steps that are logged."""
        return int(self.rows[-1]["step"]) + 1 if self.rows else 0

    def last(self, name: str) -> int | float | None:
        """Return the last value of this name in the rows, or None."""
        return next((row[name] for row in reversed(self.rows) if name in row), None)


def read(path: Path, *, whole: bool) -> Run:
    """Read the folder of a run.

    Args:
        path: the folder.
        whole: whether to read all rows, and not only the last ones.

    Raises:
        InputError: it is no run, or its files are damaged or cannot be read.
    """
    try:
        missing = next((name for name in (CONFIG, PLAN, METRICS) if not os.path.lexists(path / name)), None)
        if missing is not None:
            raise InputError(f"'{shown(path)}' is no run: it has no {missing}")
        config = _config(path / CONFIG)
        rows, damaged, changed = _rows(path / METRICS, whole)
    except OSError as error:
        raise InputError(f"'{shown(path)}' cannot be read: {error.strerror or error}") from None
    steps = _number(config, "train", "steps")
    state = state_of(rows, steps, _number(config, "checkpoint", "every"), saved_steps(path), is_training(path))
    return Run(path, config, plan_words(_plan(path / PLAN)), steps, rows, damaged, state, changed)


def state_of(rows: Sequence[Row], steps: int | None, every: int | None, saved: Sequence[int], training: bool | None) -> State:
    """Return the state of a run.

    Args:
        rows: its last rows.
        steps: the number of steps in its config.
        every: the steps between two checkpoints in its config.
        saved: the steps of its checkpoints, ascending.
        training: whether a process is training in its folder; None if that cannot be known.
    """
    if training:
        return State("running", "a process holds the lock of the folder")
    done, newest = int(rows[-1]["step"]) + 1 if rows else 0, saved[-1] if saved else 0
    unknown = "" if training is False else "; the file system does not tell whether a process trains in the folder"
    if steps is not None and done >= steps and "val_loss" in rows[-1] and (not saved or newest >= steps):
        return State("complete", f"the row of the last step has the final validation{unknown}")
    if saved and newest >= done:
        return State("stopped", f"everything up to step {newest} is saved, where it resumes{unknown}")
    if saved and every is not None and newest % every:
        return State("stopped", f"a signal made it save step {newest}, which is no multiple of checkpoint.every; it resumes there{unknown}")
    where = f"it resumes at step {newest}" if saved else "there is no checkpoint"
    return State("unfinished", f"it ended after {count(done, 'step')} without saving them, by a failure or killed; {where}{unknown}")


def saved_steps(path: Path) -> list[int]:
    """Return the steps of the complete checkpoints of a run, ascending; some may be damaged."""
    try:
        names = os.listdir(path / "checkpoints")
    except OSError:
        return []
    numbers = {int(name): name for name in names if name.isascii() and name.isdecimal() and len(name) <= len(str(MOST_ROWS))}
    return sorted(number for number, name in numbers.items() if os.path.isfile(path / "checkpoints" / name / "checkpoint.json"))


def plan_words(plan: jpipe.Plan) -> str:
    """Describe a plan: `gpipe, 4 stages × 2 replicas`."""
    words, replicas = f"{plan.schedule}, {count(plan.depth, 'stage')}", plan.replicas
    if len(set(replicas)) > 1:
        return f"{words}, replicas {jpipe.errors.shortened([str(number) for number in replicas])}"
    return words if replicas[0] == 1 else f"{words} × {replicas[0]} replicas"


def _number(config: Mapping[str, Any], section: str, key: str) -> int | None:
    """Return a whole number from a config that may be a stranger's, or None."""
    values = config.get(section)
    number = values.get(key) if isinstance(values, dict) else None
    return number if type(number) is int and 0 < number <= MOST_ROWS else None


def _config(path: Path) -> dict[str, Any]:
    where = f"'{shown(path)}'"
    text = read_text(
        path, _MOST_CONFIG, f"{where} cannot be read", "restore the file", f"{where}: expected text in UTF-8, found other bytes"
    )
    data = parse(text, where)
    if not isinstance(data, dict):
        raise InputError(f"{where}: expected a mapping of keys, found {type(data).__name__}")
    return data


def _plan(path: Path) -> jpipe.Plan:
    where = f"'{shown(path)}'"
    text = read_text(
        path, MOST_PLAN_BYTES, f"{where} cannot be read", "restore the file", f"{where}: expected text in UTF-8, found other bytes"
    )
    return jpipe.Plan.from_json(text, where=where)


def _rows(path: Path, whole: bool) -> tuple[list[Row], int, float]:
    """Return the rows of a `metrics.jsonl`, the number of its other lines, and when it was changed."""
    with open_to_read(path) as file:
        status = os.fstat(file.fileno())
        if whole and status.st_size > _MOST_METRICS:
            raise OSError(errno.EFBIG, f"{METRICS} is larger than {_MOST_METRICS // 2**20} MiB")
        start = 0 if whole else max(0, status.st_size - _TAIL)
        file.seek(start)
        lines = file.read(_MOST_METRICS if whole else _TAIL).split(b"\n")[:-1]  # the last one is empty, or is being written
    rows: list[Row] = []
    damaged = 0
    for line in lines[1:] if start else lines:
        row = _row(line)
        if row is None or (rows and row["step"] <= rows[-1]["step"]):
            damaged += 1
        else:
            rows.append(row)
    return rows, damaged, status.st_mtime


def _row(line: bytes) -> Row | None:
    """Return the numbers of a row, or None if it is none."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or type(step := data.get("step")) is not int or not 0 <= step <= MOST_ROWS:
        return None
    return {name: value for name, value in data.items() if type(value) in (int, float) and -_LARGEST < value < _LARGEST}
