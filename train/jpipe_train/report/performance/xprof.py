"""Profile some steps of a run with JAX's profiler, for XProf."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jpipe.files import make_folder, shown
from jpipe_train.config.config import ProfileConfig
from jpipe_train.console.terminal import first_line

FOLDER = "profile"
"""The folder in the run folder with the profiles. It has one folder for each process, such as `process-0`, which XProf can read."""


class Profiler:
    """Starts and stops the profiler of this process. An error is printed in one line, and the run continues.

    Args:
        config: the steps to profile; None for none.
        folder: the folder of the run. A process on a host without this folder creates it there under the same name.
        process: the number of this process.
        say: prints a line.
    """

    def __init__(self, config: ProfileConfig | None, folder: Path, process: int, say: Callable[[str], None]) -> None:
        self._steps = range(0) if config is None else range(config.first, config.first + config.steps)
        self._folder, self._process, self._say = folder, process, say
        self._is_on = False
        self._first = self._next = 0  # the first profiled step, and the step after the last one

    def before(self, step: int, state: Any) -> None:
        """Start the profiler before the first step to profile, and stop it after the last. Call this before each step.

        A run that resumes inside the range profiles the remaining steps. If the profiler starts or stops here, this waits until the state
        is computed.
        """
        if self._is_on:
            self._next = step
        if (step in self._steps) != self._is_on:
            jax.block_until_ready(state)
            if self._is_on:
                self._stop()
            else:
                self._first = self._next = step
                self._start()

    def after(self, step: int, state: Any) -> None:
        """Stop the profiler, if it is on, after the last step of the run. The next step would be `step`."""
        if self._is_on:
            self._next = step
            jax.block_until_ready(state)
            self._stop()

    def close(self) -> None:
        """Stop the profiler, if it is on, and write its data."""
        if self._is_on:
            self._stop()

    def _start(self) -> None:
        self._is_on = True
        place = self._folder / FOLDER / f"process-{self._process}"
        try:
            for folder in (place.parent, place, place / "plugins", place / "plugins" / "profile"):  # make_folder rejects links
                make_folder(folder)
            jax.profiler.start_trace(place)
        except (OSError, RuntimeError, ValueError) as error:
            self._give_up(error)

    def _stop(self) -> None:
        self._is_on = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError, ValueError) as error:
            self._give_up(error)
        else:
            first, last = self._first, self._next - 1
            words = f"steps {first} to {last} are" if first < last else f"step {first} is"
            words = words if first <= last else f"the beginning of step {first} is"
            self._say(f"profile: {words} in {shown(self._folder / FOLDER)}")

    def _give_up(self, error: Exception) -> None:
        self._is_on, self._steps = False, range(0)
        reason = getattr(error, "strerror", None) or first_line(error)
        self._say(f"profile: cannot write in '{shown(self._folder / FOLDER)}': {reason}; the run continues without a profile")
