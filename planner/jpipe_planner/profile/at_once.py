"""How many devices compute at the same time as fast as one alone, measured with the layer in which a model spends most of its time."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

import jpipe
from jpipe.context import without_mesh
from jpipe_planner.profile.analyze import PROGRAMS
from jpipe_planner.profile.bench import StageRun
from jpipe_planner.profile.model import Batch, Model
from jpipe_planner.profile.profile import Profile
from jpipe_planner.profile.scratch import compiling_threads

SECONDS = 0.05  # that the microbatches of one device take at least
_MOST = 64  # of these microbatches


class WorkAtOnce:
    """Forwards, backwards and an update of one layer, to run on some devices of this process at once, as a pipeline does.

    The layer is one of those whose equals take most of the time of the profile, at a size in the middle.

    Attributes:
        layer_id: the layer.

    Args:
        stack, batch, loss, optimizer, precision, ema_decay, delay_correction: as in `measure`.
        profile: the costs of the layers.
        devices: of this process.
    """

    @without_mesh()
    def __init__(
        self,
        stack: jpipe.LayerStack,
        batch: Batch,
        loss: Callable[[Any, Any], tuple[jax.Array, jax.Array]],
        optimizer: optax.GradientTransformation,
        profile: Profile,
        devices: Sequence[jax.Device],
        *,
        ema_decay: float | None = None,
        delay_correction: str | float | None = None,
        precision: jpipe.Precision | None = None,
    ) -> None:
        rows = profile.sizes[len(profile.sizes) // 2]
        self.layer_id, seconds = longest_layer(profile, rows)
        self._calls = min(math.ceil(SECONDS / seconds), _MOST)
        model = Model(stack, batch, loss, optimizer, (rows,), precision or jpipe.Precision(), ema_decay, delay_correction)
        stage = model.stage([self.layer_id], rows)
        with compiling_threads() as pool:
            lowered = {device: {name: stage.trace(name, device).lower() for name in PROGRAMS} for device in devices}
            begun = {device: {name: pool.submit(each.compile) for name, each in lowered[device].items()} for device in devices}
            compiled = {device: {str(name): each.result() for name, each in begun[device].items()} for device in devices}
        self._runs = [StageRun(stage, model.batch(rows), calls, device) for device, calls in compiled.items()]
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
