"""Measure when moves to host memory and back begin and end, while a run is traced."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jpipe.capabilities.host_memory.memory import in_host
from jpipe.capabilities.host_memory.program import Fetch, Offload
from jpipe.ops import OPS
from jpipe.plan import Plan
from jpipe.programs._instructions import Compute, Update
from jpipe.programs._transfers import HOST, Transfer
from jpipe.runtime._interpreter import Event
from jpipe.runtime._trace import key_of
from jpipe.runtime.state import WorkerState
from jpipe.runtime.timing._arrivals import Arrivals
from jpipe.runtime.timing._transfers import Computation

Tree = Any
_Kept = tuple[int, str, int]
"""Worker, what is moved, its number."""


@dataclass(eq=False)
class _Move:
    """A move: between which ends, when it was posted and has arrived, which computation made what is moved, and which one reads it."""

    what: str
    ranks: tuple[int, int]
    number: int
    posted: float
    size: int
    maker: Computation | None
    arrived: float = math.nan
    reader: Computation | None = None


class MoveWatcher:
    """Notes the moves of the workers of this process.

    Args:
        plan: the plan of the run.
        now: returns the time.

    Attributes:
        moved: what was noted so far.
    """

    def __init__(self, plan: Plan, now: Callable[[], float]) -> None:
        self._plan, self._now = plan, now
        self.moved: list[_Move] = []
        self._lanes: dict[tuple[int, int], Arrivals[_Move]] = {}
        self._made: dict[_Kept, Computation] = {}  # which computation made what may be moved
        self._sizes: dict[_Kept, int] = {}  # of what has been moved to host memory
        self._fetched: dict[_Kept, _Move] = {}  # what no computation has read yet

    def note(self, event: Event) -> None:
        """Note a move that was just dispatched, or a computation that makes or reads what is moved."""
        i = event.instruction
        if isinstance(i, Offload | Fetch):
            self._note_move(i, event.state)
        elif isinstance(i, Compute):
            computation, op = key_of(i), OPS[i.op]
            self._read(computation, ("versions", i.version), (op.reads, i.microbatch))
            self._made |= {(i.worker, kind, i.microbatch): computation for kind in op.leaves}
        elif isinstance(i, Update):
            computation = i.worker, "U", i.batch, 0
            self._read(computation, ("versions", i.batch), ("versions", i.batch if i.retires is None else i.retires), ("optimizer", 0))
            self._made |= {(i.worker, "optimizer", 0): computation, (i.worker, "versions", i.batch + 1): computation}

    def _note_move(self, i: Offload | Fetch, state: WorkerState) -> None:
        rank, kept = self._plan.rank_of[i.worker], (i.worker, i.what, i.number)
        leaves = jax.tree.leaves(_kept(i, state))
        if isinstance(i, Offload):
            leaves = [leaf for leaf in leaves if in_host(leaf)]
            self._sizes[kept] = sum(leaf.nbytes for leaf in leaves)
        ranks = (rank, HOST) if isinstance(i, Offload) else (HOST, rank)
        size = self._sizes[kept] if kept in self._sizes else sum(leaf.nbytes for leaf in leaves)
        move = _Move(i.what, ranks, i.number, self._now(), size, self._made.get(kept) if isinstance(i, Offload) else None)
        self.moved.append(move)
        if isinstance(i, Fetch):
            self._fetched[kept] = move
        if ranks not in self._lanes:
            self._lanes[ranks] = Arrivals(self._note_arrival)
        self._lanes[ranks].put(move, leaves)

    def _read(self, computation: Computation, *kept: tuple[str, int]) -> None:
        for what, number in kept:
            move = self._fetched.pop((computation[0], what, number), None)
            if move is not None:
                move.reader = computation

    def _note_arrival(self, move: _Move) -> None:
        move.arrived = self._now()

    def close(self) -> None:
        """Stop when all arrays that are awaited have arrived."""
        for lane in self._lanes.values():
            lane.stop()

    def transfers(self, starts: Mapping[Computation, float], ends: Mapping[Computation, float]) -> tuple[Transfer, ...]:
        """Return the moves, for `join_transfers`; the end of one that nobody has seen, and nothing has read, is NaN.

        A move begins when it is posted and what it moves is computed. Where nobody can see when it has arrived, because the run has
        consumed its arrays before, it ends when the computation that reads it begins.

        Args:
            starts: when each computation of this process began.
            ends: when it ended.
        """
        found = []
        for move in self.moved:
            start = move.posted if move.maker is None else max(move.posted, ends.get(move.maker, 0.0))
            used, read = math.nan, math.inf
            if move.reader is not None and move.reader in starts:
                used, read = starts[move.reader], ends[move.reader]
            end = used if math.isnan(move.arrived) else min(move.arrived, read)
            found.append(Transfer(move.what, move.ranks, move.number, start, end, end, float(move.size)))
        return tuple(found)


def _kept(i: Offload | Fetch, state: WorkerState) -> Tree:
    """Return what has just been moved."""
    if i.what == "optimizer":
        return state.optimizer
    if i.what == "versions":
        return state.weights.read(i.number)
    return state.microbatches[i.number][i.what]
