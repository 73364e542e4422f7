"""Measure when the sums of agreements begin and end, while a run is traced, and which computations wait for them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jpipe.capabilities.agreement.option import agreement_applied
from jpipe.capabilities.agreement.program import Agree, SumChanges
from jpipe.plan import Plan
from jpipe.programs._instructions import Compute, Update
from jpipe.programs._transfers import Transfer
from jpipe.runtime._interpreter import Event
from jpipe.runtime._trace import key_of
from jpipe.runtime._transport import PendingTransfer
from jpipe.runtime.timing._arrivals import Arrivals
from jpipe.runtime.timing._transfers import Computation, nbytes


@dataclass(eq=False)
class _Sum:
    """The sum of the changes of an agreement: when it was last posted and has arrived, and which computations read its result first."""

    workers: tuple[int, ...]
    ranks: tuple[int, ...]
    number: int
    posted: float = 0.0
    size: float = 0.0
    arrived: float = math.nan
    readers: list[Computation] = field(default_factory=list)
    what: str = "changes"


class ChangesWatcher:
    """Notes the agreements of the workers of this process.

    Args:
        plan: the plan of the run.
        now: returns the time.
    """

    def __init__(self, plan: Plan, now: Callable[[], float]) -> None:
        self._plan, self._now = plan, now
        self._sums: dict[tuple[int, int], _Sum] = {}  # by stage and update
        self._lanes: dict[tuple[int, ...], Arrivals[_Sum]] = {}
        self._agreed: dict[int, tuple[_Sum, int]] = {}  # by worker its last agreement and the version that it made, until that is read

    @property
    def moved(self) -> list[_Sum]:
        """What was noted so far."""
        return list(self._sums.values())

    def note(self, event: Event) -> None:
        """Note a sum or an agreement that was just dispatched, or a computation that reads the agreed weights."""
        i = event.instruction
        if isinstance(i, SumChanges):
            self._note_sum(i, event)
        elif isinstance(i, Agree):
            moved = self._sums.get((self._plan.workers[i.worker][0], i.begun))
            if moved is not None:
                self._agreed[i.worker] = moved, i.batch + 1
                if moved.workers in self._lanes:  # the agreement has consumed the changes, perhaps before the lane's thread saw them
                    self._lanes[moved.workers].put(moved, event.state.weights.read(i.batch + 1))
        elif isinstance(i, Compute | Update) and i.worker in self._agreed:
            moved, made = self._agreed[i.worker]
            if made == (i.batch if isinstance(i, Update) else i.version):
                moved.readers.append(key_of(i))
                del self._agreed[i.worker]

    def _note_sum(self, i: SumChanges, event: Event) -> None:
        s, plan = self._plan.workers[i.worker][0], self._plan
        if (s, i.batch) not in self._sums:
            workers = tuple(plan.stage_workers[s])
            self._sums[s, i.batch] = _Sum(workers, tuple(plan.rank_of[w] for w in workers), i.batch)
        moved = self._sums[s, i.batch]
        moved.posted = self._now()
        mean = event.state.updates.get(i.batch, {}).get("changes")
        if mean is None:  # other replicas of this process have still to give their parts
            return
        moved.size = 2 * (len(moved.workers) - 1) / len(moved.workers) * nbytes(mean)
        if isinstance(mean, PendingTransfer):
            mean.when_done(lambda: self._note_arrival(moved))
            return
        if moved.workers not in self._lanes:
            self._lanes[moved.workers] = Arrivals(self._note_arrival)
        self._lanes[moved.workers].put(moved, mean)

    def _note_arrival(self, moved: _Sum) -> None:
        if math.isnan(moved.arrived):
            moved.arrived = self._now()

    def close(self) -> None:
        """Stop when all arrays that are awaited have arrived."""
        for lane in self._lanes.values():
            lane.stop()

    def transfers(self, starts: Mapping[Computation, float], ends: Mapping[Computation, float]) -> tuple[Transfer, ...]:
        """Return the sums, as `TransferWatcher.transfers`."""
        found = []
        for moved in self._sums.values():
            start = max(moved.posted, *(ends.get((w, "U", moved.number, 0), 0.0) for w in moved.workers))
            reader = min(moved.readers, key=starts.__getitem__) if moved.readers else None
            used, read = (math.nan, math.inf) if reader is None else (starts[reader], ends[reader])
            end = used if math.isnan(moved.arrived) else min(moved.arrived, read)
            if reader is not None and end <= start:
                end = read  # the end of an update was noted late
            found.append(Transfer(moved.what, moved.ranks, moved.number, start, end, end, moved.size))
        return tuple(found)


def waits_for(plan: Plan, computations: Sequence[Compute | Update]) -> dict[Computation, list[Computation]]:
    """Return for each computation that is the first to read agreed weights the updates that their agreement waits for."""
    first: dict[tuple[int, int], Computation] = {}  # by worker and version
    for i in computations:
        first.setdefault((i.worker, i.batch if isinstance(i, Update) else i.version), key_of(i))
    before: dict[Computation, list[Computation]] = {}
    for (w, version), key in first.items():
        s = plan.workers[w][0]
        if version and (begun := agreement_applied(plan, s, version - 1)) is not None:
            before[key] = [(other, "U", begun, 0) for other in plan.stage_workers[s]]
    return before
