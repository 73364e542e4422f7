"""The compiled programs of a stage, as the runtime calls them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe.capabilities.registry import runtimes_for
from jpipe.meshes._place import Place
from jpipe.model.layerwise._trace_optimizer import Position
from jpipe.ops import Op
from jpipe.plan import Plan
from jpipe.programs._instructions import Update
from jpipe.stages._arrays import Arrays
from jpipe.stages._calls import UpdateKind, ops_by_call, ops_of_stage
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any


def sharded_by_xla(f: StageFunctions) -> dict[str, Op]:
    """Return by call the ops that leave arrays for a later op, in the order in which XLA chooses the shardings of these arrays."""
    return {name: op for name, op in ops_of_stage(f).items() if {"residuals", "stash"} & {*op.leaves}}


def update_kind(update: Update) -> UpdateKind:
    """Return where an update writes the new version: over the version it reads, over another that it retires, or into new memory."""
    if update.retires is None:
        return "into_new"
    return "in_place" if update.retires == update.batch else "into_retired"


class UpdateNumber(NamedTuple):
    """An update of a plan.

    Attributes:
        plan: the plan.
        stage: the number of the stage that makes it.
        number: the number of the update, counted from 0 at that stage.
    """

    plan: Plan
    stage: int
    number: int

    def position(self, names: Sequence[str]) -> Position:
        """Return the named entries of its position."""
        values: Position = {
            name: np.int32(self.stage) if name == "stage" else np.float32(self.plan.delay(self.stage, self.number)) for name in names
        }
        return values


@dataclass(frozen=True)
class CompiledStage:
    """The compiled calls of a stage, by name: the functions of `jpipe.ops.OPS` and an update of each kind, those that are used.

    Each except `evaluate` returns (result, done), where `done` is an array of one byte that is ready when the computation is finished.
    If gradients are set aside, there are `zero_accumulators` and at the last stage `mean_loss`; if replicas sum them, `add` and `finish`,
    or programs of a capability that sums in another way; if they average their layer state when it is read, `add_state` and `mean_state`;
    programs of capabilities. With `arrays.share`, updates are of this part of the weights. `starts` keeps what runs once before batch 0,
    compiled at the first use.
    """

    arrays: Arrays
    calls: dict[str, Any]  # of `jax.stages.Compiled`, or of what stands for them
    starts: dict[str, jax.stages.Compiled] = field(default_factory=dict, compare=False)

    @cached_property
    def functions(self) -> StageFunctions:
        """The functions of the stage."""
        return self.arrays.functions

    @cached_property
    def place(self) -> Place:
        """Where it runs."""
        return self.arrays.place

    @property
    def chosen(self) -> dict[str, Sequence[Any]]:
        """The shardings that XLA chose for arrays between two programs, as in `Arrays`; empty on one device."""
        chosen: dict[str, Sequence[Any]] = {}
        for name in sharded_by_xla(self.functions) if self.place.mesh else ():
            if name in self.calls:
                chosen = {**choices(self.functions, name, self.calls[name]), **chosen}
        return chosen

    def update(
        self,
        kind: UpdateKind,
        retired: Sequence[Tree],
        params: Tree,
        optimizer: Tree,
        accumulators: Tree,
        others: Mapping[str, Any],
        number: UpdateNumber,
    ) -> tuple[tuple[Tree, Tree, Tree, Any], jax.Array]:
        """Call an update.

        Args:
            kind: the kind of the update.
            retired: the version that it overwrites, if it does.
            params, optimizer, accumulators, others: as of the stage function `update`.
            number: the number of the update.

        Returns:
            The results of the stage function `update`, and `done`. With a share the new params are of the share alone. Frozen
            parameters are the arrays of `params`; no program reads them.
        """
        f, position = self.functions, self.position(number)
        *retired, params = map(self.arrays.updated, (*retired, params))
        frozen = f.trained.unchosen(params)
        *retired, params = map(f.trained.part, (*retired, params))
        trees = *retired, params, optimizer, accumulators["gradients"]
        apart = [hooks.apart.update for hooks in runtimes_for(f.capabilities).values() if hooks.apart is not None]
        parts = [part for update in apart for part in update(self, kind, trees, accumulators["weight"], others, number)]
        if not parts:
            (new, *remaining), done = self.calls[kind](*retired, params, optimizer, accumulators, others, *position)
            return (f.trained.joined(new, frozen), *remaining), done
        *local, gradients = map(f.without_apart, trees)
        (*updated, zeros, loss), done = self.calls[kind](*local, {**accumulators, "gradients": gradients}, others, *position)
        parts.append((*updated, zeros["gradients"]))
        new, states, blank = ({entry: tree for part in parts for entry, tree in part[i].items()} for i in range(3))
        return (f.trained.joined(new, frozen), states, {**zeros, "gradients": blank}, loss), done

    def position(self, number: UpdateNumber) -> tuple[Position, ...]:
        """Return the last argument of an update, if the optimizer needs it."""
        needs = self.functions.optimizer.required
        return (number.position(needs),) if needs else ()

    @property
    def temporary_bytes(self) -> int:
        """The largest scratch memory of any of the programs; 0 where the backend does not report it."""
        analyses = [call.memory_analysis() for call in self.calls.values()]
        return max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)


def choices(f: StageFunctions, name: str, call: jax.stages.Compiled) -> dict[str, Sequence[Any]]:
    """Return how one of the calls in `sharded_by_xla` shards its results for later calls, as `Arrays.chosen`."""
    result, _ = call.output_shardings
    op = sharded_by_xla(f)[name]
    if name not in ops_by_call():
        return {name: result[op.leaves.index("stash")]}
    sharded = result[op.leaves.index("residuals" if "residuals" in op.leaves else "stash")]
    if "residuals" in op.leaves:
        return {"saved": sharded}
    if not op.begins:
        return {"stash": sharded}
    _, late_saved, stash = sharded
    # The halves do not read the remaining saved arrays: any sharding will do for them.
    read = dict(zip(f.halves.late_saved, late_saved, strict=True))
    return {"saved": [read.get(i) for i in range(f.residuals.count)], "stash": stash}
