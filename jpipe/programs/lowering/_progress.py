"""The progress of a lowering: the clocks of ranks, the times of results, and pending updates."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jpipe.capabilities.protocol import hooks
from jpipe.plan import Plan
from jpipe.programs._instructions import AllReduce, Release, Update
from jpipe.programs.lowering._listing import Listing
from jpipe.schedules import SCHEDULES


class Pending(NamedTuple):
    """An update by `batch` that waits for a sum or for other stages; it reuses the memory of the version `retires`, if there is one."""

    batch: int
    retires: int | None


class Rank:
    """The clock of a rank: the time at which its last computation ends."""

    def __init__(self, number: int) -> None:
        self.number, self.clock = number, 0


class Worker:
    """The progress of one worker.

    Attributes:
        number: the number of the worker in the plan.
        stage: its stage.
        replica: the number of the replica of the stage.
        rank: its rank.
        backwards: the number of its backwards since batch 0.
        updates: the number of its updates since batch 0.
        read: the newest version that one of its forwards has read; -1 before the first forward.
        oldest: without a stash, the oldest version that the worker holds.
        in_flight: for each microbatch between forward and backward the version that it reads, in order.
        pending: the updates that wait for a sum or for other stages, in order.
    """

    def __init__(self, plan: Plan, number: int, start: int, rank: Rank) -> None:
        self.number, self.rank = number, rank
        self.stage, self.replica = plan.workers[number]
        self.backwards = start * plan.microbatches // plan.replicas[self.stage]
        self.updates = start * plan.updates_per_batch(self.stage)
        self.read, self.oldest = -1, SCHEDULES[plan.schedule].version(plan, self.stage, start * plan.microbatches)
        self.in_flight = deque[int]()
        self.pending: list[Pending] = []

    @property
    def clock(self) -> int:
        """The end of the last computation of its rank."""
        return self.rank.clock

    @clock.setter
    def clock(self, time: int) -> None:
        self.rank.clock = time


class Results:
    """The times from which the results of one kind are available, and the ranks that wait for them.

    Attributes:
        times: the times, by the number of a microbatch or batch.
        waiting: the ranks that wait, by the number of a microbatch or batch.
    """

    __slots__ = ("_woken", "times", "waiting")

    def __init__(self, woken: deque[int]) -> None:
        self._woken = woken
        self.times: dict[int, int] = {}
        self.waiting: dict[int, list[int]] = {}

    def announce(self, number: int, time: int) -> None:
        """Store the time from which a result is available, and wake the ranks that wait for it."""
        self.times[number] = time
        if self.waiting and (waiting := self.waiting.pop(number, None)):
            self._woken.extend(waiting)

    def time(self, number: int, rank: int) -> int | None:
        """Return the time from which a result is available; if there is none yet, return None and wake the rank later."""
        time = self.times.get(number)
        if time is None:
            self.wait(number, rank)
        return time

    def wait(self, number: int, rank: int) -> None:
        """Note that a rank waits for a result; `announce` wakes it."""
        self.waiting.setdefault(number, []).append(rank)


class Availability:
    """The times from which outputs, gradients, sums and results of capabilities are available, and the ranks that wait for them.

    Attributes:
        woken: the ranks that can continue.
    """

    def __init__(self) -> None:
        self.woken: deque[int] = deque()
        self._results: dict[tuple[str, int], Results] = {}  # by (what, stage or worker)

    def of(self, what: str, s: int) -> Results:
        """Return the results of one kind at a stage or worker."""
        if (what, s) not in self._results:
            self._results[what, s] = Results(self.woken)
        return self._results[what, s]

    def wake(self, ranks: Iterable[int]) -> deque[int]:
        """Let only these ranks continue, in this order, and forget which ranks wait; return `woken`."""
        for results in self._results.values():
            results.waiting.clear()
        self.woken.clear()
        self.woken.extend(ranks)
        return self.woken

    def announce(self, what: str, s: int, number: int, time: int) -> None:
        """Store the time from which a result is available, and wake the ranks that wait for it."""
        self.of(what, s).announce(number, time)

    def known(self, what: str, s: int, number: int) -> bool:
        """Return whether a result is available."""
        return number in self.of(what, s).times

    def time(self, what: str, s: int, number: int, worker: Worker) -> int | None:
        """Return the time from which a result is available; if there is none yet, return None and wake the worker's rank later."""
        return self.of(what, s).time(number, worker.rank.number)

    def latest(self, wanted: Iterable[tuple[str, int, int]], worker: Worker) -> int | None:
        """Return the time from which all results are available, or None if one is not; then wait for that one."""
        latest = 0
        for what, s, number in wanted:
            time = self.time(what, s, number, worker)
            if time is None:
                return None
            latest = max(latest, time)
        return latest


class PendingUpdates:
    """Updates that wait for the sum over all replicas, or for other stages.

    A worker has at most two updates that wait only for a sum: of two, the first is made before anything else, so that the worker never
    holds gradients of three batches. Updates that wait for other stages are made at the times of the route.
    """

    def __init__(
        self,
        plan: Plan,
        available: Availability,
        listing: Listing,
        lowerings: Sequence[Any],
        routed: Sequence[bool],
        start: int,
        alike: bool,
    ) -> None:
        self.plan, self.available, self.listing = plan, available, listing
        self._before, self._after = hooks("before_update", lowerings), hooks("after_update", lowerings)
        self._released = hooks("released", lowerings)
        self.summing = [workers[:1] if alike else workers for workers in plan.stage_workers]  # by stage, the workers that are run
        self.begun = [start * plan.updates_per_batch(s) for s in range(plan.depth)]  # by stage, the updates with sums that have begun
        self.routed = routed  # by stage, whether updates are made at the times of the route
        self.arrived: dict[tuple[Any, ...], list[int]] = {}  # by stage and what, the times when its replicas had got to it
        self._sums_elsewhere = {s for lowering in lowerings for s in getattr(lowering, "begins_sums", ())}

    def add(self, worker: Worker, batch: int | None, dead: int | None) -> None:
        """Note the end of a backward; it may complete the gradients of a batch, and may leave a version dead, which nothing reads."""
        pending = worker.pending
        if batch is not None:
            pending.append(Pending(batch, None))
        routed = self.routed[worker.stage]
        is_due = len(pending) == 2 and not routed
        if dead is not None and pending and pending[0].retires is None and (is_due or pending[0].batch == dead):
            pending[0] = Pending(pending[0].batch, dead)  # a due update, or one that starts from this version, reuses its memory
        elif dead is not None:
            self.write_release(worker.clock, worker.number, dead)
        if batch is not None and (len(pending) == 1 or routed) and worker.stage not in self._sums_elsewhere:
            self.begin_sum(worker, batch)

    def settle(self, worker: Worker) -> bool:
        """If two updates are pending, make the first. Return False if the worker must wait for the sum of that update."""
        if len(worker.pending) == 2 and not self.routed[worker.stage]:
            summed = self.available.time("sum", worker.stage, worker.pending[0].batch, worker)
            if summed is None:
                return False
            worker.clock = max(worker.clock, summed)
            self.make(worker, worker.clock)
            if worker.stage not in self._sums_elsewhere:
                self.begin_sum(worker, worker.pending[0].batch)
        return True

    def make(self, worker: Worker, time: int) -> None:
        """Make the first pending update of a worker."""
        pending = worker.pending.pop(0)
        self.write_update(time, worker.number, pending.batch, pending.retires)
        worker.updates += 1

    def write_update(self, time: int, worker: int, batch: int, retires: int | None) -> None:
        """Write an update, and the instructions of capabilities before and after it."""
        for hook in self._before:
            hook(time, worker, batch, retires)
        self.listing.write(time, Update, worker, batch, retires)
        for hook in self._after:
            hook(time, worker, batch, retires)

    def write_release(self, time: int, worker: int, version: int) -> None:
        """Write the release of a version."""
        self.listing.write(time, Release, worker, version)
        for hook in self._released:
            hook(worker, version)

    def begin_sum(self, worker: Worker, batch: int) -> None:
        """Record that a replica has all gradients of a batch. When the last replica has them, the sum begins."""
        s = worker.stage
        if (begins := self.come(s, worker.clock, "sum", batch)) is not None:
            if self.plan.sums_gradients(s):
                self.write_sums(begins, s, AllReduce, batch)
            self.begun[s] += 1
            self.available.announce("sum", s, batch, begins)

    def come(self, s: int, time: int, *what: Any) -> int | None:
        """Record when a replica of stage s has got to something. If all its replicas have, return the time since when, otherwise None."""
        arrived = self.arrived.setdefault((s, *what), [])
        arrived.append(time)
        return max(self.arrived.pop((s, *what))) if len(arrived) == len(self.summing[s]) else None

    def write_sums(self, time: int, s: int, kind: type[AllReduce], *fields: int) -> None:
        """Write the instructions with which all replicas of a stage begin a sum."""
        for w in self.summing[s]:
            self.listing.write(time, kind, w, *fields)
