"""The arrays that the programs of a stage take and give: shapes, dtypes, and how each is sharded over the devices of a worker."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from jpipe.meshes._place import NoPlace, Place
from jpipe.stages.functions._floats import floats_of
from jpipe.stages.functions._loss import loss_dtype
from jpipe.stages.functions._stage import StageFunctions
from jpipe.stages.functions._update import norm_spec

Tree = Any
Spec = jax.ShapeDtypeStruct


def shardings_of(specs: Tree) -> Tree:
    """The shardings of specs."""
    return jax.tree.map(lambda spec: spec.sharding, specs)


@dataclass(frozen=True)
class Share:
    """The entries (see `Ties`) of a stage that one of its replicas updates.

    Attributes:
        own: those that no other replica updates; it gives them to the others.
        common: those that each replica updates, because other stages hold them, too.
    """

    own: tuple[str, ...]
    common: tuple[str, ...] = ()

    def part(self, tree: Mapping[str, Tree]) -> dict[str, Tree]:
        """What the replica updates, of a tree by entry."""
        return {entry: tree[entry] for entry in (*self.own, *self.common)}

    def given(self, tree: Mapping[str, Tree]) -> dict[str, Tree]:
        """What it gives to the others."""
        return {entry: tree[entry] for entry in self.own}


@dataclass(frozen=True)
class Arrays:
    """Specs, with shardings, of what a stage's programs take and give at one place.

    Attributes:
        functions: of the stage.
        place: where it runs; a `NoPlace` tells the sizes of shards.
        chosen: the shardings that XLA chose for arrays that stay from one program to a later one, in order: "saved" from the forward,
            "stash" from the first half of a backward. Until they are known, those are taken to be sharded as what flows is.
        share: what this replica updates; None: everything.
    """

    functions: StageFunctions
    place: Place | NoPlace
    chosen: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    share: Share | None = None

    @cached_property
    def params(self) -> Tree:
        """A weight version."""
        return self._of_params(self.functions.specs.params)

    @cached_property
    def trained(self) -> Tree:
        """What updates change of a weight version."""
        return self.functions.trained.part(self.params)

    @cached_property
    def changed(self) -> Tree:
        """What a microbatch changes of the layer state."""
        return self.functions.changed.part(self.state)

    @cached_property
    def fresh(self) -> Tree:
        """The parameters as the layers make them."""
        return self._of_params(self.functions.specs.fresh)

    @cached_property
    def optimizer(self) -> Tree:
        """The optimizer state that the replica has."""
        f = self.functions
        return self.updated(self.place.specs(f.optimizer_spec, f.partition.of_optimizer(f.optimizer_spec, f.specs.params)))

    @cached_property
    def accumulators(self) -> Tree:
        """The sums over a batch; gradients are sharded as their parameters."""
        spec = self.functions.accumulators_spec
        return self.whole({**spec, "gradients": None}) | {"gradients": self._of_params(spec["gradients"])}

    @cached_property
    def state(self) -> Tree:
        """The layer state, whole on each device."""
        return self.whole(self.functions.specs.state)

    @cached_property
    def x(self) -> Tree:
        """The stage input."""
        return self._flow(self.functions.specs.x)

    @cached_property
    def labels(self) -> Tree:
        """The labels, at the last stage."""
        return self._flow(self.functions.specs.labels)

    @cached_property
    def rng(self) -> Tree:
        """(microbatch, key)."""
        return self.whole(self.functions.specs.rng)

    @cached_property
    def evaluation_rng(self) -> Tree:
        """(microbatch, key) of an evaluation."""
        return self.whole(self.functions.evaluation_rng)

    @property
    def arguments(self) -> tuple[Tree, Tree, Tree]:
        """(state, x, labels)."""
        return self.state, self.x, self.labels

    @cached_property
    def outputs(self) -> Tree:
        """y: at the last stage (sum of the losses, weight)."""
        return self._flow(self.functions.outputs_spec)

    @cached_property
    def kept(self) -> tuple[Tree, Tree]:
        """What of the forward's arguments and outputs stays for the backward."""
        return self.functions.residuals.keep(self.arguments, (self.outputs, self.state))

    @cached_property
    def saved(self) -> tuple[Spec, ...]:
        """What the forward gives besides, for the backward."""
        return tuple(self._chosen("saved", self.functions.between_specs[1]))

    @cached_property
    def message(self) -> Tree:
        """The gradient message that arrives; at the last stage the outputs."""
        return self._flow(self.functions.between_specs[2])

    @cached_property
    def gradient(self) -> Tree:
        """The gradient message that leaves."""
        f = self.functions
        return floats_of(self.x) if f.input_gradient else [], self.whole(Spec((), loss_dtype()))

    @property
    def between(self) -> tuple[Any, Any, Any]:
        """(kept, saved, message): what a backward gets."""
        return self.kept, self.saved, self.message

    @cached_property
    def stash(self) -> tuple[Any, Any]:
        """(rest, stash): what the second half of a backward gets."""
        return self.functions.halves.late_inputs(*self.between), self._chosen("stash", self.functions.halves.stash_spec[1])

    @cached_property
    def norm(self) -> Tree:
        """The norm of all gradients, if updates use it."""
        return self.whole(norm_spec()) if self.functions.global_norm else None

    @cached_property
    def scale(self) -> Tree:
        """The dynamic loss scale, if there is one."""
        return self.whole(self.functions.scale_spec)

    @property
    def reduced(self) -> tuple[Tree, list[Spec]]:
        """What replicas sum for an update: their accumulators, and their layer state if they average it with each update."""
        return self.accumulators, self.averaged if self.functions.average_state == "update" else []

    @property
    def averaged(self) -> list[Spec]:
        """What replicas average of their layer state."""
        return self.functions.averaged_state(self.state)

    def updated(self, tree: Mapping[str, Tree]) -> Mapping[str, Tree]:
        """What the replica updates, of a tree by entry."""
        return tree if self.share is None else self.share.part(tree)

    def whole(self, tree: Tree) -> Tree:
        """Specs of arrays of which each device has all."""
        return self.place.specs(tree)

    def _of_params(self, tree: Tree) -> Tree:
        return self.place.specs(tree, self.functions.partition.of_params(tree))

    def _flow(self, tree: Tree) -> Tree:
        return self.place.specs(tree, self.functions.partition.flow(tree))

    def _chosen(self, name: str, specs: Sequence[Spec]) -> list[Spec]:
        if name not in self.chosen:
            return list(self._flow(list(specs)))
        return [Spec(spec.shape, spec.dtype, sharding=sharding) for spec, sharding in zip(specs, self.chosen[name], strict=True)]
