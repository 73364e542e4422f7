"""PipeDream's recurrence (SOSP 2019, section 3.1) for stages with different numbers of replicas, with memory and ports added.

A stage takes neighbouring layers and neighbouring devices. The recurrence goes from the first device and layer to the last. The best
placement of the layers before j on the first u devices ends with a stage of some layers i .. j - 1 on the last r of these devices. Its time
is the longer of two: the time of this stage, and the time of the best placement of the layers before i on u - r devices. The time of a
stage depends only on its layers and devices: it computes, and its port sends the messages of both its cuts and its share of a sum. The
stage must also fit.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

import jpipe
from jpipe.schedules import PlainShape, PlanOptions
from jpipe_planner.cost.devices import DeviceRanges
from jpipe_planner.cost.links import ring_share
from jpipe_planner.cost.price import all_reduce_seconds
from jpipe_planner.cost.shape import ScheduleFacts
from jpipe_planner.search.candidate import Candidate
from jpipe_planner.search.equal import EXTRA
from jpipe_planner.search.estimate import Estimates, memory_in_host, memory_of

__all__ = ["Placement", "fastest_stages", "pipedream_plans"]

SCHEDULE = "pipedream"

MOST_CUTS = 128  # the most places for cuts; with more layers, only cuts after layers with small outputs are tried
MOST_BY_DEPTH = 4e7  # the most comparisons to find the best stages of each depth; if it allows no 2 stages, only the best of all are found
MOST_DEPTH = 32
LEAST_PLACES = 64  # with fewer groups, each device counts
MOST_PLACES = 512  # of more devices, stages get groups of equal size, as many groups as possible up to this number
MOST_REPLICAS = 64  # with more possible numbers of replicas, only 2**k, 3 * 2**k, and divisors of the number of devices are tried
MARGINS = (1.0, 0.9, 0.8, 0.65)  # shares of the memory to try, because the recurrence counts too few microbatches in flight
_INFINITE = float("inf")


class Placement(NamedTuple):
    """Stages that are placed on the first devices of a topology.

    Attributes:
        seconds: the seconds that the slowest stage needs for a microbatch.
        starts: the first layer of each stage.
        replicas: the number of replicas of each stage.
    """

    seconds: float
    starts: tuple[int, ...]
    replicas: tuple[int, ...]


def pipedream_plans(estimates: Estimates, batch: int, every: Literal["batch", "replicas"], exact: bool) -> Iterator[Candidate]:
    """Yield the best plans of each microbatch size and depth, with `EXTRA` microbatches in flight, that update `every` batch."""
    for rows in estimates.profile.sizes:
        if batch < rows or (exact and batch % rows):
            continue
        for placement in _placements(estimates, rows, batch // rows if every == "batch" else None):
            microbatches = batch // rows if every == "batch" else math.lcm(*placement.replicas)
            extras = EXTRA if len(placement.starts) > 1 else (0,)
            for extra in extras if microbatches * rows <= batch else ():
                options = PlanOptions(extra_in_flight=extra, update_every=every)
                shape = PlainShape(SCHEDULE, microbatches, placement.replicas, options)
                if (candidate := estimates.candidate(shape, rows, placement.starts)) is not None:
                    yield candidate


def _placements(estimates: Estimates, rows: int, microbatches: int | None) -> list[Placement]:
    """Return the best placements that fit with a margin. If none fits, add those with the least memory and the fastest ones."""
    devices, found = estimates.topology.num_devices, list[Placement]()
    counts = [r for r in range(1, devices + 1) if microbatches is None or microbatches % r == 0]
    group = next(size for size in range(1, devices + 1) if devices % size == 0 and devices <= MOST_PLACES * size)
    counts = [r for r in counts if r % group == 0 and devices > LEAST_PLACES * group] or counts
    if len(counts) > MOST_REPLICAS:
        counts = [r for r in counts if devices % r == 0 or r & (r - 1) == 0 or (r % 3 == 0 and r // 3 & (r // 3 - 1) == 0)]
    places = _places(estimates, rows)
    work = len(places) ** 2 * devices // math.gcd(*counts) * len(counts)
    layers, depth = len(places) - 1, min(len(places) - 1, devices, MOST_DEPTH, int(MOST_BY_DEPTH / work))

    def search(margin: float | None, in_host: bool = False) -> list[Placement]:
        loads = _Loads(estimates, rows, microbatches, places, margin, in_host)
        best = fastest_stages(loads.matrix, layers, devices, counts, depth if depth > 1 else None)
        return [one._replace(starts=tuple(places[list(one.starts)].tolist())) for one in best]

    for margin in MARGINS:
        found = search(margin)
        shapes = [PlainShape(SCHEDULE, microbatches or math.lcm(*one.replicas), one.replicas) for one in found]
        plans = (estimates.candidate(shape, rows, one.starts) for shape, one in zip(shapes, found, strict=True))
        if estimates.topology.device.limit is None or any(plan is not None and plan.over is None for plan in plans):
            return found
    moved = [one for margin in MARGINS for one in search(margin, in_host=True)] if estimates.topology.device.host.limit else []
    return [*found, *search(None), *search(math.inf), *moved]  # plans in `moved` fit only with parts in host memory


def _places(estimates: Estimates, rows: int) -> Any:
    """Return the layers before which cuts are tried, and their number; of more than `MOST_CUTS`, one in each piece of equal work."""
    layers = estimates.layers
    if layers.count <= MOST_CUTS:
        return np.arange(layers.count + 1)
    sums, first = np.cumsum(layers.work(rows, 0)), np.arange(1, layers.count)
    sent = layers.runs(first - 1, first, rows).outputs
    piece = np.minimum((sums[:-1] / sums[-1] * MOST_CUTS).astype(int), MOST_CUTS - 1)
    chosen = first[np.lexsort((sent, piece))]
    return np.array([0, *np.sort(chosen[np.unique(np.sort(piece), return_index=True)[1]]).tolist(), layers.count])


class _Loads:
    """The seconds per microbatch of each run of layers as a stage, on any devices. Without a margin, bytes instead of seconds.

    With `in_host`, `memory_in_host` gives the memory of a stage.
    """

    def __init__(
        self, estimates: Estimates, rows: int, microbatches: int | None, places: Any, margin: float | None, in_host: bool = False
    ) -> None:
        self._topology, self._overlap = estimates.topology, estimates.topology.device.overlap
        self._microbatches, self._repeats, count = microbatches, estimates.layers.repeats > 0, len(places)
        self._pairs = np.triu_indices(count, 1)
        self._first, self._end = (places[index] for index in self._pairs)
        self._stages, self._at_end = estimates.layers.runs(self._first, self._end, rows), self._end == estimates.layers.count
        self._crossing = np.where(self._first > 0, self._stages.inputs, 0)
        limit = self._topology.device.limit
        self._limit = None if limit is None or margin is None else margin * limit
        self._counts_bytes, self._in_host = margin is None, in_host
        self._count, self._ranges, self._known = count, DeviceRanges(self._topology), dict[Any, Any]()

    def matrix(self, first: int, replicas: int) -> Any:
        """Return the seconds of the stages on some devices, by first layer and end; infinity if a stage is empty or does not fit."""
        last, devices = first + replicas - 1, self._topology.num_devices
        kind = self._ranges.kind(first, last)
        ahead = -(-(devices - first) // replicas)
        if ahead > 16:  # the memory is nearly the same for all of these
            ahead = -(-ahead // (step := 2 ** (ahead.bit_length() - 3))) * step
        sides = (
            self._side(first, last, first - 1) if first else (1.0, 1),
            self._side(first, last, last + 1) if last + 1 < devices else (1.0, 1),
        )
        limited = self._limit is not None or self._counts_bytes
        key = (replicas, kind, *sides, (ahead, first > 0) if limited else 0)
        if key not in self._known:
            matrix = np.full((self._count, self._count), _INFINITE)
            matrix[self._pairs] = self._seconds(replicas, kind, sides, ahead, first > 0)
            self._known[key] = matrix
        return self._known[key]

    def _side(self, first: int, last: int, neighbour: int) -> tuple[float, int]:
        """Return the bandwidth of the links to a neighbouring device, and how many ports of the stage share the messages to it."""
        ends = min(first, neighbour), max(last, neighbour)
        inside = (1, *self._topology.sizes)[self._topology.level(*ends)]
        return self._ranges.kind(*ends).link.bandwidth, last // inside - first // inside + 1

    def _seconds(self, replicas: int, kind: Any, sides: Any, ahead: int, has_before: bool) -> Any:
        stages, every = self._stages, self._microbatches or replicas
        if self._counts_bytes:
            return self._memory(replicas, ahead, has_before).min(0) / kind.share
        each, ((left, ports_left), (right, ports_right)) = every / replicas, sides
        summed = all_reduce_seconds(stages.accumulators, replicas, kind.link)
        crossing, outputs = self._crossing / left, stages.outputs / right
        sends = every * (crossing / ports_left + outputs / ports_right)
        sends = sends + (ring_share(replicas) * stages.accumulators / kind.link.bandwidth if replicas > 1 else 0.0)

        def load(backward: Any) -> Any:
            compute = kind.slowness * (stages.forward + backward)
            computes = each * compute + kind.slowness * stages.update
            if self._overlap == "none":
                computes = computes + 2 * each * (crossing + outputs)
            waits = np.maximum(summed - compute, 0.0) if self._overlap == "transfers and sums" else summed
            return np.maximum(computes + waits, sends) / every

        if self._limit is None:
            return load(stages.backward[0])
        memory = self._memory(replicas, ahead, has_before)
        fits = memory <= self._limit * kind.share
        again = np.where(fits[self._repeats].any(0), load(stages.backward[-1]), _INFINITE)
        return np.where(fits[~self._repeats].any(0), load(stages.backward[0]), again)

    def _memory(self, replicas: int, ahead: int, has_before: bool) -> Any:
        versions = jpipe.schedules.pipedream_versions(ahead, replicas, replicas > 1, self._microbatches or replicas)
        facts = ScheduleFacts(ahead, versions, self._at_end & (ahead == 1), hidden=0)
        count = memory_in_host if self._in_host else memory_of
        return count(self._stages, facts, replicas, waiting=int(has_before), gradients=0)


def fastest_stages(
    seconds: Callable[[int, int], Any], layers: int, devices: int, replicas: list[int], depth: int | None
) -> list[Placement]:
    """Return the placements with the smallest time of the slowest stage for each number of stages up to `depth`, by the recurrence.

    With `depth` None, return only the best placement with any number of stages. Among equally fast placements, the one with the fewest
    devices is taken; the last devices may stay idle.

    Args:
        seconds: (first device, replicas) -> the seconds of a stage, by its first layer and its last layer plus one; infinity: impossible.
        layers, devices: their numbers.
        replicas: the numbers of replicas that a stage may have.
    """
    seconds, ends, found, step = functools.cache(seconds), np.arange(layers + 1), list[Placement](), math.gcd(*replicas)
    best: Any = np.full((devices + 1, layers + 1), _INFINITE)
    best[0, 0] = 0.0
    choices = list[tuple[Any, Any]]()
    for _ in range(depth or 1):
        longer = best if depth is None else np.full_like(best, _INFINITE)
        begin, count = np.zeros(best.shape, np.int32), np.zeros(best.shape, np.int32)
        choices.append((begin, count))
        reached = (best < _INFINITE).any(1)
        for used in range(step, devices + 1, step):
            if not (sizes := [r for r in replicas if r <= used and reached[used - r]]):
                continue
            before = best[[used - r for r in sizes]]
            times = np.maximum(before[:, :, None], [seconds(used - r, r) for r in sizes]).reshape(-1, layers + 1)
            chosen = times.argmin(0)
            least = times[chosen, ends]
            better = least < longer[used]
            size, first = np.divmod(chosen[better], layers + 1)
            longer[used][better], begin[used][better], count[used][better] = least[better], first, np.array(sizes)[size]
            reached[used] |= depth is None and bool(better.any())
        best = longer
        if (used := int(best[:, layers].argmin())) and best[used, layers] < _INFINITE:
            found.append(_traced(choices, depth is None, used, layers, float(best[used, layers])))
    return found


def _traced(choices: list[tuple[Any, Any]], repeats: bool, used: int, end: int, seconds: float) -> Placement:
    """Return the placement that leads to a state, from the choices for each number of stages, or (`repeats`) the last for all stages."""
    starts, replicas = list[int](), list[int]()
    while end:
        begin, count = choices[-1] if repeats else choices[len(choices) - 1 - len(starts)]
        replicas.append(int(count[used, end]))
        starts.append(int(begin[used, end]))
        used, end = used - replicas[-1], starts[-1]
    return Placement(seconds, tuple(starts[::-1]), tuple(replicas[::-1]))
