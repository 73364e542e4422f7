"""The progress of a run, which process 0 reports to `jpipe launch` in files, and how to continue a run that has ended.

This imports neither JAX nor the library's other parts.
"""

import contextlib
import json
import os
import shlex
from pathlib import Path
from typing import NamedTuple

from jpipe.files import write_atomically

VARIABLE = "JPIPE_PROGRESS"
"""The variable with the path of the file."""


class Progress(NamedTuple):
    """The progress of a run.

    Attributes:
        step: the step of the newest complete checkpoint.
        steps: the number of steps of the whole run.
    """

    step: int
    steps: int

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to train."""
        return self.step >= self.steps


def begin(folder: str, step: int | None, *, saves: bool) -> None:
    """Report that a run begins, if a launcher wants to know; the arguments are as for `goes_on`."""
    if file := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            write_atomically(_run_file(file), json.dumps([folder, step, saves]))


def report(step: int, steps: int) -> None:
    """Report a complete checkpoint, if a launcher wants to know; failures are ignored."""
    if file := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            write_atomically(Path(file), f"{step} {steps}")


def read(file: Path) -> Progress | None:
    """Return the last report of the processes; None without one."""
    try:
        step, steps = file.read_text(encoding="utf-8").split()
        return Progress(int(step), int(steps))
    except (OSError, ValueError):
        return None


def how_it_goes_on(file: Path) -> str:
    """Describe what is saved of the run that process 0 has reported to this file, and how to continue; "" if no run has begun."""
    try:
        folder, step, saves = json.loads(_run_file(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    newest = read(file)
    return goes_on(folder, step if newest is None else newest.step, saves=saves)


def goes_on(folder: str, step: int | None, *, saves: bool = True, in_python: bool = False) -> str:
    """Describe what is saved of a run that has ended early, and how to continue it.

    Args:
        folder: the folder of the run, as it is shown.
        step: the step of its newest checkpoint; None without one.
        saves: whether it writes checkpoints.
        in_python: whether a Python program has called `fit`.
    """
    again = "the same call of fit" if in_python else f"the same command with --set run.dir={shlex.quote(folder)}"
    if step is None and not saves:
        return "the run writes no checkpoints (checkpoint.every) from which it could go on"
    if step is None:
        return f"no checkpoint is written, so {again} begins anew"
    return f"the checkpoint of step {step} is written, and {again} resumes there"


def _run_file(file: str | Path) -> Path:
    return Path(f"{file}.run")
