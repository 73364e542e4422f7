"""The bytes of a rank: what it holds at most and over time, and what it sends and moves. They do not depend on times."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from jpipe.programs._timeline import MemorySample
from jpipe.programs.prediction._actions import Actions, RankActions, Versions
from jpipe.programs.prediction._prices import Change, Prices


class Memory:
    """The bytes of the ranks of a program.

    Args:
        actions: the program.
        prices: of its actions.
    """

    def __init__(self, actions: Actions, prices: Prices) -> None:
        self._prices = prices
        self._changes: Any = Change._make(map(np.array, zip(*(prices.change(*change) for change in actions.changes), strict=True)))

    def most(self, rank: RankActions) -> tuple[int, int, int, int, int]:
        """Return the fields of a `Prediction` for one rank: held, peak, moved, host and host moved bytes."""
        if not rank.workers:
            return 0, 0, 0, 0, 0
        live, running, sent, _, _, in_host, moved = self._changes
        added, running, sent, in_host, moved = (changes[rank.changes] for changes in (live, running, sent, in_host, moved))
        live = np.cumsum(added)
        peak = max(live.max(), (live - added + running).max())
        held, peak, sent, in_host, moved = (x.item() for x in (live.max(), peak, sent.sum(), np.cumsum(in_host).max(), moved.sum()))
        return held, peak, sent, in_host, moved

    def samples(self, rank: RankActions, ends: Iterable[float]) -> tuple[MemorySample, ...]:
        """Return what a rank holds at the beginning, and at the ends of its computations and updates."""
        if not rank.workers:
            return ()
        kinds = self._changes.live, self._changes.residuals, self._changes.optimizer
        live, residuals, optimizer = (np.cumsum(changes[rank.changes]).tolist() for changes in kinds)
        accumulators, samples = sum(self._prices.costs[worker.stage].accumulators for worker in rank.workers), list[MemorySample]()
        last, weights = None, dict[int, int]()
        held = [rank.first, *((work.changes, work.versions) for work in rank.works)]
        for time, (count, versions) in zip((0.0, *ends), held, strict=True):
            if versions is not last:
                last, weights = versions, self._weights(versions)
            n = count - 1
            other = live[n] - sum(weights.values()) - optimizer[n] - accumulators - residuals[n]
            samples.append(MemorySample(time, weights, optimizer[n], accumulators, residuals[n], other))
        return tuple(samples)

    def _weights(self, versions: Versions) -> dict[int, int]:
        """Return the bytes of each version on the device; what all of them share counts with the oldest one."""
        weights: dict[int, int] = {}
        for s, of_worker in versions:
            cost = self._prices.costs[s]
            for version, missing in of_worker:
                frozen = cost.frozen if version == of_worker[0][0] else 0
                weights[version] = weights.get(version, 0) + cost.trained + frozen - self._prices.share(s, missing)
        return dict(sorted(weights.items()))
