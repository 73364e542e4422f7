"""Moves between a device and host memory: their places in a program, their verification and their cost."""

from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Self

from jpipe.capabilities.host_memory.option import Kept, offloads
from jpipe.capabilities.protocol import LoweringHooks, MessageHooks, ProgramHooks, VerifyHooks
from jpipe.ops import OPS
from jpipe.plan import Plan
from jpipe.programs._costs import StageCost
from jpipe.programs._instructions import Compute, Instruction, Update, ends_update
from jpipe.programs._transfers import HOST
from jpipe.programs._verify import Verifier
from jpipe.programs.lowering import Run
from jpipe.programs.lowering._progress import Worker
from jpipe.programs.prediction import _actions as prediction
from jpipe.programs.prediction._prices import Change, Prices
from jpipe.schedules import Action

_Moved = tuple[str, int]
"""The kind and the number of what may be moved."""

_OPTIMIZER: _Moved = "optimizer", 0
_LEFT: tuple[Kept, ...] = "residuals", "stash"


@dataclass(frozen=True, slots=True)
class _Move(Instruction):
    """A move. Its number is the weight version, the microbatch of residuals or of a stash, or 0 for the optimizer state."""

    worker: int
    what: Kept
    number: int

    def later(self, microbatches: int, updates: int) -> Self:
        """Return the same move, shifted by this many microbatches and updates of its stage."""
        return replace(self, number=self.number + {"optimizer": 0, "versions": updates}.get(self.what, microbatches))


@dataclass(frozen=True, slots=True)
class Offload(_Move):
    """Begin to move arrays to host memory, and free them on the device."""


@dataclass(frozen=True, slots=True)
class Fetch(_Move):
    """Begin to move arrays back from host memory to the device."""


def _at_rest(plan: Plan, s: int) -> set[_Moved]:
    """Return what a stage has in host memory while the pipeline is empty."""
    return {_OPTIMIZER} if offloads(plan, "optimizer", s) else set()


# Lowering ------------------------------------------------------------------------------------------------------------------


class _Lowering(LoweringHooks):
    """Tracks what each worker has on its device and in host memory, among the arrays that the plan moves (`jpipe.plan.HostMemory`)."""

    def __init__(self, run: Run) -> None:
        self._run, self._plan = run, run.plan
        self._versions: dict[int, list[int]] = {}  # by worker, the versions alive, the newest last
        self._left: dict[int, list[tuple[Kept, int]]] = {}  # residuals and stashes that may move
        self._away: dict[int, set[_Moved]] = {}  # by worker, the arrays in host memory
        for w, (s, replica) in enumerate(run.plan.workers):
            oldest = run.schedule.version(run.plan, s, run.start * run.plan.microbatches + replica * run.plan.row_slices)
            self._versions[w] = [*range(oldest, run.start * run.plan.updates_per_batch(s) + 1)]
            self._left[w], self._away[w] = [], _at_rest(run.plan, s)

    def before_compute(self, time: int, worker: Worker) -> None:
        """Write the moves before the next computation of a worker."""
        w, s = worker.number, worker.stage
        order, n = self._run.orders[worker.rank.number], self._run.position[worker.rank.number]
        versions, alive = self._versions[w], self._left[w]
        op, k = OPS[order[n].op], order[n].microbatch
        coming = [order[n], *islice((order[later] for later in range(n + 1, len(order)) if order[later].stage == s), 2)]
        reads = [self._read_by(s, entry) for entry in coming]
        needed = set(chain(*reads[:2]))  # fetched one computation early, to hide the transfer
        if self._updates_at_once(s) and op.finishes and ends_update(self._plan, s, k):
            needed |= {_OPTIMIZER, ("versions", versions[-1])}
        stays = needed | {("versions", pending.retires) for pending in worker.pending if pending.retires is not None}
        stays |= {read for read in chain(*reads[2:]) if read[0] != "versions"}
        kept: list[tuple[Kept, int]] = [("versions", version) for version in versions] if offloads(self._plan, "versions", s) else []
        for what, number in (*kept, *alive):
            if (what, number) not in stays and (what, number) not in self._away[w]:
                self._offload(time, w, what, number)
        for what, number in [*kept, *alive]:
            if (what, number) in needed:
                self._fetch(time, w, what, number)
        if _OPTIMIZER in needed:
            self._fetch(time, w, "optimizer", 0)
        left: list[tuple[Kept, int]] = [(kind, k) for kind in _LEFT if kind in op.leaves and offloads(self._plan, kind, s)]
        self._left[w] = [*(each for each in alive if each != (op.reads, k)), *left]

    def _updates_at_once(self, s: int) -> bool:
        """Return whether an update directly follows its last backward, without waiting for anything."""
        return not self._run.sums[s] and not self._run.waits[s]

    def _read_by(self, s: int, entry: Action) -> set[_Moved]:
        """Return what a computation of stage s reads that the plan may have moved to host memory."""
        return {("versions", self._run.schedule.version(self._plan, s, entry.microbatch)), (OPS[entry.op].reads, entry.microbatch)}

    def before_update(self, time: int, worker: int, batch: int, retires: int | None) -> None:
        """Write the moves that bring everything that an update reads to the device."""
        self._fetch(time, worker, "optimizer", 0)
        for version in self._versions[worker]:
            if version in (batch, retires):
                self._fetch(time, worker, "versions", version)

    def after_update(self, time: int, worker: int, batch: int, retires: int | None) -> None:
        """Write the move of the optimizer state to host memory."""
        self._versions[worker] = [*(version for version in self._versions[worker] if version != retires), batch + 1]
        if offloads(self._plan, "optimizer", self._plan.workers[worker][0]):
            self._offload(time, worker, "optimizer", 0)

    def released(self, worker: int, version: int) -> None:
        """Record the release of a version, whether it is on the device or in host memory."""
        self._versions[worker].remove(version)
        self._away[worker].discard(("versions", version))

    def drained(self, time: int, worker: int) -> None:
        """Write the moves that bring all versions to the device."""
        for version in self._versions[worker]:
            self._fetch(time, worker, "versions", version)

    def _offload(self, time: int, worker: int, what: Kept, number: int) -> None:
        self._write(time, Offload, worker, what, number)
        self._away[worker].add((what, number))

    def _fetch(self, time: int, worker: int, what: Kept, number: int) -> None:
        """Write a move to the device, if the arrays are in host memory."""
        if (what, number) in self._away[worker]:
            self._write(time, Fetch, worker, what, number)
            self._away[worker].remove((what, number))

    def _write(self, time: int, kind: type[Offload | Fetch], worker: int, what: Kept, number: int) -> None:
        each = self._plan.row_slices if what in _LEFT else 0  # versions have the same numbers in all replicas
        self._run.listing.write_each(time, worker, lambda j: kind(worker + j, what, number + j * each))


# Verification --------------------------------------------------------------------------------------------------------------


class _Verification(VerifyHooks):
    """Tracks what one worker has in host memory."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._away = _at_rest(verifier.plan, verifier.stage)
        self.checks = {Offload: self._offload, Fetch: self._fetch}

    def _offload(self, i: Offload) -> None:
        self._check_kept(i)
        if (i.what, i.number) in self._away:
            self._verifier.fail(f"{i}: it is in host memory already")
        self._away.add((i.what, i.number))

    def _fetch(self, i: Fetch) -> None:
        self._check_kept(i)
        if (i.what, i.number) not in self._away:
            self._verifier.fail(f"{i}: it is not in host memory")
        self._away.remove((i.what, i.number))

    def _check_kept(self, i: Offload | Fetch) -> None:
        """Check that the plan moves these arrays, and that they exist."""
        verifier = self._verifier
        if not offloads(verifier.plan, i.what, verifier.stage):
            verifier.fail(f"{i}: the plan keeps the {i.what} of stage {verifier.stage} on the device")
        if i.what == "versions" and i.number not in verifier.versions:
            verifier.fail(f"{i}: the stage has versions {sorted(verifier.versions)}")
        if i.what == "versions":
            verifier.check_whole(i.number, i)  # no instruction writes into a version in host memory
        if i.what in _LEFT and (i.what, i.number) not in verifier.buffers:
            verifier.fail(f"{i}: it is not there")

    def needs(self, what: str, number: int, i: Instruction) -> None:
        """Check that the arrays that an instruction reads are on the device."""
        if (what, number) in self._away:
            self._verifier.fail(f"{i}: it needs {what} {number}, which is in host memory; fetch it before")

    def freed(self, version: int) -> None:
        self._away.discard(("versions", version))

    def end(self) -> None:
        if self._away != (expected := _at_rest(self._verifier.plan, self._verifier.stage)):
            self._verifier.fail(f"{sorted(self._away)} are left in host memory, expected {sorted(expected)}")


# Price ---------------------------------------------------------------------------------------------------------------------


def _write_move(worker: prediction.Worker, i: Offload | Fetch) -> None:
    """Move arrays over the link to the host, after earlier moves in this direction, and after the arrays exist."""
    rank, to_host = worker.rank, isinstance(i, Offload)
    (worker.away.add if to_host else worker.away.remove)((i.what, i.number))
    worker.slice = i.number % worker.all.plan.row_slices if i.what in _LEFT else 0
    worker.change("move", i.what, to_host)
    rank.note_versions()
    place, ends = worker.place("moved", i.what, i.number), (i.worker, HOST) if to_host else (HOST, i.worker)
    worker.all.there.add(place)
    rank.queue.append((prediction.MOVE, worker.route(i.what, ends), i.number, place))
    if worker.all.transfers_block:
        worker.wait("moved", i.what, i.number)


def _change(prices: Prices, cost: StageCost, s: int, what: Kept, to_host: bool) -> Change:
    """Return the change of bytes by a move."""
    size = _size(cost, what)
    live = -size if to_host else size
    kinds = {"optimizer": live if what == "optimizer" else 0, "residuals": live if what in _LEFT else 0}
    return Change(live, in_host=-live, moved=size, **kinds)


def _size(cost: StageCost, what: Kept) -> int:
    """Return the bytes that a move takes along; carries stay on the device, because other slices of the rows read them, too."""
    return {"optimizer": cost.optimizer, "versions": cost.trained, "residuals": cost.residuals, "stash": cost.stash}[what]


def _message(letter: str, what: Kept) -> MessageHooks:
    """Return the hooks of a kind of move, which costs its size in bytes."""

    def price(prices: Prices, source: int, to: int) -> tuple[int, int, int]:
        s, _ = prices.plan.workers[max(source, to)]
        return 0, _size(prices.costs[s], what), 0

    return MessageHooks(letter, "#F0E0A0", "move to or from host memory", has_number=what != "optimizer", price=price)


def _before_compute(worker: prediction.Worker, i: Compute) -> None:
    """Wait for the moved arrays that a computation reads."""
    worker.wait("moved", "versions", i.version)
    worker.wait("moved", OPS[i.op].reads, i.microbatch)


def _before_update(worker: prediction.Worker, i: Update) -> None:
    """Wait for the moved arrays that an update reads."""
    for kept in (_OPTIMIZER, ("versions", i.batch), ("versions", i.retires)):
        worker.wait("moved", *kept)


_LETTERS: dict[Kept, str] = {"optimizer": "o", "versions": "v", "residuals": "r", "stash": "h"}

PROGRAM = ProgramHooks(
    instructions=(Offload, Fetch),
    messages={what: _message(letter, what) for what, letter in _LETTERS.items()},
    carries_over=True,
    lower=_Lowering,
    verify=_Verification,
    writers={Offload: _write_move, Fetch: _write_move},
    changes={"move": _change},
    begin=lambda worker: worker.away.update(_at_rest(worker.all.plan, worker.stage)),
    before_compute=_before_compute,
    before_update=_before_update,
)
