"""Runs of layers that can be a stage with limited memory: with how many microbatches in flight they fit, and under which bound."""

from typing import Any

import numpy as np

from jpipe.plan import repeats_forward
from jpipe_planner.search.pipedream.fast_ranges import FastRanges
from jpipe_planner.search.pipedream.partition import Problem


class FittingRanges:
    """The stages of a problem that fit, for all bounds.

    Attributes:
        ranges: the kinds of devices, as indices into `FastRanges.kinds`, and numbers of replicas that a stage can have.
    """

    def __init__(self, problem: Problem, fast: FastRanges) -> None:
        assert problem.memory is not None
        self._memory = problem.memory
        self._fast, self._ranges = fast, fast.ranges
        self.ranges = [(index, r) for index, (_, replicas) in enumerate(fast.kinds) for r in replicas.tolist()]
        self.kind_indices, self.replicas = (np.array(column) for column in zip(*self.ranges, strict=True))
        self._recompute = all(map(repeats_forward, problem.policies))
        self._kinds = [
            (recompute, policies)
            for recompute in (False, True)
            if (policies := [policy for policy in problem.policies if repeats_forward(policy) == recompute])
        ]
        self._shares = np.array([kind.share for kind, _ in fast.kinds])[self.kind_indices]
        self._fastest = problem.ranges.fastest
        pairs, row = np.unique(np.stack([self._shares, self.replicas], 1), axis=0, return_inverse=True)
        self._row, self._pairs = row.reshape(-1), [(share, int(r)) for share, r in pairs.tolist()]  # memory and replicas of each row
        self._most = [self._most_in_flight(policies) for _, policies in self._kinds]

    def _most_in_flight(self, policies: list[str]) -> Any:
        """Return how many microbatches in flight fit with one of the policies, by memory and replicas, first layer and end; 0: none."""
        count = self._ranges.count
        first, end = np.triu_indices(count + 1, 1)
        most = np.zeros((len(self._pairs), count + 1, count + 1), np.int16 if self._fast.devices < 2**13 else np.int32)
        for row, (share, r) in enumerate(self._pairs):
            memory = share * self._memory
            low = self._fits(first, end, r, np.ones(len(first), int), policies, memory).astype(most.dtype)
            high = low * (-(-2 * self._fast.devices // r) + 1)
            undecided = np.nonzero(low < high)[0]
            while len(undecided):
                middle = (low[undecided] + high[undecided] + 1) // 2
                fits = self._fits(first[undecided], end[undecided], r, middle.astype(np.int64), policies, memory)
                low[undecided[fits]], high[undecided[~fits]] = middle[fits], middle[~fits] - 1
                undecided = undecided[low[undecided] < high[undecided]]
            most[row, first, end] = low
        return most

    def _fits(self, i: Any, j: Any, r: int, ahead: Any, policies: list[str], memory: float) -> Any:
        return np.any([self._ranges.room(i, j, r, ahead, policy, memory) >= 0 for policy in policies], 0)

    def under(self, bound: float) -> Any:
        """Return whether the stage is fast enough and fits with as few in flight as possible, by `ranges`, first layer and end."""
        ranges, fast = self._ranges, self._fast
        compute_after = self._fastest * (ranges.compute(self._recompute)[-1] - ranges.compute(self._recompute))
        devices = (
            compute_after / (max(bound, compute_after[0] / (2 * fast.devices)) or 1.0) * (1 - 1e-9)
        )  # that the remaining layers need at least
        fewest = np.append(np.maximum(np.ceil(devices[:-1]), 1), 0)
        ahead = (1 + np.ceil(fewest / self.replicas[:, None])).astype(np.int64)
        allowed = np.zeros((len(self.ranges), ranges.count + 1, ranges.count + 1), bool)
        for (recompute, _), most in zip(self._kinds, self._most, strict=True):
            fast_enough = np.arange(ranges.count + 1) <= self._farthest(bound, recompute)[:, :, None]
            allowed |= fast_enough & (most[self._row] >= ahead[:, None, :])
        cuts = np.stack(fast.cuts(bound))[self.kind_indices]
        return allowed & cuts[:, :, None] & cuts[:, None, :]

    def _farthest(self, bound: float, recompute: bool) -> Any:
        return np.concatenate(self._fast.farthest_ends(bound, recompute)).astype(np.int64)

    def room(self, bound: float, indices: Any, i: Any, j: Any, ahead: Any, gradients: Any, relaxed: bool) -> Any:
        """Return how many inputs can wait at a stage with its best policy that is fast enough; negative: it does not fit.

        Args:
            bound: seconds per microbatch.
            indices: its index in `ranges`.
            i: its first layer.
            j: one past its last layer.
            ahead: its microbatches in flight.
            gradients: gradients of outputs that wait.
            relaxed: whether a waiting input counts at most as many bytes as its residuals.
        """
        room, memory = np.full(np.broadcast_shapes(np.shape(ahead), np.shape(gradients)), -1), self._shares[indices] * self._memory
        for recompute, policies in self._kinds:
            fast_enough = j <= self._farthest(bound, recompute)[indices, i]
            for policy in policies:
                waiting = self._ranges.room(i, j, self.replicas[indices], ahead, policy, memory, gradients=gradients, relaxed=relaxed)
                room = np.where(fast_enough, np.maximum(room, waiting), room)
        return room
