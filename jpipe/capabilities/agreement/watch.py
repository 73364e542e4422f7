"""Measure, in a traced run, when the sums of agreements begin and end, and which computations wait for them."""

from collections.abc import Sequence

from jpipe.capabilities.agreement.option import agreement_applied
from jpipe.capabilities.agreement.program import Agree, SumChanges
from jpipe.plan import Plan
from jpipe.programs._instructions import Compute, Update
from jpipe.runtime._interpreter import Event
from jpipe.runtime._trace import key_of
from jpipe.runtime.timing._transfer_times import Computation, Moved, TransferWatcher, nbytes


class ChangesWatcher:
    """Records the agreements of this process's workers.

    Args:
        watcher: the watcher that records all moves.
    """

    def __init__(self, watcher: TransferWatcher) -> None:
        self._watcher, self._plan = watcher, watcher.plan
        self._sums: dict[tuple[int, int], Moved] = {}  # by stage and update
        # by worker: its last agreement and that agreement's version, until the version is read
        self._agreed: dict[int, tuple[Moved, int]] = {}

    def __call__(self, event: Event) -> None:
        """Record a sum or an agreement that was just dispatched, or a computation that reads the agreed weights."""
        i = event.instruction
        if isinstance(i, SumChanges):
            self._note_sum(i, event)
        elif isinstance(i, Agree):
            moved = self._sums.get((self._plan.workers[i.worker][0], i.begun))
            if moved is not None:
                self._agreed[i.worker] = moved, i.batch + 1
                if moved.size:  # the agreement may have consumed the changes before the watching thread saw them
                    self._watcher.watch(moved, event.state.weights.read(i.batch + 1), moved.size)
        elif isinstance(i, Compute | Update) and i.worker in self._agreed:
            moved, made = self._agreed[i.worker]
            if made == (i.batch if isinstance(i, Update) else i.version):
                moved.readers.append(key_of(i))
                del self._agreed[i.worker]

    def _note_sum(self, i: SumChanges, event: Event) -> None:
        s = self._plan.workers[i.worker][0]
        if (s, i.batch) not in self._sums:
            workers = tuple(self._plan.stage_workers[s])
            self._sums[s, i.batch] = Moved("changes", workers, i.batch, [(w, "U", i.batch, 0) for w in workers], lasts=True)
            self._watcher.moved.append(self._sums[s, i.batch])
        moved = self._sums[s, i.batch]
        moved.posted = self._watcher.now()
        mean = event.state.updates.get(i.batch, {}).get("changes")
        if mean is not None:  # otherwise other replicas of this process have not contributed yet
            agree = self._plan.agree
            assert agree is not None
            self._watcher.watch(moved, mean, agree.sent_share(len(moved.workers)) * nbytes(mean))


def waits_for(plan: Plan, computations: Sequence[Compute | Update]) -> dict[Computation, list[Computation]]:
    """Return the updates that the agreement waits for, for each first computation that reads the agreed weights."""
    first: dict[tuple[int, int], Computation] = {}  # by worker and version
    for i in computations:
        first.setdefault((i.worker, i.batch if isinstance(i, Update) else i.version), key_of(i))
    before: dict[Computation, list[Computation]] = {}
    for (w, version), key in first.items():
        s = plan.workers[w][0]
        if version and (begun := agreement_applied(plan, s, version - 1)) is not None:
            before[key] = [(other, "U", begun, 0) for other in plan.stage_workers[s]]
    return before
