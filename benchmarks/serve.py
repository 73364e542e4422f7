"""The counterpart of `programs` in a measured program: it answers requests as lines of JSON on standard input and output."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(run: Callable[[int], dict[str, Any]], **facts: Any) -> None:
    """Print that everything is compiled and warm; then, for each number on standard input, run that many steps and print the result.

    Args:
        run: runs a number of steps, at least 2, and returns {"ends": when each of them ended, by `now`} and other results.
        facts: facts known before, such as the number of parameters.
    """
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(int(line))), flush=True)


def now() -> float:
    """Return the time of a clock that all processes of a machine share."""
    return time.monotonic()


def step_by_step(step: Callable[[], object]) -> Callable[[int], dict[str, Any]]:
    """Return the function `run` of `serve` for a step that returns when it is finished.

    Args:
        step: runs one step and waits for it.
    """

    def run(steps: int) -> dict[str, Any]:
        ends = []
        for _ in range(steps):
            step()
            ends.append(now())
        return {"ends": ends}

    return run
