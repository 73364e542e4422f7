"""Batches with the same instructions, executed one after the other until they repeat."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

_SAME = 1e-9
"""The relative difference of two times that are equal but for rounding."""

Step = TypeVar("Step")


class Batches:
    """The executions of one batch after the other by all ranks, up to where all have begun the batch after the last one.

    What happens in a batch depends on the batch before it. So once everything happens in a batch as in the one before, some time later, it
    does so in all following ones.

    Args:
        ranks: the number of ranks.
        most: the most batches.
        until_periodic: whether to stop after a batch in which everything happens as in the one before.

    Attributes:
        behind: the number of ranks that have not begun the batch after the last one; 0: nothing more is to be executed.
        period: the time from a batch to the next one in which everything happens as in it; None: they did not come to one.
    """

    def __init__(self, ranks: int, most: int, until_periodic: bool) -> None:
        self.behind = self._ranks = ranks
        self.period: float | None = None
        self._most, self._until_periodic = most, until_periodic
        self._times: dict[int, list[list[float]]] = {}  # of each rank, by batch
        self._unfinished = [ranks] * most  # by batch the number of ranks that have not finished it

    def execute(
        self,
        rank: int,
        steps: Sequence[Step],
        begins: int,
        execute: Callable[[Sequence[Step]], Iterator[None]],
        end_batch: Callable[[], list[float]],
    ) -> Iterator[None]:
        """Execute the batches of a rank, and pause where `execute` does.

        Args:
            rank: its number.
            steps: what it executes in a batch.
            begins: the number of its first computation among them.
            execute: executes some of them.
            end_batch: ends a batch, and returns when what happens in it has happened, the start of its first computation first.
        """
        times = self._times[rank] = list[list[float]]()
        for batch in range(self._most):
            yield from execute(steps)
            times.append(end_batch())
            self._unfinished[batch] -= 1
            if self._until_periodic and batch and not self._unfinished[batch] and (period := self._shift(batch)) is not None:
                self.period, self.behind = period, 0
                return
        yield from execute(steps[: begins + 1])
        self.behind -= 1
        yield from execute(steps[begins + 1 :])

    def stuck(self) -> list[int]:
        """Return the ranks that have not finished all batches."""
        return [rank for rank, times in self._times.items() if len(times) < self._most]

    def _shift(self, batch: int) -> float | None:
        """Return how much later everything happens in a batch than in the one before; None if not all of it is as much later."""
        pairs = [times[batch - 1 : batch + 1] for times in self._times.values()]
        if any(len(before) != len(after) for before, after in pairs):
            return None
        later = [[b - a for a, b in zip(before, after, strict=True)] for before, after in pairs]
        least, most = min(map(min, later)), max(map(max, later))
        return sum(shifts[0] for shifts in later) / len(later) if most - least <= _SAME * most else None
