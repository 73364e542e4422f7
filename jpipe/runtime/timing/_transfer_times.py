"""Measure, in a traced run, when messages between ranks, sums over replicas and moves to host memory begin and end."""

import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jpipe.capabilities.protocol import made, merged
from jpipe.capabilities.registry import exchange_of, runtimes, runtimes_of, values_of
from jpipe.meshes._partition import shard_bytes
from jpipe.ops import OPS, Leaves
from jpipe.plan import Plan
from jpipe.programs._instructions import AllReduce, Receive, Send
from jpipe.programs._transfers import HOST, Transfer, in_rows
from jpipe.runtime._interpreter import Event
from jpipe.runtime._transport import PendingTransfer
from jpipe.runtime.state import WorkerState

Tree = Any
Computation = tuple[int, str, int, int]
"""A computation: (worker, op, microbatch, number of pieces that follow). An update has the op "U" and a batch."""


_Name = tuple[str, tuple[int, ...], int]
"""A transfer: (kind, sender and receiver or all replicas, microbatch or update)."""


@dataclass(eq=False)
class Moved:
    """A message, a sum or a move to or from host memory, with its known times in seconds.

    Attributes:
        what, number: as in a `Transfer`.
        workers: the sender and the receiver (one may be `HOST`), or all replicas.
        makers: the computations that may make the arrays; one or more of them do.
        readers: the computations that read the arrays.
        lasts: whether the transfer certainly takes time, even if its arrival was recorded before its computation had ended.
        posted: the time when it was last posted; NaN: this process has not posted it.
        arrived: the time of its arrival; NaN: this process has not seen the arrival.
        size: the size in bytes.
    """

    what: str
    workers: tuple[int, ...]
    number: int
    makers: Sequence[Computation] = ()
    readers: list[Computation] = field(default_factory=list)
    lasts: bool = False
    posted: float = math.nan
    arrived: float = math.nan
    size: float = 0.0

    def transfer(self, plan: Plan, starts: Mapping[Computation, float], ends: Mapping[Computation, float]) -> Transfer:
        """Return the `Transfer` with the times that follow from the computations, see `TransferWatcher.transfers`."""
        made = max((ends[key] for key in self.makers if key in ends), default=0.0)
        start = math.nan if math.isnan(self.posted) else max(self.posted, made)
        reader = min((key for key in self.readers if key in starts), key=starts.__getitem__, default=None)
        used, read = (math.nan, math.inf) if reader is None else (starts[reader], ends[reader])
        end = used if math.isnan(self.arrived) else min(self.arrived, read)
        if self.lasts and end <= start:
            end = math.nextafter(start, math.inf) if reader is None else read  # without a reader its end is unknown
        ranks = tuple(w if w == HOST else plan.rank_of[w] for w in self.workers)
        return Transfer(self.what, ranks, self.number, start, end, end, self.size)


class Arrivals:
    """A thread that waits for arrays, one after the other.

    Args:
        note: a function that is called with the first argument of `put` when its arrays have arrived.

    Attributes:
        error: the first error of a wait: a computation failed, or the run consumed the arrays before this thread waited for them.
    """

    def __init__(self, note: Callable[[Any], None]) -> None:
        self._note = note
        self.error: Exception | None = None
        self._queue: queue.SimpleQueue[tuple[Any, Tree] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def put(self, moved: Any, tree: Tree) -> None:
        """Queue the arrays of `tree`: the thread waits for them after all earlier ones."""
        self._queue.put((moved, tree))

    def stop(self) -> None:
        """Wait until all queued arrays have arrived, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _wait(self) -> None:
        while (item := self._queue.get()) is not None:
            moved, tree = item
            try:
                jax.block_until_ready(tree)
                self._note(moved)
            except Exception as error:
                self.error = self.error or error
            del item, tree  # so that the waiting thread keeps no arrays alive


class TransferWatcher:
    """Records when the messages and sums of this process's workers are posted, and when they arrive.

    Arrays that one transfer thread moves arrive in order, so each transfer thread has one thread that waits for its arrays. A transfer from
    another process that is a `PendingTransfer` reports its end itself.

    Args:
        plan: the plan of the run.
        began: the value of `time.perf_counter` that counts as 0.

    Attributes:
        plan: the plan of the run.
        moved: the transfers that were recorded so far; capabilities add theirs.
    """

    def __init__(self, plan: Plan, began: float) -> None:
        self.plan, self._began = plan, began
        self.moved: list[Moved] = []
        self._known: dict[tuple[_Name, int], Moved] = {}  # messages and sums, by name and the number of pieces of a sum that follow
        self._arrivals_by_workers: dict[tuple[int, ...], Arrivals] = {}
        self._notes = made("watch", runtimes_of(plan), self)

    def now(self) -> float:
        """Return the time since `began`, in seconds."""
        return time.perf_counter() - self._began

    def note(self, event: Event) -> None:
        """Record a send, a receive, a sum or a move that was just dispatched."""
        i, plan = event.instruction, self.plan
        for note in self._notes:
            note(event)
        if isinstance(i, Send) and plan.rank_of[i.worker] != plan.rank_of[i.to]:
            self._of((i.message, (i.worker, i.to), i.microbatch)).posted = self.now()
        elif isinstance(i, Receive) and plan.rank_of[i.worker] != plan.rank_of[i.source]:
            received = _received(i, event.state, plan)
            self.watch(self._of((i.message, (i.source, i.worker), i.microbatch)), received, nbytes(received))
        elif isinstance(i, AllReduce):
            replicas = tuple(plan.stage_workers[plan.workers[i.worker][0]])
            moved = self._of(("sum", replicas, i.batch), i.following)
            moved.posted = self.now()
            total = event.state.updates.get(i.batch, {}).get(f"summed{i.piece}")
            if total is not None:  # after the last replica of this process has contributed
                self.watch(moved, total, _sent(total[0], plan, len(replicas)))

    def watch(self, moved: Moved, tree: Tree, size: float) -> None:
        """Record when arrays of `size` bytes arrive."""
        moved.size = size
        if isinstance(tree, PendingTransfer):
            tree.when_done(lambda: self._note_arrival(moved))
        else:
            if moved.workers not in self._arrivals_by_workers:
                self._arrivals_by_workers[moved.workers] = Arrivals(self._note_arrival)
            self._arrivals_by_workers[moved.workers].put(moved, tree)

    def close(self) -> None:
        """Wait until all recorded arrays have arrived, and stop."""
        for arrivals in self._arrivals_by_workers.values():
            arrivals.stop()

    def transfers(self, starts: Mapping[Computation, float], ends: Mapping[Computation, float]) -> tuple[Transfer, ...]:
        """Return the recorded transfers, for `join_transfers`; times that this process does not know are NaN.

        A transfer begins when it is posted and its arrays are computed. If its arrival was not recorded, because the run has already
        consumed its arrays, the transfer ends when the computation that reads it begins. A thread may record an arrival late, so a message
        ends at the latest when the next message of its transfer thread ends. `starts` and `ends` are of this process's computations.
        """
        readers, latest = _readers(self.plan, starts), defaultdict[tuple[int, ...], float](lambda: math.inf)
        for (name, _), moved in reversed(self._known.items()):
            moved.readers = [readers[name]] if name in readers else []
            moved.arrived = min(moved.arrived, latest[moved.workers])
            end = moved.transfer(self.plan, starts, ends).end
            latest[moved.workers] = latest[moved.workers] if math.isnan(end) else min(end, latest[moved.workers])
        return tuple(moved.transfer(self.plan, starts, ends) for moved in self.moved)

    def _of(self, name: _Name, following: int = 0) -> Moved:
        """Return the record of a message or a sum; make one if there is none."""
        if (name, following) not in self._known:
            self._known[name, following] = Moved(*name, _producers(name, following, self.plan))
            self.moved.append(self._known[name, following])
        return self._known[name, following]

    def _note_arrival(self, moved: Moved) -> None:
        if math.isnan(moved.arrived):
            moved.arrived = self.now()


def join_transfers(*processes: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Join the transfers that each process has recorded into the transfers of the run, in order of time.

    The beginning of a message comes from its sender, and its end from its receiver. A sum begins when the last process has contributed.
    Transfers in the same row follow each other, because one link carries them. Transfers with an unknown beginning or end are left out.

    Args:
        processes: `Trace.transfers` of each process. The clocks of all processes must have begun together.
    """
    known: dict[tuple[Any, ...], list[Transfer]] = defaultdict(list)
    for process in processes:
        seen: dict[tuple[Any, ...], int] = defaultdict(int)
        for part in process:
            key = part.what, part.ranks, part.number
            known[*key, seen[key]].append(part)
            seen[key] += 1
    whole = []
    for (what, ranks, number, _), pieces in known.items():
        start, end = _latest(piece.start for piece in pieces), _latest(piece.end for piece in pieces)
        if not math.isnan(start + end):
            end = max(start, end)
            whole.append(Transfer(what, ranks, number, start, end, end, max(piece.size for piece in pieces)))
    joined = []
    for row in in_rows(whole).values():
        free = 0.0
        for transfer in row:
            start = max(transfer.start, free)
            free = max(transfer.end, start)
            joined.append(transfer._replace(start=start, end=free, arrival=free))
    return tuple(sorted(joined, key=lambda transfer: transfer.start))


def _latest(times: Iterable[float]) -> float:
    """Return the latest of the known times; NaN if there is none."""
    return max((time for time in times if not math.isnan(time)), default=math.nan)


def _received(i: Receive, state: WorkerState, plan: Plan) -> Tree:
    """Return the arrays that a worker has just received; they may still be in transfer."""
    if i.message in ("activation", "gradient"):
        return state.microbatches[i.microbatch]["inputs" if i.message == "activation" else "message"]
    return merged("messages", runtimes().values())[i.message].received(state, i, i.microbatch // plan.microbatches)


def nbytes(tree: Tree) -> float:
    """Return the bytes of arrays on each device; arrays in transfer count with their future bytes."""
    size: float = sum(leaf.nbytes if isinstance(leaf, PendingTransfer) else shard_bytes(leaf) for leaf in jax.tree.leaves(tree))
    return size


def _sent(summed: Tree, plan: Plan, replicas: int) -> float:
    """Return the bytes that each replica has sent for a sum. As in a prediction, averaged layer state does not count."""
    others, summing = replicas - 1, exchange_of(values_of(plan)).sums
    if summing is None:
        return 2 * others / replicas * nbytes(summed)
    size: float = others * summing.size(summed.specs if isinstance(summed, PendingTransfer) else summed)
    return size


def _producers(name: _Name, following: int, plan: Plan) -> list[Computation]:
    """Return the computations that may make the arrays of a transfer; one of them does."""
    what, workers, number = name
    s = plan.workers[workers[0]][0]
    match what:
        case "activation":
            return that_leave("output", plan, s, number)
        case "gradient":
            return that_leave("gradient", plan, s, number)
        case "sum":
            end, each = (number + 1) * plan.microbatches_per_update(s), plan.row_slices  # the first slice's backward is the last one
            keys = [key for k in range(end - plan.replicas[s] * each, end, each) for key in that_leave("accumulators", plan, s, k)]
            return [(*key[:3], following) for key in keys]
    return []  # a small message begins when it is posted


def _readers(plan: Plan, computations: Iterable[Computation]) -> dict[_Name, Computation]:
    """Return for each message or sum the computation that reads it."""
    readers: dict[_Name, Computation] = {}
    for key in computations:
        w, op, k, _ = key
        s = plan.workers[w][0]
        if op == "U":
            readers.setdefault(("sum", tuple(plan.stage_workers[s]), k), key)
        elif OPS[op].reads == "inputs" and s > 0:
            readers.setdefault(("activation", (plan.worker(s - 1, k), w), k), key)
        elif OPS[op].reads == "residuals" and s + 1 < plan.depth:
            readers.setdefault(("gradient", (plan.worker(s + 1, k), w), k), key)
    return readers


def that_leave(what: Leaves, plan: Plan, s: int, k: int) -> list[Computation]:
    """Return the computations that may leave `what` of a microbatch at a stage. Of a computation in pieces, it is the last piece."""
    return [(plan.worker(s, k), name, k, 0) for name, op in OPS.items() if what in op.leaves]
