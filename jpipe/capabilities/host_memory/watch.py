"""Measure, in a traced run, when moves to host memory and back begin and end."""

from typing import Any

import jax

from jpipe.capabilities.host_memory.program import Fetch, Offload
from jpipe.ops import OPS
from jpipe.programs._instructions import Compute, Update
from jpipe.programs._transfers import HOST
from jpipe.runtime._interpreter import Event
from jpipe.runtime._trace import key_of
from jpipe.runtime.state import WorkerState, is_away
from jpipe.runtime.timing._transfer_times import Computation, Moved, TransferWatcher

Tree = Any
_Kept = tuple[int, str, int]
"""(worker, kind, number) of what is moved."""


class MoveWatcher:
    """Records the moves of this process's workers.

    Args:
        watcher: the watcher that records all moves.
    """

    def __init__(self, watcher: TransferWatcher) -> None:
        self._watcher = watcher
        self._made: dict[_Kept, Computation] = {}  # the computation that made it
        self._sizes: dict[_Kept, int] = {}  # bytes of what was moved to host memory
        self._fetched: dict[_Kept, Moved] = {}  # moves to the device that no computation has read yet

    def __call__(self, event: Event) -> None:
        """Record a move that was just dispatched, or a computation that makes or reads moved arrays."""
        i = event.instruction
        if isinstance(i, Offload | Fetch):
            self._note_move(i, event.state)
        elif isinstance(i, Compute):
            computation, op = key_of(i), OPS[i.op]
            self._read(computation, ("versions", i.version), (op.reads, i.microbatch))
            self._made |= {(i.worker, kind, i.microbatch): computation for kind in op.leaves}
        elif isinstance(i, Update):
            computation = key_of(i)
            self._read(computation, ("versions", i.batch), ("versions", i.batch if i.retires is None else i.retires), ("optimizer", 0))
            self._made |= {(i.worker, "optimizer", 0): computation, (i.worker, "versions", i.batch + 1): computation}

    def _note_move(self, i: Offload | Fetch, state: WorkerState) -> None:
        kept, leaves = (i.worker, i.what, i.number), jax.tree.leaves(_kept(i, state))
        if isinstance(i, Offload):
            leaves = [leaf for leaf in leaves if is_away(leaf)]
            self._sizes[kept] = sum(leaf.nbytes for leaf in leaves)
            makers = [self._made[kept]] if kept in self._made else []
            move = Moved(i.what, (i.worker, HOST), i.number, makers, posted=self._watcher.now())
        else:
            move = self._fetched[kept] = Moved(i.what, (HOST, i.worker), i.number, posted=self._watcher.now())
        self._watcher.moved.append(move)
        self._watcher.watch(move, leaves, float(self._sizes[kept] if kept in self._sizes else sum(leaf.nbytes for leaf in leaves)))

    def _read(self, computation: Computation, *kept: tuple[str, int]) -> None:
        for what, number in kept:
            move = self._fetched.pop((computation[0], what, number), None)
            if move is not None:
                move.readers.append(computation)


def _kept(i: Offload | Fetch, state: WorkerState) -> Tree:
    """Return the arrays that were just moved."""
    if i.what == "optimizer":
        return state.optimizer
    if i.what == "versions":
        return state.weights.read(i.number)
    return state.microbatches[i.number][i.what]
