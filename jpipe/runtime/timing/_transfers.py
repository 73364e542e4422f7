"""Measure when messages between ranks, sums over replicas and moves to host memory begin and end, while a run is traced."""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import jax

from jpipe.capabilities.protocol import hooks, merged
from jpipe.capabilities.registry import exchange_of, runtimes, runtimes_of, values_of
from jpipe.meshes._partition import shard_bytes
from jpipe.ops import OPS, Leaves
from jpipe.plan import Plan
from jpipe.programs._instructions import AllReduce, Receive, Send
from jpipe.programs._transfers import Transfer, in_rows
from jpipe.runtime._interpreter import Event
from jpipe.runtime._transport import PendingTransfer
from jpipe.runtime.state import WorkerState
from jpipe.runtime.timing._arrivals import Arrivals

Tree = Any
Computation = tuple[int, str, int, int]
"""Worker, op or U, microbatch (of an update: batch), how many further pieces of the computation follow."""


class _Moved(NamedTuple):
    """What is moved: its kind, the sender and the receiver or all replicas, the microbatch or update, and how many pieces of it follow."""

    what: str
    workers: tuple[int, ...]
    number: int
    following: int = 0


class TransferWatcher:
    """Notes the messages and sums of the workers of this process: when they are posted, and when they have arrived.

    What one lane moves arrives in order, so a thread for each waits for the arrays; a transfer from another process that has a thread of
    its own reports its end itself.

    Args:
        plan: the plan of the run.
        began: the time that counts as 0.
    """

    def __init__(self, plan: Plan, began: float) -> None:
        self._plan, self._began = plan, began
        self._posted: dict[_Moved, float] = {}
        self._arrived: dict[_Moved, float] = {}
        self._sizes: dict[_Moved, float] = {}
        self._lanes: dict[tuple[int, ...], Arrivals[_Moved]] = {}
        self._watchers = [watch(plan, lambda: self._now()) for watch in hooks("watch", runtimes_of(plan))]

    def note(self, event: Event) -> None:
        """Note a send, a receive, a sum or a move that was just dispatched."""
        i, plan = event.instruction, self._plan
        for watcher in self._watchers:
            watcher.note(event)
        if isinstance(i, Send) and plan.rank_of[i.worker] != plan.rank_of[i.to]:
            self._posted[_Moved(i.message, (i.worker, i.to), i.microbatch)] = self._now()
        elif isinstance(i, Receive) and plan.rank_of[i.worker] != plan.rank_of[i.source]:
            moved = _Moved(i.message, (i.source, i.worker), i.microbatch)
            received = _received(i, event.state, plan)
            self._watch(moved, received, nbytes(received))
        elif isinstance(i, AllReduce):
            replicas = tuple(plan.stage_workers[plan.workers[i.worker][0]])
            moved = _Moved("sum", replicas, i.batch, i.following)
            self._posted[moved] = self._now()
            if (total := _summed(i, event.state)) is not None:  # once the last replica of this process has given its part
                self._watch(moved, total, _sent(total[0], plan, len(replicas)))

    def close(self) -> None:
        """Stop when all arrays that are awaited have arrived."""
        for lane in self._lanes.values():
            lane.stop()
        for watcher in self._watchers:
            watcher.close()

    def transfers(self, starts: Mapping[Computation, float], ends: Mapping[Computation, float]) -> tuple[Transfer, ...]:
        """Return what was noted, for `join_transfers`; what this process does not know is NaN.

        A transfer begins when it is posted and what it moves is computed. Where nobody can see when it has arrived, because the run has
        consumed its arrays before, it ends when the computation that reads it begins.

        Args:
            starts: when each computation of this process began.
            ends: when it ended.
        """
        readers, found = _readers(self._plan, starts), list[Transfer]()
        for moved in dict.fromkeys([*self._posted, *self._sizes]):
            produced = max((ends[key] for key in _producers(moved, self._plan) if key in ends), default=0.0)
            start = max(self._posted[moved], produced) if moved in self._posted else math.nan
            reader = readers.get(moved._replace(following=0))
            used, read = (math.nan, math.inf) if reader is None else (starts[reader], ends[reader])
            end = min(self._arrived[moved], read) if moved in self._arrived else used
            ranks = tuple(self._plan.rank_of[w] for w in moved.workers)
            found.append(Transfer(moved.what, ranks, moved.number, start, end, end, self._sizes.get(moved, 0.0)))
        return (*found, *chain.from_iterable(watcher.transfers(starts, ends) for watcher in self._watchers))

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _watch(self, moved: _Moved, tree: Tree, size: float) -> None:
        self._sizes[moved] = size
        if isinstance(tree, PendingTransfer):
            tree.when_done(lambda: self._note_arrival(moved))
        else:
            if moved.workers not in self._lanes:
                self._lanes[moved.workers] = Arrivals(self._note_arrival)
            self._lanes[moved.workers].put(moved, tree)

    def _note_arrival(self, moved: _Moved) -> None:
        self._arrived.setdefault(moved, self._now())


def join_transfers(*processes: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Return the transfers of a run from what each process knows of them, in order of time.

    A message begins where its sender says, and ends where its receiver does; a sum begins when the last process has given its part. Those
    of a row follow each other, as its links carry them. What no process knows the beginning or end of is left out.

    Args:
        processes: `Trace.transfers` of each process. Their clocks began together.
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
    """Return the latest of the times that are known; NaN: none is."""
    return max((time for time in times if not math.isnan(time)), default=math.nan)


def _received(i: Receive, state: WorkerState, plan: Plan) -> Tree:
    """Return what a worker has just received, which may still be on its way."""
    if i.message in ("activation", "gradient"):
        return state.microbatches[i.microbatch]["inputs" if i.message == "activation" else "message"]
    return merged("messages", runtimes().values())[i.message].received(state, i, i.microbatch // plan.microbatches)


def nbytes(tree: Tree) -> float:
    """Return the bytes of arrays on each device, or of the specs of those that are to come."""
    size: float = sum(leaf.nbytes if isinstance(leaf, PendingTransfer) else shard_bytes(leaf) for leaf in jax.tree.leaves(tree))
    return size


def _sent(summed: Tree, plan: Plan, replicas: int) -> float:
    """Return the bytes that each replica has sent for a sum, as a prediction counts them: without layer state that is averaged with it."""
    others, summing = replicas - 1, exchange_of(values_of(plan)).sums
    if summing is None:
        return 2 * others / replicas * nbytes(summed)
    size: float = others * summing.size(summed.specs if isinstance(summed, PendingTransfer) else summed)
    return size


def _summed(i: AllReduce, state: WorkerState) -> Tree:
    """Return the sum that a worker has just begun to receive; None: other replicas of this process have still to give their parts."""
    return state.updates.get(i.batch, {}).get(f"summed{i.piece}")


def _producers(moved: _Moved, plan: Plan) -> list[Computation]:
    """Return the computations of which one leaves what is moved."""
    s = plan.workers[moved.workers[0]][0]
    match moved.what:
        case "activation":
            return that_leave("output", plan, s, moved.number)
        case "gradient":
            return that_leave("gradient", plan, s, moved.number)
        case "sum":
            end = (moved.number + 1) * plan.microbatches_per_update(s)
            keys = [key for k in range(end - plan.replicas[s], end) for key in that_leave("accumulators", plan, s, k)]
            return [(*key[:3], moved.following) for key in keys]
    return []  # of small messages the post is the beginning


def _readers(plan: Plan, computations: Iterable[Computation]) -> dict[_Moved, Computation]:
    """Return for messages and sums the computation that reads them."""
    readers: dict[_Moved, Computation] = {}
    for key in computations:
        w, op, k, _ = key
        s = plan.workers[w][0]
        if op == "U":
            readers.setdefault(_Moved("sum", tuple(plan.stage_workers[s]), k), key)
        elif OPS[op].reads == "inputs" and s > 0:
            readers.setdefault(_Moved("activation", (plan.worker(s - 1, k), w), k), key)
        elif OPS[op].reads == "residuals" and s + 1 < plan.depth:
            readers.setdefault(_Moved("gradient", (plan.worker(s + 1, k), w), k), key)
    return readers


def that_leave(what: Leaves, plan: Plan, s: int, k: int) -> list[Computation]:
    """Return the computations that may leave something of a microbatch at a stage; of those in pieces the last one."""
    return [(plan.worker(s, k), name, k, 0) for name, op in OPS.items() if what in op.leaves]
