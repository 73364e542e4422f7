"""The state of a run as one immutable pytree, and the check by fingerprint that a pipeline can use it."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax

from jpipe.errors import InputError
from jpipe.meshes._place import Place
from jpipe.model._layer import describe
from jpipe.model._precision import LossScale
from jpipe.plan import Plan
from jpipe.runtime.state._weights import WeightVersions
from jpipe.stages._batch import Batch
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any
Fields = dict[str, Tree]
"""The trees that belong to a microbatch in flight, or to a pending update, by name."""

Fingerprint = tuple[tuple[str, str], ...]
"""Everything that determines the content of the states of a pipeline, by name."""

CONSUMED = "state: step or drain has already consumed it and deleted its arrays; use the state which that call returned"
"""The message for a state that is used a second time."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
class WorkerState:
    """The state of one worker between two steps, an immutable pytree.

    Attributes:
        weights: the weight versions. Microbatches in flight that read the same version share its arrays.
        optimizer: the optimizer state by layer id.
        layer_state: the state that forwards update (batch statistics), by layer id.
        accumulators: the sums over the current batch: gradients, weight and loss.
        key: the random key of the run.
        microbatches: the microbatches in flight, by number, each with the trees that are computed and not yet used:
            `inputs`: the input of the stage.
            `labels`: the labels, at the last stage.
            `residuals`: (kept arguments and outputs, saved arrays) of the forward, for the backward.
            `output`: the output of the stage, until it is sent.
            `message`: the gradient message from the next stage; at the last stage the output of its forward.
            `gradient`: the gradient message for the previous stage, until it is sent.
            `stash`: (late inputs, stash) for the second half of the backward, after its first half.
        updates: the pending updates, by number, each with the trees that it waits for; capabilities may add others:
            `sums`: the gradient accumulators, complete and set aside.
            `summed`: (accumulators, means of the layer state, (mean loss, weight) at the last stage) over all replicas.
            `loss`: (mean loss, weight), until all updates of the batch are made.
        loss_scales: the loss scale of each version, if it is dynamic. A microbatch has the scale of the version that it reads.
        capabilities: the arrays that capabilities keep, by the name of the capability; see `RuntimeHooks.specs`.
    """

    weights: WeightVersions
    optimizer: Tree
    layer_state: Tree
    accumulators: Tree
    key: jax.Array
    microbatches: Mapping[int, Fields] = field(default_factory=dict)
    updates: Mapping[int, Fields] = field(default_factory=dict)
    loss_scales: Mapping[int, LossScale] = field(default_factory=dict)
    capabilities: Mapping[str, Tree] = field(default_factory=dict)

    def __repr__(self) -> str:
        if self.is_consumed:
            return "WorkerState(already consumed)"
        versions = ", ".join(map(str, self.weights.versions))
        return f"WorkerState(versions {versions}; {len(self.microbatches)} microbatches in flight)"

    @property
    def is_consumed(self) -> bool:
        """Whether a step or drain has deleted arrays of this state."""
        return any(getattr(leaf, "is_deleted", bool)() for leaf in jax.tree.leaves(self))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False, eq=False)  # two states are equal only if they are the same object
class State:
    """The state of a run, a pytree. `Pipeline.step` consumes a state and returns the next one.

    Attributes:
        workers: one `WorkerState` for each worker of this process.
        batch: the index of the next batch.
        start: the batch before which the pipeline was last empty.
        averaged: False while replicas have layer state that is averaged when it is read.
        fingerprint: the fingerprint of the pipeline that made the state; other pipelines reject the state.
        buckets: the buckets of the last batches that may be in flight, the newest last; empty if the pipeline has one bucket.
    """

    workers: tuple[WorkerState, ...]
    batch: int = field(metadata={"static": True})
    start: int = field(metadata={"static": True})
    averaged: bool = field(metadata={"static": True}, default=True)
    fingerprint: Fingerprint = field(metadata={"static": True}, default=())
    buckets: tuple[int, ...] = field(metadata={"static": True}, default=())
    _outcome: ClassVar[Any] = None  # the outcome of the call that consumed the state (jpipe._interrupts); not a part of the pytree

    def __repr__(self) -> str:
        if is_consumed(self):
            return f"State(before batch {self.batch}, already consumed)"
        flight = "nothing in flight" if self.start == self.batch else f"in flight since batch {self.start}"
        return f"State(before batch {self.batch}, {flight}, {len(self.workers)} workers)"


def check_state(state: State, expected: Fingerprint | None) -> None:
    """Check that a state comes from a pipeline with this fingerprint, or raise InputError that says how the two pipelines differ."""
    if not isinstance(state, State):
        raise InputError(where="state", expected="a jpipe.State", found=type(state).__name__)
    if expected is None:
        raise InputError("state: this pipeline did not make it; call init first")
    if state.fingerprint != expected:
        raise InputError(
            f"state: another pipeline made it: {_difference(state.fingerprint, expected)}; "
            "make a new state with init, or restore a snapshot of the other run here"
        )


def is_consumed(state: State) -> bool:
    """Return whether a step or drain has deleted arrays of the state."""
    return any(worker.is_consumed for worker in state.workers)


def _difference(fingerprint: Fingerprint, expected: Fingerprint) -> str:
    """Describe the first entry in which two fingerprints differ."""
    of_state, of_pipeline = dict(fingerprint), dict(expected)
    name = next(name for name in (*of_pipeline, *of_state) if of_pipeline.get(name) != of_state.get(name))
    return f"{name} is {_short(of_state.get(name))} there and {_short(of_pipeline.get(name))} here"


def _short(text: str | None) -> str:
    return "absent" if text is None else text if len(text) <= 80 else f"{text[:79]}…"


def fingerprint(
    plan: Plan, uses: Iterable[str], places: Sequence[Place], specs: Sequence[Batch], functions: Sequence[StageFunctions]
) -> Fingerprint:
    """Return everything that determines the content of a state, by name; `uses` names capabilities without an option in the plan."""
    fields = plan.model_dump(exclude={"format", "stages", "predicted"}).items()
    stages = ((f"stage {s}", f"{stage.replicas} × {', '.join(stage.layers)}") for s, stage in enumerate(plan.stages))
    recompute = ("recompute", ", ".join(stage.recompute for stage in plan.stages))
    weights = [(f.specs.params, f.specs.state) for f in functions]
    optimizer = [(f.optimizer_spec, f.accumulators_spec) for f in functions]
    return (
        *((name, str(value)) for name, value in fields),
        *stages,
        recompute,
        *((name.replace("_", " "), "used") for name in uses),
        ("devices", ", ".join(str(device) for place in places for device in place.devices)),
        ("meshes", ", ".join(f"{dict(stage.mesh)}{' fsdp' * stage.fsdp}" for stage in plan.stages)),
        ("microbatch", " or ".join(map(describe, specs))),
        ("microbatch in full", _shapes(specs)),
        ("precision", str(functions[0].precision)),
        ("weights and layer state", _shapes(weights)),
        ("optimizer state", _shapes(optimizer)),
    )


def model_of(functions: Sequence[StageFunctions]) -> str:
    """Return a hash of the shapes of the parameters, state and optimizer state of all layers, which does not depend on the cut."""
    layers: dict[str, Tree] = {}
    for f in functions:
        for kind, entries in (("parameters", f.specs.params), ("state", f.specs.state), ("optimizer", f.optimizer_spec)):
            layers |= {f"{kind} of {entry}": spec for entry, spec in entries.items()}
    return _shapes(dict(sorted(layers.items())))


def _shapes(tree: Tree) -> str:
    """Return a hash of a tree's structure, shapes and dtypes."""
    leaves = [(jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in jax.tree.leaves_with_path(tree)]
    return f"of shapes with the hash {hashlib.sha256(repr(leaves).encode()).hexdigest()[:8]}"
