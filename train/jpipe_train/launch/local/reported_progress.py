"""The progress of a run, which process 0 reports to `jpipe launch` in a file, and how to continue a run that has ended.

This imports neither JAX nor the library's other parts.
"""

import contextlib
import json
import os
import shlex
from pathlib import Path
from typing import Any, NamedTuple

from jpipe.files import write_atomically

VARIABLE = "JPIPE_PROGRESS"
"""The environment variable with the path of the file."""


class Progress(NamedTuple):
    """The progress of a run: the step of the newest complete checkpoint, and the number of steps of the whole run."""

    step: int
    steps: int

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to train."""
        return self.step >= self.steps


def begin(folder: str, step: int | None, *, saves: bool) -> None:
    """If a launcher listens, report that a run begins. The arguments are as in `goes_on`."""
    _write(run=[folder, step, saves])


def report(step: int, steps: int) -> None:
    """If a launcher listens, report a complete checkpoint. Failures are ignored."""
    _write(checkpoint=[step, steps])


def read(file: Path) -> Progress | None:
    """Return the last checkpoint that the processes have reported, or None if there is none."""
    checkpoint = _read(file).get("checkpoint")
    return None if checkpoint is None else Progress(*checkpoint)


def how_it_goes_on(file: Path) -> str:
    """Describe from this file what is saved of a run and how to continue it; "" if no run has begun."""
    if (run := _read(file).get("run")) is None:
        return ""
    (folder, step, saves), newest = run, read(file)
    return goes_on(folder, step if newest is None else newest.step, saves=saves)


def goes_on(folder: str, step: int | None, *, saves: bool = True, in_python: bool = False) -> str:
    """Describe what is saved of a run that has ended early, at the step of its newest checkpoint, if any, and how to continue it.

    `folder` is as it is shown; `in_python` tells whether a Python program has called `fit`.
    """
    again = "the same call of fit" if in_python else f"the same command with --set run.dir={shlex.quote(folder)}"
    if step is None and not saves:
        return "the run writes no checkpoints to resume from (checkpoint.every)"
    if step is None:
        return f"there is no checkpoint, so {again} begins anew"
    return f"the checkpoint of step {step} is written, and {again} resumes there"


def _write(**news: object) -> None:
    if file := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            write_atomically(Path(file), json.dumps(_read(Path(file)) | news))


def _read(file: Path) -> dict[str, Any]:
    try:
        reported: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return reported
