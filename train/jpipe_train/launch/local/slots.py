"""The slots of an elastic job: which processes are started, and when the job waits or gives up.

A slot is a place for one process, such as a GPU. If a slot fails too often in a row, its process is not started again for a while, and the
rest go on without it. All functions are pure; times are seconds of any clock.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

_MOST_DOUBLINGS = 10  # of the time for which a slot is left out


@dataclass(frozen=True)
class Limits:
    """The limits of an elastic job.

    Attributes:
        minimum: the smallest number of processes that train.
        maximum: the number of processes when none is missing.
        max_failures: how often a slot may fail in a row before it is left out.
        retry_after: seconds for which a slot is left out at first; twice as long each time that it fails again.
        shortage_limit: seconds to wait, in total since the last new checkpoint, while fewer than `minimum` can be started.
    """

    minimum: int
    maximum: int
    max_failures: int = 3
    retry_after: float = 300.0
    shortage_limit: float = 900.0


@dataclass(frozen=True)
class Slot:
    """A place for one process.

    Attributes:
        failures: how often it has failed in a row, without a new checkpoint in between.
        left_out: how often it was left out in a row.
        back_at: the time from which a process can be started in it.
    """

    failures: int = 0
    left_out: int = 0
    back_at: float = 0.0


def after_failure(slots: Sequence[Slot], failed: Collection[int], now: float, limits: Limits) -> tuple[Slot, ...]:
    """Return the slots after some of them have failed."""

    def one(slot: Slot) -> Slot:
        if slot.failures + 1 < limits.max_failures:
            return replace(slot, failures=slot.failures + 1)
        away = limits.retry_after * 2 ** min(slot.left_out, _MOST_DOUBLINGS)
        return Slot(slot.failures + 1, slot.left_out + 1, now + away)

    return tuple(one(slot) if number in failed else slot for number, slot in enumerate(slots))


def after_checkpoint(slots: Sequence[Slot], members: Collection[int]) -> tuple[Slot, ...]:
    """Return the slots after the processes in some of them have written a checkpoint, which clears their failures."""
    return tuple(Slot() if number in members else slot for number, slot in enumerate(slots))


def startable(slots: Sequence[Slot], now: float) -> tuple[int, ...]:
    """Return the numbers of the slots in which a process can be started."""
    return tuple(number for number, slot in enumerate(slots) if slot.back_at <= now)


def wait(slots: Sequence[Slot], now: float, short_since: float, limits: Limits) -> float | None:
    """Return how long to wait until enough processes can be started, 0 if they can now, or None if there are not enough in time.

    Args:
        slots: all of them.
        now: the time.
        short_since: the time since which fewer than the minimum could be started; `now` if that was not the case.
        limits: the limits of the job.
    """
    enough = sorted(slot.back_at for slot in slots)[limits.minimum - 1]
    return max(enough - now, 0.0) if enough <= max(short_since + limits.shortage_limit, now) else None
