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
    """Return the ops that leave arrays for a later op, by the name of their call. XLA chooses shardings and layouts in this order."""
    return {name: op for name, op in ops_of_stage(f).items() if {"residuals", "stash"} & {*op.leaves}}


def update_kind(update: Update) -> UpdateKind:
    """Return where an update writes the new version: over the version that it reads, over another version, or into new memory."""
    if update.retires is None:
        return "into_new"
    return "in_place" if update.retires == update.batch else "into_retired"


class UpdateNumber(NamedTuple):
    """An update of a plan."""

    plan: Plan  # the plan
    stage: int  # the number of the stage that makes the update
    number: int  # the number of the update, counted from 0 at this stage

    def position(self, names: Sequence[str]) -> Position:
        """Return the update's position: its stage and its delay, if they are among these names."""
        values: Position = {
            name: np.int32(self.stage) if name == "stage" else np.float32(self.plan.delay(self.stage, self.number)) for name in names
        }
        return values


@dataclass(frozen=True)
class CompiledStage:
    """The compiled calls of a stage, by name: the used functions of `jpipe.ops.OPS`, and the used kinds of updates.

    The calls of ops and updates return (result, done), where `done` is an array of one byte that is ready when the computation has
    finished. Some plans need further calls: `zero_accumulators` and at the last stage `mean_loss`, if gradients are set aside; `add` and
    `finish`, if replicas sum gradients, or the programs of a capability that sums in another way; `add_state` and `mean_state`, if replicas
    average their layer state when it is read; and programs of capabilities. With `arrays.share`, updates change only this part of the
    weights. `starts` keeps the programs that run once before batch 0; they are compiled at the first use.
    """

    arrays: Arrays
    calls: dict[str, Any]  # `jax.stages.Compiled`, or a wrapper of it that checks for NaN
    starts: dict[str, jax.stages.Compiled] = field(default_factory=dict, compare=False)

    @cached_property
    def functions(self) -> StageFunctions:
        """The functions of the stage."""
        return self.arrays.functions

    @cached_property
    def place(self) -> Place:
        """The devices of the stage."""
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
        """Call an update, and return the results of the stage function `update`, and `done`.

        `retired` is the version that the update overwrites, if any; the arguments from `params` to `others` are for `update`. With a
        share, the new params are only that share. Frozen parameters are the arrays from `params`; the update does not read them.
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
        """Return the last argument of an update, or nothing if the optimizer does not need it."""
        needs = self.functions.optimizer.required
        return (number.position(needs),) if needs else ()

    @property
    def temporary_bytes(self) -> int:
        """The largest temporary memory of any of the programs; 0 if the backend does not report it."""
        analyses = [call.memory_analysis() for call in self.calls.values()]
        return max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)


def choices(f: StageFunctions, name: str, call: jax.stages.Compiled, *, layouts: bool = False) -> dict[str, Sequence[Any]]:
    """Return what XLA chose for the results of a call in `sharded_by_xla`, in the form of `Arrays.chosen`."""
    result, _ = call.output_formats if layouts else call.output_shardings
    op = sharded_by_xla(f)[name]
    if name not in ops_by_call():
        return {name: result[op.leaves.index("stash")]}
    sharded = result[op.leaves.index("residuals" if "residuals" in op.leaves else "stash")]
    if "residuals" in op.leaves:
        return {"saved": sharded}
    if not op.begins:
        return {"stash": sharded}
    _, late_saved, stash = sharded
    # The halves do not read the remaining saved arrays, so those may have any sharding.
    read = dict(zip(f.halves.late_saved, late_saved, strict=True))
    return {"saved": [read.get(i) for i in range(f.residuals.count)], "stash": stash}
