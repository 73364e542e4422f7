"""Specs of the arrays that the programs of a stage take and return: shapes, dtypes and shardings over the devices of a worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from jpipe.capabilities.protocol import hooks
from jpipe.capabilities.registry import runtimes_for, runtimes_of, updates_for
from jpipe.meshes._place import Place
from jpipe.model.layerwise._trace_optimizer import position_spec
from jpipe.ops import Reads
from jpipe.plan import Plan
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any
Spec = jax.ShapeDtypeStruct
ANY_LAYOUT = Format(Layout.AUTO)
"""In place of the spec of a result: XLA chooses sharding and layout."""
CHOOSING_LAYOUTS = ("tpu",)
"""The platforms on which XLA chooses the layouts of arrays that one program leaves for another."""


def shardings_of(specs: Tree) -> Tree:
    """Return the sharding of each spec or array of a tree, with the layout if a spec has one. `ANY_LAYOUT` stays as it is."""

    def sharding(spec: Any) -> Any:
        if isinstance(spec, Format):
            return spec
        return spec.format if isinstance(spec, Spec) and spec.format.layout is not None else spec.sharding

    return jax.tree.map(sharding, specs)


@dataclass(frozen=True)
class Share:
    """The entries (see `Ties`) of a stage that one of its replicas updates."""

    exclusive: tuple[str, ...]  # the entries that only this replica updates; it sends them to the other replicas
    common: tuple[str, ...] = ()  # the entries that every replica updates, because other stages also hold them

    def part(self, tree: Mapping[str, Tree]) -> dict[str, Tree]:
        """Return the entries of a tree that the replica updates."""
        return {entry: tree[entry] for entry in (*self.exclusive, *self.common)}

    def outgoing(self, tree: Mapping[str, Tree]) -> dict[str, Tree]:
        """Return the entries of a tree that the replica sends to the other replicas."""
        return {entry: tree[entry] for entry in self.exclusive}


def shares_of(plan: Plan, f: StageFunctions) -> tuple[Share | None, ...]:
    """Return the share of each replica of a stage, or None for each if every replica updates all entries."""
    for shares in hooks("shares", runtimes_of(plan)):
        return shares(plan, f)
    return (None,) * f.stage.replicas


@dataclass(frozen=True)
class Arrays:
    """Specs, with shardings, of the arguments and results of a stage's programs at one place."""

    functions: StageFunctions  # the functions of the stage
    place: Place  # the devices of the stage, or a place without devices if only the sizes of shards are needed
    # the shardings that XLA chose for arrays that one program leaves for another, in order: "saved" by the forward, "stash" by the first
    # half of a backward. Until they are known, such arrays count as sharded like messages between stages.
    chosen: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    share: Share | None = None  # the entries that this replica updates; None: all
    any_layout: bool = False  # whether XLA also chooses the layouts of the arrays in `chosen`

    @cached_property
    def params(self) -> Tree:
        """A weight version."""
        return self._of_params(self.functions.specs.params)

    @cached_property
    def trained(self) -> Tree:
        """The part of a weight version that updates change."""
        return self.functions.trained.part(self.params)

    @cached_property
    def capabilities(self) -> dict[str, Tree]:
        """The arrays that capabilities keep in the state, by the name of the capability."""
        kept = runtimes_for(self.functions.capabilities)
        return {name: hooks.specs(self) for name, hooks in kept.items() if hooks.specs is not None}

    @cached_property
    def changed(self) -> Tree:
        """The part of the layer state that a microbatch changes."""
        return self.functions.changed.part(self.state)

    @cached_property
    def fresh(self) -> Tree:
        """The parameters as the layers initialize them."""
        return self._of_params(self.functions.specs.fresh)

    @cached_property
    def optimizer(self) -> Tree:
        """The optimizer state of the replica."""
        f = self.functions
        return self.updated(self.place.specs(f.optimizer_spec, f.partition.of_optimizer(f.optimizer_spec, f.specs.params)))

    @cached_property
    def accumulators(self) -> Tree:
        """The sums over a batch; gradients are sharded like their parameters."""
        spec = self.functions.accumulators_spec
        return self.whole({**spec, "gradients": None}) | {"gradients": self._of_params(spec["gradients"])}

    @cached_property
    def state(self) -> Tree:
        """The layer state, replicated on all devices."""
        return self.whole(self.functions.specs.state)

    @cached_property
    def x(self) -> Tree:
        """The stage input, as the forward gets it."""
        return self._flow(self.functions.specs.x)

    @property
    def received(self) -> Tree:
        """The stage input, without the carries of a slice."""
        return self._without_carries(self.x)

    @cached_property
    def labels(self) -> Tree:
        """The labels, at the last stage."""
        return self._flow(self.functions.specs.labels)

    @cached_property
    def rng(self) -> Tree:
        """The pair (microbatch, key)."""
        return self.whole(self.functions.specs.rng)

    @cached_property
    def evaluation_rng(self) -> Tree:
        """The pair (microbatch, key) of an evaluation."""
        return self.whole(self.functions.evaluation_rng)

    @property
    def arguments(self) -> tuple[Tree, Tree, Tree]:
        """The triple (state, x, labels)."""
        return self.state, self.x, self.labels

    @cached_property
    def outputs(self) -> Tree:
        """The stage output y; at the last stage (sum of the losses, weight)."""
        return self._flow(self.functions.outputs_spec)

    @property
    def sent(self) -> Tree:
        """The stage output, without the carries of a slice."""
        return self._without_carries(self.outputs)

    @cached_property
    def forward_arrays(self) -> tuple[Tree, Tree]:
        """The arguments and outputs of the forward that are kept for the backward."""
        f = self.functions
        outputs = self.outputs if f.positions is None else f.with_passed(self.outputs, self.x[1])
        return f.residuals.keep(self.arguments, (outputs, self.state))

    @cached_property
    def saved(self) -> tuple[Spec, ...]:
        """The further arrays that the forward saves for the backward."""
        return tuple(self.as_chosen("saved", self.functions.between_specs[1]))

    @cached_property
    def message(self) -> Tree:
        """The received gradient message; at the last stage the outputs."""
        return self._flow(self.functions.between_specs[2])

    @cached_property
    def gradient(self) -> Tree:
        """The sent gradient message."""
        gradient, weight = self.functions.gradient_spec
        return self._flow(gradient), self.whole(weight)

    @property
    def received_gradient(self) -> Tree:
        """The received gradient message, without the gradients of the carries of a slice."""
        gradient, weight = self.message
        return (gradient, weight) if self.functions.positions is None else (gradient[: self.functions.gradients_received], weight)

    @property
    def sent_gradient(self) -> Tree:
        """The sent gradient message, without the gradients of the carries of a slice."""
        gradient, weight = self.gradient
        return gradient[: self.functions.gradients_sent], weight

    @property
    def between(self) -> tuple[Any, Any, Any]:
        """The triple (forward_arrays, saved, message), which a backward reads."""
        return self.forward_arrays, self.saved, self.message

    @cached_property
    def stash(self) -> tuple[Any, Any]:
        """The pair (late inputs, stash), which the second half of a backward reads."""
        return self.functions.halves.late_inputs(*self.between), self.as_chosen("stash", self.functions.halves.stash_spec[1])

    @cached_property
    def others(self) -> dict[str, Tree]:
        """The arrays that capabilities pass to an update, by the name of the capability."""
        return {name: changed.spec(self) for name, changed in updates_for(self.functions.capabilities).items()}

    @cached_property
    def scale(self) -> Tree:
        """The dynamic loss scale, or None."""
        return self.whole(self.functions.scale_spec)

    @property
    def position(self) -> tuple[Tree, ...]:
        """The last argument of an update: the `Position` that the optimizer needs. Empty if the optimizer needs none."""
        needs = self.functions.optimizer.required
        return (self.whole(position_spec(needs)),) if needs else ()

    @property
    def reduced(self) -> tuple[Tree, list[Spec]]:
        """The arrays that replicas sum for an update: the accumulators, and the layer state if replicas average it at each update."""
        return self.accumulators, self.averaged if self.functions.average_state == "update" else []

    @property
    def sums(self) -> dict[str, tuple[Tree, list[Spec]]]:
        """The arrays of `reduced`, divided into the pieces that separate sums take, by `Instruction.piece`."""
        cut = (pieces(self) for pieces in hooks("pieces", runtimes_for(self.functions.capabilities).values()))
        return next((pieces for pieces in cut if pieces), {"": self.reduced})

    @property
    def averaged(self) -> list[Spec]:
        """The layer state that replicas average."""
        return self.functions.averaged_state(self.state)

    def updated(self, tree: Mapping[str, Tree]) -> Mapping[str, Tree]:
        """Return the entries of a tree that the replica updates."""
        return tree if self.share is None else self.share.part(tree)

    def whole(self, tree: Tree) -> Tree:
        """Return specs of arrays that are replicated on all devices."""
        return self.place.specs(tree)

    def read_by(self, reads: Reads) -> tuple[Tree, ...]:
        """Return the specs of the arrays that an op reads."""
        return {"inputs": lambda: self.arguments, "residuals": lambda: self.between, "stash": lambda: self.stash}[reads]()

    def _without_carries(self, flow: Tree) -> Tree:
        return flow if self.functions.positions is None else flow[0]

    def _of_params(self, tree: Tree) -> Tree:
        return self.place.specs(tree, self.functions.partition.of_params(tree))

    def _flow(self, tree: Tree) -> Tree:
        return self.place.specs(tree, self.functions.partition.flow(tree))

    @property
    def open(self) -> Any:
        """In place of the specs of arrays that XLA is to choose: None for their shardings, `ANY_LAYOUT` for their layouts, too."""
        return ANY_LAYOUT if self.any_layout else None

    def as_chosen(self, name: str, specs: Sequence[Spec]) -> list[Spec]:
        """Return specs with the shardings that XLA chose, or with the default shardings if `chosen` lacks this name."""
        if name not in self.chosen:
            return list(self._flow(list(specs)))
        return [Spec(spec.shape, spec.dtype, sharding=sharding) for spec, sharding in zip(specs, self.chosen[name], strict=True)]
