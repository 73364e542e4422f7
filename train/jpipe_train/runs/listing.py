"""List the runs in a folder (`jpipe runs`)."""

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jpipe import InputError
from jpipe.files import expanded, shown
from jpipe_train.checkpoint.run_folder import METRICS
from jpipe_train.console.terminal import align, count, duration, printable, shortened
from jpipe_train.runs.reading import Run, read

SWEEP = "sweep.json"
"""A folder that contains this file is the folder of a sweep."""

HEAD = ("name", "state", "step", "loss", "val_loss", "plan", "time", "age")
_LONGEST = 60  # the longest name in characters


def folders(folder: str) -> list[Path]:
    """Return the folders in `folder`, numbered folders first in ascending order, or, if it is itself a run, only `folder`.

    Raise InputError if the folder cannot be listed.
    """
    path = expanded(folder, "runs")
    try:
        if (path / METRICS).is_file():
            return [path]
        inner = [path / entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith(".")]
    except OSError as error:
        raise InputError(f"runs: cannot list '{folder}': {error.strerror}; give a folder that contains run folders") from None
    return sorted(inner, key=lambda path: (not path.name.isdecimal(), int(path.name) if path.name.isdecimal() else 0, path.name))


def read_all(paths: list[Path]) -> Iterator[tuple[Path, Run | str]]:
    """Yield each folder with its run, or with a message why it has none."""
    for path in paths:
        if (path / SWEEP).is_file():
            yield path, f"'{shown(path)}' is a sweep; jpipe runs {shown(path)} lists its runs"
            continue
        try:
            yield path, read(path, whole=False)
        except InputError as error:
            yield path, str(error).split("\n")[0]


def main(folder: str, as_json: bool, say: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
    """Print a line, or a JSON object, for each run in a folder, and a line for each folder that is damaged or not a run.

    `folder` may be a run itself. `clock` returns the seconds since 1970. Raise InputError if the folder cannot be listed.
    """
    found = list(read_all(folders(folder)))
    if as_json:
        for path, run in found:
            say(json.dumps({"name": path.name, "path": str(path)} | ({"problem": run} if isinstance(run, str) else _facts(run))))
        return
    runs = [run for _, run in found if isinstance(run, Run)]
    if runs:
        now = clock()
        for line in align([HEAD, *([printable(cell) for cell in _cells(run, now)] for run in runs)]):
            say(line)
    else:
        say(printable(f"no runs in '{folder}'"))
    for _, run in found:
        if isinstance(run, str):
            say(printable(run))
        elif run.damaged:
            say(printable(f"'{shown(run.path)}': {count(run.damaged, 'line')} of {METRICS} cannot be read and were left out"))


def age(seconds: float) -> str:
    """Return an age such as `5 min`, in the largest unit that makes it at least 2."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _cells(run: Run, now: float) -> list[str]:
    name = run.path.name or str(run.path)
    seconds = run.last("seconds")
    losses = [f"{value:.4g}" if value is not None else "–" for value in (run.last("loss"), run.last("val_loss"))]
    return [
        shortened(name, _LONGEST),
        run.state.name,
        f"{run.done}/{run.steps or '?'}",
        *losses,
        run.plan,
        "–" if seconds is None else duration(seconds),
        age(now - run.changed),
    ]


def _facts(run: Run) -> dict[str, object]:
    return {
        **{"state": run.state.name, "known_by": run.state.why, "step": run.done, "steps": run.steps, "plan": run.plan},
        **{name: run.last(name) for name in ("loss", "val_loss", "seconds")},
        **{"changed": run.changed, "damaged_lines": run.damaged},
    }
