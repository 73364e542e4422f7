"""The slots of an elastic job. They decide which processes start, and when the job waits or gives up."""

from collections.abc import Collection

from jpipe_train.launch.local.launch_request import Request

_MOST_DOUBLINGS = 10  # how often the time for which a slot is left out can double


class Slots:
    """Places for one process each, such as GPUs. All times are seconds of the same clock.

    If a slot fails too often in a row, its process is not started again for a while, and the other processes continue without it.
    `failures` says how often each slot has failed in a row, without a new checkpoint in between.
    """

    def __init__(self, limits: Request) -> None:
        self._limits = limits
        self.failures = [0] * limits.maximum
        self._left_out = [0] * limits.maximum  # how often each slot was left out in a row
        self._back_at = [0.0] * limits.maximum  # the time from which a process can be started in each slot
        self._short_since: float | None = None  # when the present shortage of processes began

    def fail(self, slot: int, now: float) -> float:
        """Count a failure of a slot. Return the seconds for which it is left out; 0 if it may be tried at once."""
        self.failures[slot] += 1
        if self.failures[slot] < self._limits.max_failures:
            return 0.0
        seconds = self._limits.retry_after * 2.0 ** min(self._left_out[slot], _MOST_DOUBLINGS)
        self._left_out[slot] += 1
        self._back_at[slot] = now + seconds
        return seconds

    def save(self, members: Collection[int]) -> None:
        """Forget the failures of slots after their processes have written a checkpoint."""
        self._short_since = None
        for slot in members:
            self.failures[slot], self._left_out[slot], self._back_at[slot] = 0, 0, 0.0

    def startable(self, now: float) -> list[int]:
        """Return the numbers of the slots in which a process can be started."""
        return [slot for slot, back_at in enumerate(self._back_at) if back_at <= now]

    def wait(self, now: float) -> float | None:
        """Return the seconds until enough processes can be started: 0 if they can be started now, None if the wait would be too long."""
        enough = sorted(self._back_at)[self._limits.minimum - 1]
        if enough <= now:
            return 0.0
        self._short_since = now if self._short_since is None else self._short_since
        return enough - now if enough <= self._short_since + self._limits.shortage_limit else None
