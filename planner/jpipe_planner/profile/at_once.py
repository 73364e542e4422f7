"""How many devices compute at the same time as fast as one alone, measured with the layer in which a model spends most of its time."""

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax

from jpipe.context import without_mesh
from jpipe_planner.profile.analyze import PROGRAMS
from jpipe_planner.profile.bench import StageRun
from jpipe_planner.profile.model import Model
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.scratch import compiling_threads

SECONDS = 0.05  # that the microbatches of one device take at least
_MOST = 64  # of these microbatches


class WorkAtOnce:
    """Forwards, backwards and an update of one layer, to run on some devices of this process at once, as a pipeline does.

    Args:
        model: the model, at one size.
        layer_id: the layer, from `longest_layer`.
        seconds: of its forward and backward.
        devices: of this process.
    """

    @without_mesh()
    def __init__(self, model: Model, layer_id: str, seconds: float, devices: Sequence[jax.Device]) -> None:
        (rows,), self._calls = model.sizes, min(math.ceil(SECONDS / seconds), _MOST)
        stage = model.stage([layer_id], rows)
        with compiling_threads() as pool:
            begun = [{name: pool.submit(stage.trace(name, device).lower().compile) for name in PROGRAMS} for device in devices]
            compiled = [{str(name): program.result() for name, program in of_device.items()} for of_device in begun]
        self._runs = [StageRun(stage, model.batch(rows), *each) for each in zip(compiled, devices, strict=True)]
        self.seconds(len(devices))  # warms up

    def seconds(self, count: int) -> float:
        """Return the seconds of some microbatches and an update on each of the first `count` devices, all at once."""
        begin = time.perf_counter()
        for name in (*PROGRAMS[:2] * self._calls, PROGRAMS[2]):
            results = [run.begin(name) for run in self._runs[:count]]
        jax.block_until_ready(results)
        return time.perf_counter() - begin


def longest_layer(profile: Profile, rows: int) -> tuple[str, float]:
    """Return the first of the equal layers that take most of the time of a microbatch, and its seconds."""
    by_costs = defaultdict[Any, list[str]](list)
    for layer_id, cost in profile.costs(rows).items():
        by_costs[cost.forward + cost.backward, cost.weights].append(layer_id)
    (seconds, _), ids = max(by_costs.items(), key=lambda item: item[0][0] * len(item[1]))
    return ids[0], seconds


def cores(alone: float, together: float, devices: int) -> float:
    """Return how many of `devices` compute at the same time as fast as one, from the seconds of one alone and of all together."""
    return min(max(devices * alone / together, 1.0), float(devices)) if together > 0 else float(devices)
