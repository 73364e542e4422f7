"""The other end of `programs`: what a measured program says and is told, in lines of JSON on its standard output and input."""

import json
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(run: Callable[[int], dict[str, Any]], **facts: Any) -> None:
    """Say that everything is compiled and warm; then, for each number that comes, run so many steps and tell what `run` returns.

    Args:
        run: told a number of steps, at least 2, it runs them and returns {"ends": when each of them ended, as `now` has it} and
            whatever else is to be known.
        facts: what is known before, the number of parameters, say.
    """
    print(json.dumps(facts), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(int(line))), flush=True)


def now() -> float:
    """A clock that all processes of a machine share."""
    return time.monotonic()


def step_by_step(step: Callable[[], object]) -> Callable[[int], dict[str, Any]]:
    """What `serve` takes, for a step that returns when it is over.

    Args:
        step: runs one and waits for it.
    """

    def run(steps: int) -> dict[str, Any]:
        ends = []
        for _ in range(steps):
            step()
            ends.append(now())
        return {"ends": ends}

    return run
