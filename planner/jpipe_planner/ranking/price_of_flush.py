"""What a flush costs: the time per sample of the best plan that flushes, relative to the best asynchronous plan."""

from dataclasses import dataclass

import jpipe
from jpipe_planner.ranking.choose import EQUAL, Choice, Ranked

__all__ = ["PriceOfFlush", "price_of_flush"]


@dataclass(frozen=True)
class PriceOfFlush:
    """The best plan that flushes beside the best asynchronous plan.

    An asynchronous plan trains sooner if it reaches the same loss with fewer than `ratio` times the samples. For equal stages and links
    that take no time, the ratio is (m + d - 1)/m.

    Attributes:
        flushing: the best plan that flushes.
        asynchronous: the best plan that does not.
    """

    flushing: Ranked
    asynchronous: Ranked

    @property
    def ratio(self) -> float:
        """The time per sample with the flush, divided by that without."""
        return self.asynchronous.samples_per_second / self.flushing.samples_per_second

    @property
    def is_free(self) -> bool:
        """Whether the plan that flushes is faster than the asynchronous one, or counts as equally fast."""
        return self.ratio <= 1 + EQUAL


def price_of_flush(choice: Choice, asynchronous: Ranked | None = None) -> PriceOfFlush | None:
    """Return the best plan of a choice that flushes beside its best asynchronous plan.

    Args:
        choice: a ranking.
        asynchronous: an asynchronous plan from outside the ranking, for rankings without one.

    Returns:
        The two plans; None if the ranking has only plans of one of the two kinds.
    """
    flushing = next((one for one in choice.ranked if _flushes(one)), None)
    best = next((one for one in choice.ranked if not _flushes(one)), asynchronous)
    return None if flushing is None or best is None else PriceOfFlush(flushing, best)


def _flushes(one: Ranked) -> bool:
    return jpipe.schedules.SCHEDULES[one.candidate.schedule].flushes
