"""The state of a run, as one immutable pytree, and the fingerprint of the pipeline that made it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jpipe._html import html_table, size
from jpipe.errors import InputError
from jpipe.meshes._place import Place
from jpipe.model._layer import describe
from jpipe.model._precision import LossScale
from jpipe.plan import Plan
from jpipe.stages._batch import Batch
from jpipe.stages.functions._stage import StageFunctions

Tree = Any
Fingerprint = tuple[tuple[str, str], ...]


def _nbytes(tree: Tree) -> int:
    """Bytes of the arrays in a tree; an array that occurs twice counts once."""
    return sum({id(leaf): getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree)}.values())


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class WorkerState:
    """What one worker holds between two steps.

    Attributes:
        versions: weights by version, `{version: {layer id: params}}`: one entry for schedules that flush, the stash of PipeDream, the
            current and shadow version of 2BW. Microbatches in flight that read the same version share its entry.
        optimizer: optimizer state by layer id.
        layer_state: state that forwards update (batch statistics), by layer id.
        accumulators: sums over the current batch: gradients, weight and loss.
        buffers: activations, residuals and gradients in flight, by (kind, microbatch); gradients and losses that wait for their update
            and the last global norm, by (kind, update).
        key: the random key of the run.
        loss_scales: with a dynamic loss scale that of each version; a microbatch has the one of the version that it reads.
    """

    versions: dict[int, Tree]
    optimizer: Tree
    layer_state: Tree
    accumulators: Tree
    buffers: dict[tuple[str, int], Tree]
    key: jax.Array
    loss_scales: dict[int, LossScale] = field(default_factory=dict)

    def __repr__(self) -> str:
        held = f"versions {', '.join(map(str, sorted(self.versions)))}" if self.versions else "already consumed"
        return f"WorkerState({held}; {len(self.buffers)} buffers)"

    def cells(self) -> tuple[str, ...]:
        """Its versions and the bytes of its parts, as text, for a table."""
        if not self.versions:
            return "already consumed", *("–",) * 4
        parts = (self.versions, self.loss_scales), self.optimizer, (self.accumulators, self.layer_state), self.buffers
        return ", ".join(map(str, sorted(self.versions))), *(size(_nbytes(part)) for part in parts)

    def taken(self) -> "WorkerState":
        """A copy with new dicts; the dicts of this one are emptied.

        The caller of a step still references the old state while the step runs. Without this, that reference would keep all buffers in
        flight and all retired versions alive until the step returns.
        """
        versions, state, buffers, scales = (dict(held) for held in self._emptied)
        for held in self._emptied:
            held.clear()
        return WorkerState(versions, self.optimizer, state, self.accumulators, buffers, self.key, scales)

    @property
    def _emptied(self) -> tuple[dict[Any, Any], ...]:
        return self.versions, self.layer_state, self.buffers, self.loss_scales

    @property
    def latest(self) -> int:
        """The newest version, which the next update starts from."""
        return max(self.versions)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False, eq=False)  # two states are one only if they are the same object
class State:
    """The state of a run, a pytree: `Pipeline.step` consumes one and returns the next.

    Attributes:
        workers: one `WorkerState` for each worker.
        batch: index of the next batch.
        start: the batch before which the pipeline was last empty.
        averaged: False while replicas have layer state that is averaged when it is read.
        made_by: the fingerprint of the pipeline that made it; other pipelines refuse the state.
        buckets: which of the shapes of the pipeline the last batches had, the newest last, as far back as any is in flight; none where
            there is one shape.
    """

    workers: tuple[WorkerState, ...]
    batch: int = field(metadata={"static": True})
    start: int = field(metadata={"static": True})
    averaged: bool = field(metadata={"static": True}, default=True)
    made_by: Fingerprint = field(metadata={"static": True}, default=())
    buckets: tuple[int, ...] = field(metadata={"static": True}, default=())

    def __repr__(self) -> str:
        return f"State({self._facts()})"

    def _repr_html_(self) -> str:
        head = "worker", "weight versions", "weights", "optimizer state", "accumulators and layer state", "buffers"
        rows = [[str(w), *worker.cells()] for w, worker in enumerate(self.workers)]
        return html_table(f"State: {self._facts()}", head, rows)

    def _facts(self) -> str:
        flight = "nothing in flight" if self.start == self.batch else f"in flight since batch {self.start}"
        return f"before batch {self.batch}, {flight}, {len(self.workers)} workers"


def fingerprint(plan: Plan, places: Sequence[Place], specs: Sequence[Batch], functions: Sequence[StageFunctions]) -> Fingerprint:
    """Everything that determines the content of a state, by name.

    Args:
        plan: the plan of the pipeline.
        places: where each worker computes.
        specs: shapes and dtypes of a microbatch, of each bucket.
        functions: the functions of each stage.
    """
    fields = plan.model_dump(exclude={"format", "stages", "predicted"}).items()
    stages = ((f"stage {s}", f"{stage.replicas} × {', '.join(stage.layers)}") for s, stage in enumerate(plan.stages))
    recompute = ("recompute", ", ".join(stage.recompute for stage in plan.stages))
    weights = [(f.specs.params, f.specs.state) for f in functions]
    optimizer = [(f.optimizer_spec, f.accumulators_spec) for f in functions]
    return (
        *((name, str(value)) for name, value in fields),
        *stages,
        recompute,
        ("updates", "with the global norm" if functions[0].global_norm else "without the global norm"),
        ("devices", ", ".join(str(device) for place in places for device in place.devices)),
        ("meshes", ", ".join(f"{dict(stage.mesh)}{' fsdp' * stage.fsdp}" for stage in plan.stages)),
        ("microbatch", " or ".join(map(describe, specs))),
        ("microbatch in full", _shapes(specs)),
        ("precision", str(functions[0].precision)),
        ("weights and layer state", _shapes(weights)),
        ("optimizer state", _shapes(optimizer)),
    )


def model_of(functions: Sequence[StageFunctions]) -> str:
    """The layers, and a hash of the shapes of their parameters, state and optimizer state, whatever the cut into stages is."""
    layers: dict[str, Tree] = {}
    for f in functions:
        for kind, entries in (("parameters", f.specs.params), ("state", f.specs.state), ("optimizer", f.optimizer_spec)):
            layers |= {f"{kind} of {entry}": spec for entry, spec in entries.items()}
    return _shapes(dict(sorted(layers.items())))


def check_state(state: State, own: Fingerprint | None) -> None:
    """Refuse a state that a call has consumed, or that a pipeline with another fingerprint than `own` made.

    Raises:
        InputError: the message says how the two pipelines differ.
    """
    if not isinstance(state, State):
        raise InputError(f"state: expected a jpipe.State, found {type(state).__name__}")
    if own is None:
        raise InputError("state: this pipeline did not make it; call init first")
    if state.made_by != own:
        raise InputError(
            f"state: another pipeline made it: {_difference(state.made_by, own)}; "
            "make one with init, or take a snapshot of the other run and restore it here"
        )
    if is_consumed(state):
        raise InputError("state: step or drain has already consumed it; go on with the state that call returned")


def is_consumed(state: State) -> bool:
    """Return whether a step or drain has taken arrays of the state."""
    return any(map(_is_used_up, state.workers))


def _shapes(tree: Tree) -> str:
    """A hash of a tree's structure, shapes and dtypes."""
    leaves = [(jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in jax.tree.leaves_with_path(tree)]
    return f"of shapes with the hash {hashlib.sha256(repr(leaves).encode()).hexdigest()[:8]}"


def _difference(made_by: Fingerprint, own: Fingerprint) -> str:
    """The first entry in which two fingerprints differ."""
    there, here = dict(made_by), dict(own)
    name = next(name for name in (*here, *there) if here.get(name) != there.get(name))
    return f"{name} is {_short(there.get(name))} there and {_short(here.get(name))} here"


def _short(text: str | None) -> str:
    return "absent" if text is None else text if len(text) <= 80 else f"{text[:79]}…"


def _is_used_up(worker: WorkerState) -> bool:
    """Whether a run has consumed it, or donated the arrays that it shares with a consumed state."""
    donated = jax.tree.leaves(worker.accumulators)[:1] + jax.tree.leaves(worker.optimizer)[:1]
    return not worker.versions or any(leaf.is_deleted() for leaf in donated)
