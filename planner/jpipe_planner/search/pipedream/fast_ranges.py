"""A search for the suffixes of layers that can be placed from a device on, if no stage and no cut may take longer than a bound.

The search goes from the last layer and the last device to the first. The layers from i on can be placed from device a on if some stage
[i, j) on the devices a .. a + r - 1 is fast enough and the layers from j on can be placed from device a + r on. A longer stage is never
faster, so for each i, r and kind of devices there is a farthest end, and it suffices to test the nearest end j after i that can be
continued.
"""

from functools import cached_property
from typing import Any

import numpy as np

import jpipe
from jpipe_planner.cost.devices import MOST_DIFFERING, Kind, level_links
from jpipe_planner.cost.price import cut_seconds
from jpipe_planner.search.pipedream.partition import Placed, Problem
from jpipe_planner.search.pipedream.ranges import Ranges

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

    def farthest(self, bound: float, recompute: bool) -> Any:
        """Return `farthest_ends` as one array by kind, possible numbers of replicas, and first layer; the last kind is none, and all 0."""
        dense = np.zeros((len(self.kinds) + 1, len(self.ranges.replicas), self.ranges.count + 1), self._small)
        for index, (rows, table) in enumerate(zip(self._rows, self.farthest_ends(bound, recompute), strict=True)):
            dense[index, rows] = table
        return dense

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

    def windows(self, ends: list[Any], cuts: list[Any]) -> tuple[Any, Any] | None:
        """Return the first and the last device from which each layer can be placed, if each stage has the best devices.

        This is an upper bound of what the topology allows, and cheap: only the numbers of devices count. With one level it is exact.

        Args:
            ends: the result of `rounded_ends`.
            cuts: the result of `cuts`.

        Returns:
            An array over the layers each; None if not all layers can be placed.
        """
        count, replicas = self.ranges.count, self.ranges.replicas
        farthest = np.repeat(np.arange(count + 1)[:, None], len(replicas), 1)
        for table, rows in zip(ends, self._rows, strict=True):
            farthest[:, rows] = np.maximum(farthest[:, rows], table.T)
        never = 2 * self.devices + 1
        closed = np.where(np.any(cuts[1:] or cuts, axis=0), 0, never)  # before these layers is no cut
        behind = np.full(count + 1, never)  # the fewest devices for a layer and all later ones
        behind[count] = 0
        for i in range(count - 1, -1, -1):
            fewest = np.minimum.accumulate(np.append(never, behind[i + 1 :] + closed[i + 1 :]))  # by the end of the stage
            behind[i] = min(int((replicas + fewest[farthest[i] - i]).min()), never)
        if behind[0] > self.devices:
            return None
        before = np.full(count + 1, never)  # the fewest devices for all earlier layers
        before[0] = 0
        for i in range(count):
            if before[i] + closed[i] <= self.devices:
                fewest = np.full(count + 1, never)
                fewest[farthest[i, ::-1]] = before[i] + replicas[::-1]  # of several the last one counts, with the fewest replicas
                before[i + 1 :] = np.minimum(before[i + 1 :], np.minimum.accumulate(fewest[::-1])[::-1][i + 1 :])
        return before, self.devices - behind

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

    @cached_property
    def _rows(self) -> list[Any]:
        """For each of `kinds` the places of its replicas among all possible numbers."""
        return [np.searchsorted(self.ranges.replicas, replicas) for _, replicas in self.kinds]

    @cached_property
    def kind_of(self) -> Any:
        """The index in `kinds` of the range from each device with each possible number of replicas; -1: there are not as many devices."""
        kinds = np.full((self.devices, len(self.ranges.replicas)), -1, np.int16 if len(self.kinds) < 2**15 else np.int32)
        for a in range(self.devices):
            for index, chosen in self.kinds_from(a):
                kinds[a, self._rows[index][chosen]] = index
        return kinds

    @cached_property
    def between(self) -> Any:
        """The index in `kinds` of the range of each device but the first one with the device before it."""
        return np.array([self.kind_between(a) for a in range(1, self.devices)], int)

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
        self._cuts = np.stack([*fast.cuts(bound), np.zeros(fast.ranges.count + 1, bool)])
        windows = fast.windows(fast.rounded_ends(bound, recompute), fast.cuts(bound))
        self.feasible = windows is not None
        if windows is None:
            return
        count, devices, never = fast.ranges.count, fast.devices, fast.ranges.count + 1
        self._farthest = fast.farthest(bound, recompute)
        # By kind, first layer and device after the stage: the nearest end so that the layers behind it can be placed from there on.
        self._next = np.full((len(fast.kinds) + 1, count + 1, devices + 1), never, self._farthest.dtype)
        self._placed = np.zeros((count + 1, devices + 1), bool)
        self._placed[count, 1:] = True  # no layer remains: the other devices are idle
        for i in range(count - 1, -1, -1):
            self._next[:, i] = np.where(self._continued(i + 1), i + 1, self._next[:, i + 1])
            self._place(i, np.arange(max(windows[0][i], 0), min(windows[1][i], devices - 1) + 1))
        self.feasible = bool(self._placed[0, 0])

    def _place(self, i: int, undecided: Any) -> None:
        """Mark the devices of `undecided` from which the layers from i on can be placed, trying a few numbers of replicas at a time."""
        replicas = self._fast.ranges.replicas
        for begin in range(0, len(replicas), _AT_A_TIME):
            if not len(undecided) or not self._cuts[:, i].any():
                return
            rows = np.arange(begin, min(begin + _AT_A_TIME, len(replicas)))
            kinds, after = self._fast.kind_of[undecided[:, None], rows], undecided[:, None] + replicas[rows]
            ends = self._next[kinds, i, np.minimum(after, self._fast.devices)]
            placed = ((ends <= self._farthest[kinds, rows, i]) & self._cuts[kinds, i]).any(1)
            self._placed[i, undecided[placed]] = True
            undecided = undecided[~placed]

    def _continued(self, i: int) -> Any:
        """Return where a stage whose range is of a kind can end so that the layers from i on can be placed, by kind and device."""
        allowed = self._placed[i] & self._cuts[:, i, None]
        allowed[:, 0] = False
        allowed[:, 1:-1] &= self._cuts[self._fast.between, i]
        return allowed

    def any_stages(self) -> tuple[Placed, ...]:
        """Return stages that are fast enough, choosing the fastest that can be continued at each step."""
        ranges, stages, i, a = self._fast.ranges, list[Placed](), 0, 0
        while i < ranges.count:
            options = []
            for index, chosen in self._fast.kinds_from(a):
                kind, all_replicas = self._fast.kinds[index]
                replicas = all_replicas[chosen]
                ends = self._next[index, i, a + replicas]
                good = (ends <= self._ends(index, replicas, i)) & self._cuts[index, i]
                if good.any():
                    replicas, ends = replicas[good], ends[good].astype(np.int64)
                    seconds = ranges.seconds(i, ends, replicas, kind, self._recompute) * replicas
                    n = np.lexsort((ends, replicas, seconds))[0]
                    options.append((float(seconds[n]), int(replicas[n]), int(ends[n])))
            _, r, j = min(options)
            stages.append(Placed(i, j, a, r))
            i, a = j, a + r
        return tuple(stages)

    def _ends(self, index: int, replicas: Any, i: int) -> Any:
        """Return the farthest ends of stages from layer i on, with some numbers of replicas of a kind."""
        return self._farthest[index, np.searchsorted(self._fast.ranges.replicas, replicas), i]

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
                if self._cuts[index, i]:
                    continued = tables[index, 0, i + 1 :, a + replicas] == least[i, a] - base
                    reachable = np.arange(i + 1, ranges.count + 1) <= self._ends(index, replicas, i)[:, None]
                    ends = np.argwhere((continued & reachable).T)
                    options += [(i + 1 + int(j), int(replicas[n])) for j, n in ends[:1]]
            j, r = min(options)
            stages.append(Placed(i, j, a, r))
            i, a = j, a + r
        return tuple(stages)

    def _least(self, base: int) -> tuple[Any, Any]:
        """Return the fewest stages times `base` plus the devices used, by layer and device, and their minima over ranges of 2^k ends."""
        fast, count, replicas = self._fast, self._fast.ranges.count, self._fast.ranges.replicas
        power = np.array([0, *(length.bit_length() - 1 for length in range(1, count + 1))])
        never = np.iinfo(np.int32).max - base
        least = np.full((count + 1, fast.devices + 1), never, np.int32)
        least[count, 1:] = np.arange(1, fast.devices + 1)
        tables = np.full((len(fast.kinds) + 1, power[-1] + 1, count + 1, fast.devices + 1), never, np.int32)
        for i in range(count, -1, -1):
            starts = np.nonzero(self._placed[i])[0] if i < count else np.zeros(0, int)
            for begin in range(0, len(replicas) if len(starts) else 0, _AT_A_TIME):
                rows = np.arange(begin, min(begin + _AT_A_TIME, len(replicas)))
                kinds, after = fast.kind_of[starts[:, None], rows], np.minimum(starts[:, None] + replicas[rows], fast.devices)
                ends = self._farthest[kinds, rows, i].astype(np.int64)
                k = power[np.maximum(ends - i, 0)]
                fewest = np.minimum(tables[kinds, k, min(i + 1, count), after], tables[kinds, k, np.maximum(ends + 1 - 2**k, i), after])
                fewest = np.where((ends > i) & self._cuts[kinds, i], fewest, never).min(1) + base
                least[i, starts] = np.minimum(least[i, starts], fewest)
            tables[:, 0, i] = np.where(self._continued(i), least[i], never)
            for k in range(1, power[-1] + 1):
                half = i + 2 ** (k - 1)
                tables[:, k, i] = tables[:, k - 1, i] if half > count else np.minimum(tables[:, k - 1, i], tables[:, k - 1, half])
        return least, tables
