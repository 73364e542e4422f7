"""The PipeDream search with limited memory, for problems whose solution without a limit does not fit.

The memory of a stage depends on the later stages, which determine how many of its microbatches are in flight, and on the previous stage,
which determines how many inputs can wait. The search goes from the last layer and device to the first. It describes each way to place
the layers from i on from device a on by a label: how many microbatches the first stage has in flight over all its replicas (`sent` of
`waiting_inputs`), how many the previous stage may have in flight so that the waiting inputs fit, its replicas, from which gradients wait at
the previous stage, and the number of stages and devices.

By the relaxed rules (`Ranges.room`, and no gradients wait) fewer microbatches in flight at a stage never reduce the number allowed at the
previous stage. So a label that is worse than another one in all its numbers can be dropped, and few remain. By the true rules this does not
hold for a stage that keeps less than its input from a forward to its backward, so each number in flight needs its own labels.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from jpipe_planner.cost.memory import waiting_gradients
from jpipe_planner.search.pipedream.fast_ranges import FastRanges
from jpipe_planner.search.pipedream.fitting_ranges import FittingRanges
from jpipe_planner.search.pipedream.partition import Placed

_NEVER = 2**30  # stages


class _Labels(NamedTuple):
    """Arrays of labels; -1 for no label.

    Attributes:
        sent: microbatches in flight at the first stage, over all its replicas; 0: no stage remains.
        most: the largest number that may be in flight at the previous stage.
        size: stages · (devices + 1) + devices; 0 if it is not needed.
        replicas: of the first stage; 0: no stage remains.
    """

    sent: Any
    most: Any
    size: Any
    replicas: Any

    def take(self, *index: Any) -> "_Labels":
        return _Labels(*(column[index] for column in self))


class FittingPlacement:
    """A search for stages that are fast enough and fit.

    Args:
        fast: the fast enough stages of a problem.
        fitting: the stages of the same problem that fit.
        bound: seconds per microbatch.
        relaxed: whether the rules are relaxed; then some stages that do not fit count as fitting.
        at_most: the numbers of stages and devices of a known solution, to find the first one in the order of `FastPlacement.first`; None:
            any solution will do.

    Attributes:
        feasible: whether there are such stages.
    """

    def __init__(self, fast: FastRanges, fitting: FittingRanges, bound: float, relaxed: bool, at_most: tuple[int, int] | None) -> None:
        self._fast, self._fitting, self._bound, self._relaxed = fast, fitting, bound, relaxed
        self._count, self._devices = fast.ranges.count, fast.devices
        self._no_limit = 4 * fast.devices  # more than can be in flight, which is less than twice the devices
        self._counted, self._one = at_most is not None, fast.devices + 1 if at_most else 0  # and the size of a stage
        self._at_most = at_most[0] * self._one + at_most[1] if at_most else _NEVER
        self._allowed = fitting.under(bound)
        self._before = self._fewest_before()
        self._labels = _Labels(*(np.full((self._devices + 1, self._count + 1, 1), -1) for _ in range(4)))
        nothing = (0, self._no_limit, np.arange(1, self._devices + 1) * self._counted, 0)  # no layer remains: the other devices are idle
        for column, value in zip(self._labels, nothing, strict=True):
            column[1:, -1, 0] = value
        if (self._before[:, -1] < _NEVER).any():
            for a in range(self._devices - 1, -1, -1):
                self._keep(a, *self._stages(a))
        self.feasible = bool((self._labels.sent[0, 0] >= 0).any())

    def _ranges(self, a: int) -> Any:
        """Return the indices in `FittingRanges.ranges` of the ranges from device a on."""
        ranges = []
        for index, chosen in self._fast.kinds_from(a):
            first = int(np.searchsorted(self._fitting.kind_indices, index))
            ranges.append(np.arange(first + chosen.start, first + chosen.stop))
        return np.concatenate(ranges)

    def _fewest_before(self) -> Any:
        """Return the fewest stages before each device and layer, with as few microbatches in flight as possible."""
        cuts = self._fast.cuts(self._bound)
        between = [cuts[self._fast.kind_between(a)] for a in range(1, self._devices)]
        allowed = np.stack([cuts[0], *between, cuts[0]])
        before = np.full(allowed.shape, _NEVER)
        before[0, 0] = 0
        for a in range(self._devices):
            ranges, reached = self._ranges(a), np.nonzero(before[a] < _NEVER)[0]
            if len(reached):
                depths = np.where(self._allowed[ranges[:, None], reached], before[a, reached, None] + 1, _NEVER).min(1)
                rows = a + self._fitting.replicas[ranges]
                before[rows] = np.where(allowed[rows], np.minimum(before[rows], depths), _NEVER)
        return before

    def _stages(self, a: int) -> tuple[Any, _Labels]:
        """Return the first layers and the labels of all stages from device a on, each followed by all placements of the later layers."""
        ranges, starts = self._ranges(a), np.nonzero(self._before[a, :-1] < _NEVER)[0]
        ends = self._labels.sent[a + self._fitting.replicas[ranges], :, 0] >= 0
        row, i, j = np.nonzero(self._allowed[ranges[:, None], starts] & ends[:, None, :])
        ranges, i = ranges[row], starts[i]
        r = self._fitting.replicas[ranges][:, None]
        later = self._labels.take(a + r[:, 0], j)
        ahead, size = 1 + -(-later.sent // r), later.size + self._one
        possible = (later.sent >= 0) & (ahead * r <= later.most) & (size + self._one * self._before[a, i][:, None] <= self._at_most)
        row, k = np.nonzero(possible)
        ranges, i, j, r, ahead = ranges[row], i[row], j[row], r[row, 0], ahead[row, k]
        gradients = 0 if self._relaxed else waiting_gradients(r, later.replicas[row, k])
        room = self._fitting.room(self._bound, ranges, i, j, ahead, gradients, self._relaxed)
        sent, most = ahead * r, (room + ahead) * r
        most = np.where(most < sent + 2 * a - 1, most, self._no_limit)  # the previous stage has at most a replicas, so it cannot send more
        return i[room >= 0], _Labels(sent, most, size[row, k], r).take(room >= 0)

    def _keep(self, a: int, i: Any, labels: _Labels) -> None:
        """Store the new labels of device a, without those that others dominate."""
        order = np.lexsort((-labels.most, *(() if self._relaxed else (labels.replicas,)), labels.sent, labels.size, i))
        i, labels = i[order], labels.take(order)
        same = (i, labels.size) if self._relaxed else (i, labels.size, labels.sent)
        number = np.cumsum(np.any([np.diff(column, prepend=-1) != 0 for column in same], 0))
        most = labels.most + number * 2 * self._no_limit  # so that only the largest of each number count
        needed = np.diff(np.maximum.accumulate(most), prepend=-1) > 0
        i, labels = i[needed], labels.take(needed)
        if self._counted and self._relaxed:
            needed = self._needed(i, labels)
            i, labels = i[needed], labels.take(needed)
        rank = np.arange(len(i)) - np.searchsorted(i, i)
        more = int(rank.max(initial=0)) + 1 - self._labels.sent.shape[-1]
        if more > 0:
            self._labels = _Labels(*(np.pad(column, ((0, 0), (0, 0), (0, more)), constant_values=-1) for column in self._labels))
        for column, values in zip(self._labels, labels, strict=True):
            column[a, i, rank] = values

    def _needed(self, i: Any, labels: _Labels) -> Any:
        """Return which labels are not dominated by an earlier one of the same layer, which has a smaller size."""
        needed = np.ones(len(i), bool)
        for start, stop in pairwise([*np.unique(i, return_index=True)[1].tolist(), len(i)]):
            sent, most = labels.sent[start:stop], labels.most[start:stop]
            as_good = (sent <= sent[:, None]) & (most >= most[:, None])
            needed[start:stop] = ~np.tril(as_good, -1).any(1)
        return needed

    def stages(self) -> tuple[Placed, ...] | None:
        """Return stages that are fast enough and fit by the true rules; with `at_most`, those that win ties as in `FastPlacement.first`.

        Returns:
            The stages; None if the search by relaxed rules has no solution, although there may still be some.
        """
        labels = self._labels.take(0, 0)
        size = int(labels.size[labels.sent >= 0].min())
        before, fits = np.zeros(2 * self._devices, int), np.ones((2 * self._devices, self._devices + 1), bool)
        stages, i, a = list[Placed](), 0, 0
        while i < self._count:
            size -= self._one
            step = self._next(i, a, size, before, fits)
            if step is None:
                return None
            j, r, before, fits = step
            stages.append(Placed(i, j, a, r))
            i, a = j, a + r
        return tuple(stages)

    def _next(self, i: int, a: int, size: int, before: Any, fits: Any) -> tuple[int, int, Any, Any] | None:
        """Return the earliest cut with the fewest replicas that can be continued.

        Args:
            i: the first layer.
            a: the first device.
            size: the size of the placement after this stage.
            before: for each number in flight at this stage the number at the previous stage.
            fits: whether the earlier stages fit with it, and with each number of replicas of this stage.

        Returns:
            The range of the stage, its end, and `before` and `fits` for the next stage; None if there is none.
        """
        later, ranges, after = np.arange(len(fits)), self._ranges(a), np.arange(self._devices + 1)
        for j, row in np.argwhere(self._allowed[ranges, i].T).tolist():
            r = int(self._fitting.replicas[ranges[row]])
            labels = self._labels.take(a + r, j)
            labels = labels.take((labels.sent >= 0) & (labels.size == size))
            if len(labels.sent):
                ahead = 1 + -(-later // r)
                sent = np.minimum(ahead * r, len(fits) - 1)
                wait = np.maximum(-(-before[sent] // r) - ahead, 0)
                relaxed = self._relaxed and self._counted  # otherwise the first one that fits could be skipped
                gradients = np.zeros_like(after) if self._relaxed else waiting_gradients(r, after)
                room = self._fitting.room(self._bound, ranges[row], i, j, ahead[:, None], gradients, relaxed)
                allowed = fits[sent, r, None] & (room >= wait[:, None])
                if (allowed[labels.sent, labels.replicas] & (sent[labels.sent] <= labels.most)).any():
                    return j, r, sent, allowed
        return None
