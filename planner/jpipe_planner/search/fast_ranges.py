"""A search for the suffixes of layers that can be placed from a device on, if no stage and no cut may take longer than a bound.

The search goes from the last layer and the last device to the first. The layers from i on can be placed from device a on if some stage
[i, j) on the devices a .. a + r - 1 is fast enough and the layers from j on can be placed from device a + r on. A longer stage is never
faster, so for each i, r and kind of devices there is a farthest end, and it suffices to test the nearest end j after i that can be
continued.
"""

from typing import Any

import numpy as np

import jpipe
from jpipe_planner.cost.devices import MOST_DIFFERING, Kind, level_links
from jpipe_planner.cost.price import cut_seconds
from jpipe_planner.search.partition import Placed, Problem
from jpipe_planner.search.ranges import Ranges

_AT_A_TIME = 32  # numbers of replicas


class FastRanges:
    """The search for the stages of a problem that are fast enough, for all bounds.

    Attributes:
        kinds: the kinds of ranges that a stage can have, first that of the first device alone, each with the possible numbers of replicas.
    """

    def __init__(self, problem: Problem, ranges: Ranges) -> None:
        topology = problem.topology
        self.ranges, self.devices, self._problem = ranges, topology.num_devices, problem
        self.kinds: list[tuple[Kind, Any]] = []
        self._sizes, replicas = (1, *topology.sizes), ranges.replicas
        self._table: list[list[tuple[int, slice]]] = []
        self._between: list[int] = []
        if topology.differing:
            self._list_kinds()
        else:
            self.kinds = [(Kind(), replicas[:1])]
            self.kinds += [
                (Kind(link), replicas[(replicas > 1) & (replicas <= size)])
                for link, size in zip(level_links(topology), topology.sizes, strict=True)
            ]
        self._small = np.int16 if ranges.count < 2**15 - 2 else np.int32
        self._known: dict[tuple[float, bool], list[Any]] = {}

    def _list_kinds(self) -> None:
        """List the kinds of all ranges of devices that differ; from each device on, further devices only make a range slower."""
        if self.devices > MOST_DIFFERING:
            raise jpipe.InputError(
                f"topology: expected at most {MOST_DIFFERING:,} devices for PipeDream's stages where devices differ, found "
                f"{self.devices:,}; name --schedules without pipedream"
            )
        runs: list[list[tuple[int, int, int]]] = []  # (kind, fewest replicas, one more than the most) of the ranges from each device on
        numbers: dict[Kind, int] = {}
        for a in range(self.devices):
            runs.append([])
            for r, kind in enumerate(self._problem.ranges.kinds_from(a), start=1):
                number = numbers.setdefault(kind, len(numbers))
                if runs[-1] and runs[-1][-1][0] == number:
                    runs[-1][-1] = (number, runs[-1][-1][1], r + 1)
                else:
                    runs[-1].append((number, r, r + 1))
        possible = set(self.ranges.replicas.tolist())
        each: list[set[int]] = [set() for _ in numbers]
        for number, first, stop in (run for from_a in runs for run in from_a):
            each[number].update(possible.intersection(range(first, stop)))
        self.kinds = [(kind, np.array(sorted(each[number]), int)) for kind, number in numbers.items()]
        for from_a in runs:
            slices = [(number, slice(*np.searchsorted(self.kinds[number][1], (first, stop)).tolist())) for number, first, stop in from_a]
            self._table.append([(number, chosen) for number, chosen in slices if chosen.start < chosen.stop])
        self._between = [numbers[self._problem.ranges.kind(a - 1, a)] for a in range(1, self.devices)]

    def kinds_from(self, a: int) -> list[tuple[int, slice]]:
        """Return the kinds (indices into `kinds`) of the ranges from device a on, with the replicas of these ranges."""
        if self._table:
            return self._table[a]
        kinds, inner = [(0, slice(0, 1))], a + 1
        for index, (_, replicas) in enumerate(self.kinds[1:], start=1):
            end = (a // self._sizes[index] + 1) * self._sizes[index]
            first, last = np.searchsorted(replicas, (inner - a + 1, end - a + 1))
            if first < last:
                kinds.append((index, slice(first, last)))
            inner = end
        return kinds

    def farthest_ends(self, bound: float, recompute: bool) -> list[Any]:
        """Return one past the last layer of a fast enough stage, for each of `kinds`, its replicas, and each first layer.

        Args:
            bound: seconds per microbatch.
            recompute: whether stages recompute.
        """
        if (bound, recompute) not in self._known:
            self._known[bound, recompute] = [
                self._exact_ends(bound, recompute, *kind) for kind in zip(self.rounded_ends(bound, recompute), self.kinds, strict=True)
            ]
        return self._known[bound, recompute]

    def rounded_ends(self, bound: float, recompute: bool) -> list[Any]:
        """Return the ends of `farthest_ends`, or slightly farther ones, because of rounding."""
        return [self.ranges.ends(bound, replicas, kind, recompute) for kind, replicas in self.kinds]

    def _exact_ends(self, bound: float, recompute: bool, rounded: Any, kind: tuple[Kind, Any]) -> Any:
        """Move back ends that are too far, by the exact cost of the stage."""
        ends, first = rounded.ravel(), np.tile(np.arange(self.ranges.count + 1), len(rounded))
        replicas = np.repeat(kind[1], self.ranges.count + 1)
        unchecked = np.nonzero(first < ends)[0]
        while len(unchecked):
            unchecked = unchecked[self.ranges.seconds(first[unchecked], ends[unchecked], replicas[unchecked], kind[0], recompute) > bound]
            ends[unchecked] -= 1
            unchecked = unchecked[first[unchecked] < ends[unchecked]]
        return ends.reshape(rounded.shape).astype(self._small)

    def windows(self, ends: list[Any], cuts: list[Any]) -> tuple[Any, Any]:
        """Return the first and the last layer that can begin a stage at each device, if each stage has the best devices.

        This is an upper bound of what the topology allows, and cheap: if ranges are ignored, the layers that can be placed from a device
        on have no gaps, so one number describes them. With one level it is exact.

        Args:
            ends: the result of `rounded_ends`.
            cuts: the result of `cuts`.
        """
        count, devices, replicas = self.ranges.count, self.devices, self.ranges.replicas
        farthest = np.zeros((len(replicas), count + 1), np.int64)
        for table, (_, chosen) in zip(ends, self.kinds, strict=True):
            rows = np.searchsorted(replicas, chosen)
            farthest[rows] = np.maximum(farthest[rows], table)
        order = np.arange(count + 1)
        starts = np.stack([np.searchsorted(row, order) for row in farthest])
        allowed = np.any(cuts[1:] or cuts, axis=0)
        after = np.minimum.accumulate(np.where(allowed, order, count)[::-1])[::-1]
        before = np.maximum.accumulate(np.where(allowed, order, 0))
        first, last = np.full(devices + 1, count), np.zeros(devices + 1, int)
        for a in range(1, devices + 1):
            chosen = replicas[: np.searchsorted(replicas, a, side="right")]
            which = np.arange(len(chosen))
            first[devices - a] = starts[which, after[first[devices - a + chosen]]].min()
            last[a] = farthest[which, before[last[a - chosen]]].max()
        return first, last

    def lower_bound(self, recompute: bool) -> float:
        """Return a lower bound on the seconds per microbatch: the slowest layer, and all layers divided among all devices."""
        start = np.arange(self.ranges.count)
        each = [self.ranges.seconds(start, start + 1, replicas[:, None], kind, recompute) for kind, replicas in self.kinds]
        everything = self.ranges.compute(recompute)[-1] / self._problem.ranges.speed
        return max(float(np.concatenate(each).min(0).max()), float(everything))

    def single_stage(self, recompute: bool) -> Placed:
        """Return the fastest stage of all layers."""
        options = []
        for index, chosen in self.kinds_from(0):
            kind, replicas = self.kinds[index]
            options += [(float(self.ranges.seconds(0, self.ranges.count, r, kind, recompute)), r) for r in replicas[chosen].tolist()]
        return Placed(0, self.ranges.count, 0, min(options)[1])

    def cuts(self, bound: float) -> list[Any]:
        """Return which cuts are fast enough, for each of `kinds`; the first and the last one are not cuts."""
        return [cut_seconds(self.ranges.outputs, kind.link) <= bound for kind, _ in self.kinds]

    def kind_between(self, a: int) -> int:
        """Return the index in `kinds` of the range of the devices a - 1 and a."""
        return self._between[a - 1] if self._between else self._problem.topology.level(a - 1, a) + 1


class FastPlacement:
    """The placements of all layers under one bound.

    Attributes:
        feasible: whether all layers can be placed from device 0 on.
    """

    def __init__(self, fast: FastRanges, bound: float, recompute: bool) -> None:
        self._fast, self._bound, self._recompute = fast, bound, recompute
        self._cuts = fast.cuts(bound)
        first, last = fast.windows(fast.rounded_ends(bound, recompute), self._cuts)
        self.feasible = not first[0]
        if not self.feasible:
            return
        self._farthest = farthest = fast.farthest_ends(bound, recompute)
        count, devices = fast.ranges.count, fast.devices
        self._placed = np.zeros((devices + 1, count + 1), bool)
        self._placed[1:, count] = True  # no layer remains: the other devices are idle
        never = count + 1
        self._next = [np.full((devices + 1, count + 1), never, farthest[0].dtype) for _ in fast.kinds]
        order = np.arange(count + 1, dtype=farthest[0].dtype)
        for a in range(devices, -1, -1):
            window = slice(int(first[a]), min(int(last[a]) + 1, count))
            for index, chosen in fast.kinds_from(a) if a < devices else ():
                self._place(a, index, chosen, window)
            for index in range(len(fast.kinds)):
                ends = np.where(self._continued(a, index), order, never)
                self._next[index][a, :-1] = np.minimum.accumulate(ends[:0:-1])[::-1]
        self.feasible = bool(self._placed[0, 0])

    def _place(self, a: int, index: int, chosen: slice, window: slice) -> None:
        """Mark the layers in `window` that can be the first of a stage from device a on, with the `chosen` numbers of replicas of a kind.

        It tries a few numbers of replicas at a time, each time between the first and the last undecided layer; usually few remain.
        """
        replicas, placed = self._fast.kinds[index][1], self._placed[a]
        for begin in range(chosen.start, chosen.stop, _AT_A_TIME):
            undecided = np.nonzero(self._cuts[index][window] & ~placed[window])[0]
            if not len(undecided):
                return
            window = slice(window.start + int(undecided[0]), window.start + int(undecided[-1]) + 1)
            few = slice(begin, min(begin + _AT_A_TIME, chosen.stop))
            ends = self._next[index][a + replicas[few], window]
            placed[window] |= (ends <= self._farthest[index][few, window]).any(0) & self._cuts[index][window]

    def _continued(self, a: int, index: int) -> Any:
        """Return where a stage whose range is of a kind can end so that the layers after it can be placed from device a on."""
        if a == 0:
            return np.zeros_like(self._placed[a])
        allowed = self._placed[a] & self._cuts[index]
        return allowed & self._cuts[self._fast.kind_between(a)] if a < self._fast.devices else allowed

    def any_stages(self) -> tuple[Placed, ...]:
        """Return stages that are fast enough, choosing the fastest that can be continued at each step."""
        ranges, stages, i, a = self._fast.ranges, list[Placed](), 0, 0
        while i < ranges.count:
            options = []
            for index, chosen in self._fast.kinds_from(a):
                kind, all_replicas = self._fast.kinds[index]
                replicas = all_replicas[chosen]
                ends = self._next[index][a + replicas, i]
                good = (ends <= self._farthest[index][chosen, i]) & self._cuts[index][i]
                if good.any():
                    replicas, ends = replicas[good], ends[good].astype(np.int64)
                    seconds = ranges.seconds(i, ends, replicas, kind, self._recompute) * replicas
                    n = np.lexsort((ends, replicas, seconds))[0]
                    options.append((float(seconds[n]), int(replicas[n]), int(ends[n])))
            _, r, j = min(options)
            stages.append(Placed(i, j, a, r))
            i, a = j, a + r
        return tuple(stages)

    def first(self) -> tuple[Placed, ...]:
        """Return the fast enough stages that win ties: fewest stages, fewest devices, from the front earliest cuts, fewest replicas."""
        fast, ranges = self._fast, self._fast.ranges
        base = fast.devices + 1
        least, tables = self._least(base)
        stages, i, a = list[Placed](), 0, 0
        while i < ranges.count:
            options = []
            for index, chosen in fast.kinds_from(a):
                replicas = fast.kinds[index][1][chosen]
                if self._cuts[index][i]:
                    continued = tables[index][a + replicas, 0, i + 1 :] == least[a, i] - base
                    reachable = np.arange(i + 1, ranges.count + 1) <= self._farthest[index][chosen, i][:, None]
                    ends = np.argwhere((continued & reachable).T)
                    options += [(i + 1 + int(j), int(replicas[n])) for j, n in ends[:1]]
            j, r = min(options)
            stages.append(Placed(i, j, a, r))
            i, a = j, a + r
        return tuple(stages)

    def _least(self, base: int) -> tuple[Any, list[Any]]:
        """Return the fewest stages times `base` plus the devices used, by device and layer, and their minima over ranges of 2^k ends."""
        fast, count = self._fast, self._fast.ranges.count
        power = np.array([0, *(length.bit_length() - 1 for length in range(1, count + 1))])
        never = np.iinfo(np.int32).max - base
        least = np.full((fast.devices + 1, count + 1), never, np.int32)
        least[1:, count] = np.arange(1, fast.devices + 1)
        tables = [np.full((fast.devices + 1, power[-1] + 1, count + 1), never, np.int32) for _ in fast.kinds]
        for a in range(fast.devices, -1, -1):
            for index, chosen in fast.kinds_from(a) if a < fast.devices else ():
                starts = np.nonzero(self._placed[a, :count] & self._cuts[index][:count])[0]
                if not len(starts):
                    continue
                ends = self._farthest[index][chosen][:, starts].astype(np.int64)
                k = power[ends - starts]
                rows = (a + fast.kinds[index][1][chosen])[:, None]
                fewest = np.minimum(tables[index][rows, k, starts + 1], tables[index][rows, k, ends + 1 - 2**k])
                fewest = np.where(ends > starts, fewest, never).min(0) + base
                least[a, starts] = np.minimum(least[a, starts], fewest)
            for index, table in enumerate(tables):
                row = table[a]
                row[0] = np.where(self._continued(a, index), least[a], never)
                for k in range(1, len(row)):
                    half = 2 ** (k - 1)
                    row[k] = row[k - 1]
                    row[k, :-half] = np.minimum(row[k - 1, :-half], row[k - 1, half:])
        return least, tables
