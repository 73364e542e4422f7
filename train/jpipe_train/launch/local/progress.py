"""How far a run has come, as process 0 tells the `jpipe launch --elastic` that started it, in a file.

This imports neither JAX nor the library's other parts.
"""

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

from jpipe.files import write_atomically

VARIABLE = "JPIPE_PROGRESS"
"""The variable with the path of the file."""


class Progress(NamedTuple):
    """The progress of a run.

    Attributes:
        step: of the newest complete checkpoint.
        steps: the number of steps of the whole run.
    """

    step: int
    steps: int

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to train."""
        return self.step >= self.steps


def report(step: int, steps: int) -> None:
    """Report a complete checkpoint, if a launcher wants to know; if that fails, the launcher knows less."""
    if file := os.environ.get(VARIABLE):
        with contextlib.suppress(OSError):
            write_atomically(Path(file), f"{step} {steps}")


def read(file: Path) -> Progress | None:
    """Return what the processes have reported last; None if that is nothing."""
    try:
        step, steps = file.read_text(encoding="utf-8").split()
        return Progress(int(step), int(steps))
    except (OSError, ValueError):
        return None
