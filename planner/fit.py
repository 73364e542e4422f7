"""The PipeDream search where workers have too little memory for its answer without a limit.

What a stage holds depends on the stages behind it, which say how many of its microbatches are in flight, and on the one before it, which
says how many inputs can wait. So from the last layer and worker to the first, what is known of the layers from i on, placed from worker a
on, are pairs: how many microbatches their first stage has in flight over all its replicas (`sent` of `waiting_inputs`), and how many of
the stage before it may be at most, for the inputs that wait to fit.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from planner.partition import Placed, Problem
from planner.reach import Reach

_Labels = list[dict[int, Any]]
"""For each worker and number in flight: the most in flight before it that fit, by first layer; -1 where nothing does."""

_NO_LIMIT = 2**40  # microbatches


class Fit:
    """Stages that are fast enough and fit."""

    def __init__(self, problem: Problem, reach: Reach, bound: float, memory: float) -> None:
        self._problem, self._runs, self._reach, self._memory = problem, reach.runs, reach, memory
        self._bound, self._cuts = bound, reach.cuts(bound)
        self._kinds = [
            (policies, reach.farthest(bound, again))
            for again in (False, True)
            if (policies := [policy for policy in problem.policies if (policy != "none") == again])
        ]
        self._rooms = dict[tuple[int, int, int], tuple[Any, Any]]()

    def some(self) -> tuple[Placed, ...] | None:
        """Any stages that are fast enough and fit; None: there are none."""
        labels = self._ends(range(1, self._reach.workers + 1))
        for a in range(self._reach.workers, 0, -1):
            self._extend(labels[a], a, labels)
        return self._walk([labels] * (self._runs.count + 1)) if self._complete(labels) else None

    def first(self) -> tuple[Placed, ...]:
        """Of all that are fast enough and fit the same as `Reached.first`."""
        depth = len(self._layered(range(1, self._reach.workers + 1), self._runs.count))
        for end in range(1, self._reach.workers + 1):
            layers = self._layered([end], depth)
            if len(layers) == depth and self._complete(layers[-1]):
                return self._walk(layers[::-1])
        raise AssertionError("expected a bound under which something fits")

    def _ends(self, workers: Iterable[int]) -> _Labels:
        labels: _Labels = [{} for _ in range(self._reach.workers + 1)]
        for a in workers:
            labels[a][0] = np.full(self._runs.count + 1, -1)
            labels[a][0][-1] = _NO_LIMIT
        return labels

    def _complete(self, labels: _Labels) -> bool:
        return any(most[0] >= 0 for most in labels[0].values())

    def _layered(self, workers: Iterable[int], depth: int) -> list[_Labels]:
        """The labels of no stage, of one, of two, until all layers are placed or there are `depth` of them."""
        layers = [self._ends(workers)]
        while len(layers) <= depth and not self._complete(layers[-1]):
            labels: _Labels = [{} for _ in range(self._reach.workers + 1)]
            for a, here in enumerate(layers[-1]):
                self._extend(here, a, labels)
            layers.append(labels)
        return layers

    def _extend(self, here: dict[int, Any], a: int, labels: _Labels) -> None:
        """Put each possible stage before what is placed from worker a on."""
        for place, r in self._before(a):
            window = self._reach.window(a - r, self._bound, "none" not in self._problem.policies)
            for sent, most in here.items() if window.start < window.stop else ():
                ahead = 1 + -(-sent // r)
                good = self._open(most, a, place, ahead * r)
                if good.any():
                    ends, rooms = self._room(place, r, ahead)
                    room = np.where(good[ends[window]], rooms[window], -1).max(1, initial=-1)
                    good = (room >= 0) & self._cuts[place][window]
                    if good.any():
                        before = labels[a - r].setdefault(ahead * r, np.full(self._runs.count + 1, -1))
                        found = np.where(good, np.minimum((room + ahead) * r, _NO_LIMIT), -1)
                        before[window] = np.maximum(before[window], found)

    def _before(self, a: int) -> list[tuple[int, int]]:
        """The levels, by their place, and replicas that ranges which end before worker a can have."""
        topology = self._problem.topology
        return [(topology.level(a - r, a - 1) + 1, r) for r in self._runs.replicas.tolist() if r <= a]

    def _open(self, most: Any, a: int, place: int, sent: int) -> Any:
        """Where a stage with so many microbatches in flight can end before what is placed from worker a on."""
        good = (most >= sent) & self._cuts[place]
        return good & self._cuts[self._reach.between(a)] if a < self._reach.workers else good

    def _room(self, place: int, r: int, ahead: int) -> tuple[Any, Any]:
        """For each first layer and each end that is near enough: the end, and how many inputs may wait; -1: too slow or too large."""
        if (place, r, ahead) not in self._rooms:
            count = self._runs.count
            replicas = self._reach.levels[place][1]
            row = int(np.searchsorted(replicas, r))
            farthest = [(policies, ends[place][row].astype(np.int64)) for policies, ends in self._kinds]
            start = np.arange(count + 1)
            width = max(int((ends - start).max()) for _, ends in farthest)
            end = start[:, None] + np.arange(1, width + 1)
            near = [(policies, end <= ends[:, None]) for policies, ends in farthest]
            end = np.minimum(end, count)
            rooms = np.full(end.shape, -1)
            first = np.minimum(start, count - 1)[:, None]
            for policies, good in near:
                for policy in policies:
                    found = self._runs.room(first, np.maximum(end, first + 1), r, ahead, policy, self._memory)
                    rooms = np.where(good, np.maximum(rooms, found), rooms)
            self._rooms[place, r, ahead] = end, rooms
        return self._rooms[place, r, ahead]

    def _walk(self, layers: Sequence[_Labels]) -> tuple[Placed, ...]:
        """The stages themselves, from the front: each time the earliest cut, then the fewest replicas."""
        stages, i, a = list[Placed](), 0, 0
        alive = {(0, sent) for sent, most in layers[0][0].items() if most[0] >= 0}  # in flight over the replicas before, and here
        for labels in layers[1:]:
            options = dict[tuple[int, int], set[tuple[int, int]]]()
            for before, sent in alive:
                for r in self._runs.replicas[: np.searchsorted(self._runs.replicas, self._reach.workers - a, side="right")].tolist():
                    if sent % r == 0:
                        self._options(labels, i, a, r, before, sent, options)
            j, r = min(options)
            stages.append(Placed(i, j, a, r))
            i, a, alive = j, a + r, options[j, r]
            if i == self._runs.count:
                break
        return tuple(stages)

    def _options(self, labels: _Labels, i: int, a: int, r: int, before: int, sent: int, options: dict[Any, set[Any]]) -> None:
        place, ahead = self._problem.topology.level(a, a + r - 1) + 1, sent // r
        if not self._cuts[place][i]:
            return
        ends, rooms = self._room(place, r, ahead)
        enough = rooms[i] >= max(-(-before // r) - ahead, 0)
        for behind, most in labels[a + r].items():
            if 1 + -(-behind // r) == ahead:
                good = self._open(most, a + r, place, sent)
                for j in np.unique(ends[i][enough & good[ends[i]]]).tolist():
                    options.setdefault((j, r), set()).add((sent, behind))
