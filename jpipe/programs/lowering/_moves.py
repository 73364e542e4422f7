"""Moves between a device and the memory of its host, and the updates and releases that they depend on."""

from collections.abc import Sequence
from itertools import chain, islice

from jpipe.ops import OPS
from jpipe.plan import Kept, Plan
from jpipe.programs._instructions import Fetch, Offload, Release, Update, ends_update
from jpipe.programs.lowering._listing import Listing
from jpipe.schedules import SCHEDULES, Action

_OPTIMIZER: tuple[Kept, int] = "optimizer", 0
_LEFT: tuple[Kept, ...] = "residuals", "stash"


class Moves:
    """What each worker has on its device and in host memory, as far as the plan moves it: see `jpipe.plan.HostMemory`.

    Nothing is noted where it moves nothing.

    Args:
        plan: what is lowered.
        listing: where instructions are written.
        start: the batch before which the pipeline is empty.
        updates_at_once: by stage, whether an update follows its last backward at once, and waits for nothing.
    """

    def __init__(self, plan: Plan, listing: Listing, start: int, updates_at_once: Sequence[bool]) -> None:
        self._plan, self._listing, self._updates_at_once = plan, listing, updates_at_once
        self._schedule = SCHEDULES[plan.schedule]
        self._versions: dict[int, list[int]] = {}  # by worker, those alive, the newest last
        self._left: dict[int, list[tuple[Kept, int]]] = {}  # residuals and stashes that may move
        self._away: dict[int, set[tuple[Kept, int]]] = {}  # by worker, what is in host memory
        for w, (s, replica) in enumerate(plan.workers if plan.offload is not None else ()):
            oldest = self._schedule.version(plan, s, start * plan.microbatches + replica)
            self._versions[w] = [*range(oldest, start * plan.updates_per_batch(s) + 1)]
            self._left[w], self._away[w] = [], {_OPTIMIZER} if plan.offloads("optimizer", s) else set()

    def before(self, time: int, worker: int, order: Sequence[Action], n: int, retired: Sequence[int | None]) -> None:
        """Write the moves before entry n of the order of a worker's rank, where the plan moves anything.

        Args:
            time: when it begins.
            worker: the number of the worker.
            order: what the rank computes in the step.
            n: the place of the computation.
            retired: the versions whose memory updates that are pending will take.
        """
        s, versions, alive = self._plan.workers[worker][0], self._versions[worker], self._left[worker]
        op, k = OPS[order[n].op], order[n].microbatch
        coming = [order[n], *islice((order[later] for later in range(n + 1, len(order)) if order[later].stage == s), 2)]
        reads = [self._read_by(s, entry) for entry in coming]
        needed = set(chain(*reads[:2]))  # fetched now, so that the link has the time of one computation
        if self._updates_at_once[s] and op.finishes and ends_update(self._plan, s, k):
            needed |= {_OPTIMIZER, ("versions", versions[-1])}
        stays = needed | {("versions", version) for version in retired if version is not None}
        stays |= {read for read in chain(*reads[2:]) if read[0] != "versions"}
        kept: list[tuple[Kept, int]] = [("versions", version) for version in versions] if self._plan.offloads("versions", s) else []
        for what, number in (*kept, *alive):
            if (what, number) not in stays and (what, number) not in self._away[worker]:
                self._offload(time, worker, what, number)
        for what, number in [moved for moved in (*kept, *alive, _OPTIMIZER) if moved in needed]:
            self._fetch(time, worker, what, number)
        left: list[tuple[Kept, int]] = [(kind, k) for kind in _LEFT if kind in op.leaves and self._plan.offloads(kind, s)]
        self._left[worker] = [*(each for each in alive if each != (op.reads, k)), *left]

    def _read_by(self, s: int, entry: Action) -> set[tuple[str, int]]:
        """Return what a computation of stage s reads that may be in host memory."""
        return {("versions", self._schedule.version(self._plan, s, entry.microbatch)), (OPS[entry.op].reads, entry.microbatch)}

    def update(self, time: int, worker: int, batch: int, retires: int | None) -> None:
        """Write an update and the moves for it."""
        if self._plan.offload is None:
            self._listing.write(time, Update, worker, batch, retires)
            return
        versions = self._versions[worker]
        self._fetch(time, worker, "optimizer", 0)
        for version in versions:
            if version in (batch, retires):
                self._fetch(time, worker, "versions", version)
        self._listing.write(time, Update, worker, batch, retires)
        self._versions[worker] = [*(version for version in versions if version != retires), batch + 1]
        if self._plan.offloads("optimizer", self._plan.workers[worker][0]):
            self._offload(time, worker, "optimizer", 0)

    def release(self, time: int, worker: int, version: int) -> None:
        """Write the release of a version, wherever it is."""
        self._listing.write(time, Release, worker, version)
        if self._plan.offload is not None:
            self._versions[worker].remove(version)
            self._away[worker].discard(("versions", version))

    def fetch_versions(self, time: int, worker: int) -> None:
        """Write the moves that bring all versions to the device."""
        for version in self._versions.get(worker, ()):
            self._fetch(time, worker, "versions", version)

    def _offload(self, time: int, worker: int, what: Kept, number: int) -> None:
        self._listing.move(time, Offload, worker, what, number)
        self._away[worker].add((what, number))

    def _fetch(self, time: int, worker: int, what: Kept, number: int) -> None:
        """Write the move of something to the device, if it is in host memory."""
        if (what, number) in self._away[worker]:
            self._listing.move(time, Fetch, worker, what, number)
            self._away[worker].remove((what, number))
