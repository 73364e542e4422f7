"""Parallel equal pipelines: every width, depth, schedule, microbatch size and number of microbatches.

This is the search of PipeDream-2BW (ICML 2021, section 4), for all schedules. Data parallelism is a pipeline of one stage.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

import jpipe
from jpipe.schedules import PlainShape, PlanOptions
from jpipe_planner.cost.links import KeepTogether
from jpipe_planner.cost.shape import needs_vertical_sync
from jpipe_planner.search.balance import balance
from jpipe_planner.search.candidate import Candidate
from jpipe_planner.search.estimate import Estimates

EXTRA = (0, 2, 4)  # additional microbatches in flight to try without a flush; `improve` tries the numbers between


def equal_pipelines(
    estimates: Estimates, batch: int, schedules: Sequence[str], *, exact: bool = True, replicas: bool = True, syncs: bool = False
) -> list[Candidate]:
    """Return all plans of w pipelines of d stages on all devices and on fewer, see `_Sweep.sizes`.

    If no plan fits, plans that leave devices idle are added. Each depth is tried with the cuts that balance computations best without and
    with recomputation. If devices differ, plans that leave slow devices idle are tried as well. Without `replicas`, all plans of one
    pipeline are tried, on any number of devices. If updates depend on the gradients of all stages (`syncs`), schedules have `vertical_sync`
    if they need it.
    """
    sweep = _Sweep(estimates, batch, schedules, exact, syncs)
    candidates = [candidate for width, depth in sweep.sizes(replicas) for candidate in sweep.candidates(width, depth)]
    if replicas and all(candidate.over for candidate in candidates if candidate.devices > 1 or estimates.topology.num_devices == 1):
        for width, depth in sweep.smaller():
            fewer = list(sweep.candidates(width, depth))
            candidates += fewer
            if fewer and all(candidate.over for candidate in fewer):
                break  # with fewer stages plans need even more memory
    return candidates


class _Sweep:
    def __init__(self, estimates: Estimates, batch: int, schedules: Sequence[str], exact: bool, syncs: bool) -> None:
        self._estimates, self._batch, self._exact, self._syncs = estimates, int(batch), exact, syncs
        self._layers, self._topology = estimates.layers.count, estimates.topology
        self._schedules = [(name, jpipe.schedules.SCHEDULES[name]) for name in schedules]

    def sizes(self, replicas: bool) -> list[tuple[int, int]]:
        """Return each (w, d) on all devices, a component of a level, or one device; if they differ, the largest w on the fastest."""
        count = self._topology.num_devices
        depths = range(1, min(self._layers, count) + 1)
        if not replicas:
            return [(1, depth) for depth in depths]
        if not self._topology.differing:
            used = sorted({1, *self._topology.sizes}, reverse=True)
            return [(some // depth, depth) for some in used for depth in depths if some % depth == 0]
        leading = {count, *(np.flatnonzero(np.diff(self._topology.slowness)) + 1).tolist()}  # all, and up to each change of speed
        return sorted({(1, 1), *((some // depth, depth) for depth in depths for some in leading if some >= depth)})

    def smaller(self) -> Iterator[tuple[int, int]]:
        """Yield (w, d) with the largest w for each d that leaves devices idle, the largest d first."""
        count = self._topology.num_devices
        for depth in range(min(self._layers, count), 0, -1):
            widths = {self._width(rows, count // depth) for rows in self._estimates.profile.sizes} - {0, count / depth}
            yield from ((width, depth) for width in sorted(widths))

    def _width(self, rows: int, most: int) -> int:
        """Return the largest number of pipelines for which the batch has enough microbatches; 0 if it has too few even for one."""
        whole, remainder = divmod(self._batch, rows)
        if not self._exact or not whole:
            return min(most, whole)
        return 0 if remainder else max(width for width in range(1, most + 1) if whole % width == 0)

    def candidates(self, width: int, depth: int) -> Iterator[Candidate]:
        """Yield all plans of w pipelines of d stages."""
        is_spread = min(width, depth) > 1 and width * depth > self._topology.sizes[0]  # over several servers
        for keep in ("replicas", "stages") if is_spread else ("replicas",):
            for rows in self._estimates.profile.sizes:
                if numbers := self._microbatches(rows * width, depth):
                    yield from self._of_size((width,) * depth, rows, numbers, keep)

    def _of_size(self, replicas: tuple[int, ...], rows: int, numbers: Sequence[int], keep: KeepTogether) -> Iterator[Candidate]:
        width, depth, slices = replicas[0], len(replicas), self._estimates.extras.num_slices
        slowness = self._estimates.links(replicas, keep).slowness.tolist() if self._topology.differing else None
        cuts = {balance(self._estimates.layers.work(rows, repeats), depth, slowness) for repeats in (0, 1)}
        for name, rules in self._schedules:
            if depth == 1 and rules.flushes and not rules.data_parallel:
                continue  # the same plan as with another schedule
            sync = self._syncs and depth > 1 and needs_vertical_sync(name)
            extras = EXTRA if "extra_in_flight" in rules.options and not rules.flushes and depth > 1 else (0,)
            for options in (PlanOptions(extra_in_flight=extra, vertical_sync=sync) for extra in extras):
                for shape in (PlainShape(name, m * width * slices, replicas, options, row_slices=slices) for m in numbers):
                    yield from self._recut(shape, rows, cuts, keep)

    def _recut(self, shape: PlainShape, rows: int, cuts: Iterable[tuple[int, ...]], keep: KeepTogether) -> Iterator[Candidate]:
        """Yield the plans with these cuts. If only some stages recompute to fit, also yield a plan with a cut that balances that."""
        layers, slowness = self._estimates.layers, self._estimates.links(shape.replicas, keep).slowness
        for starts in sorted(cuts):
            candidate = self._estimates.candidate(shape, rows, starts, keep)
            if candidate is None:
                return
            yield candidate
            repeats = [layers.repeats[layers.policies.index(policy)] for policy in candidate.policies]
            if 0 < sum(repeats) < shape.depth:
                once, twice = layers.work(rows, 0), layers.work(rows, 1)
                slower = slowness * (1 + np.array(repeats) * (sum(twice) / sum(once) - 1))
                if (again := balance(once, shape.depth, slower.tolist())) not in cuts:
                    recut = self._estimates.candidate(shape, rows, again, keep)
                    yield from () if recut is None else (recut,)

    def _microbatches(self, rows: int, depth: int) -> tuple[int, ...]:
        """Return the numbers of microbatches of a pipeline to try: powers of two, the depth times powers of two, and the largest number."""
        most, remainder = divmod(self._batch, rows)
        if self._exact:
            return (most,) if most and not remainder else ()
        numbers = {least << k for least in (1, depth) for k in range(most.bit_length()) if least << k <= most}
        return tuple(sorted(numbers | {most} - {0}))
