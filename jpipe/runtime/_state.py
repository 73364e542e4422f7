"""Everything that changes in a run, as one immutable pytree."""

from dataclasses import dataclass, field
from typing import Any

import jax

from jpipe._html import html_table, size

Tree = Any


def _nbytes(tree: Tree) -> int:
    """Bytes of the arrays in a tree; one that is there twice counts once."""
    return sum({id(leaf): getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree)}.values())


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class WorkerState:
    """What one worker holds between two steps.

    Attributes:
        versions: weights by version, `{version: {layer id: params}}`: one entry for the schedules that flush, the stash of
            PipeDream, current and shadow of 2BW. An entry exists once, however many microbatches in flight read it.
        optimizer: optimizer state by layer id.
        layer_state: state that forwards update (batch statistics), by layer id.
        sums: gradients, weight and loss of the batch that is being accumulated.
        buffers: activations, residuals and gradients in flight, by (kind, microbatch).
        key: the random key of the run.
    """

    versions: dict[int, Tree]
    optimizer: Tree
    layer_state: Tree
    sums: Tree
    buffers: dict[tuple[str, int], Tree]
    key: jax.Array

    def __repr__(self) -> str:
        held = f"versions {', '.join(map(str, sorted(self.versions)))}" if self.versions else "already consumed"
        return f"WorkerState({held}; {len(self.buffers)} buffers)"

    def cells(self) -> tuple[str, ...]:
        """Its versions and how many bytes it holds of what, as text, for a table."""
        if not self.versions:
            return "already consumed", *("–",) * 4
        parts = self.versions, self.optimizer, (self.sums, self.layer_state), self.buffers
        return ", ".join(map(str, sorted(self.versions))), *(size(_nbytes(part)) for part in parts)

    def taken(self) -> "WorkerState":
        """The same content in dicts of its own; the dicts of this one are emptied.

        The caller of a step still has a name for the old state while the step runs: without this, that name would keep
        everything that was in flight, and every retired version, alive until the step returns.
        """
        moved = WorkerState(dict(self.versions), self.optimizer, dict(self.layer_state), self.sums, dict(self.buffers), self.key)
        for held in (self.versions, self.layer_state, self.buffers):
            held.clear()
        return moved

    @property
    def latest(self) -> int:
        """The newest version, which the next update starts from."""
        return max(self.versions)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class State:
    """The state of a run, a pytree: `Pipeline.step` takes one, uses it up, and returns the next.

    Attributes:
        workers: one `WorkerState` for each worker.
        batch: index of the next batch.
        start: the batch before which the pipeline was last empty.
        averaged: whether replicas that are to average their layer state have done so.
        made_by: what its pipeline is, by name: another one refuses the state.
    """

    workers: tuple[WorkerState, ...]
    batch: int = field(metadata={"static": True})
    start: int = field(metadata={"static": True})
    averaged: bool = field(metadata={"static": True}, default=True)
    made_by: tuple[tuple[str, str], ...] = field(metadata={"static": True}, default=())

    def __repr__(self) -> str:
        return f"State({self._facts()})"

    def _repr_html_(self) -> str:
        head = "worker", "weight versions", "weights", "optimizer state", "sums and layer state", "buffers"
        rows = [[str(w), *worker.cells()] for w, worker in enumerate(self.workers)]
        return html_table(f"State: {self._facts()}", head, rows)

    def _facts(self) -> str:
        flight = "nothing in flight" if self.start == self.batch else f"in flight since batch {self.start}"
        return f"before batch {self.batch}, {flight}, {len(self.workers)} workers"
