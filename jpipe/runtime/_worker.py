"""The workers of the interpreter. Each holds its state while a program runs, and has a method for each type of instruction."""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe.capabilities.protocol import Hook, TransportHooks, UpdateHooks, hooks, merged
from jpipe.capabilities.registry import runtimes_of, updates_for
from jpipe.model._precision import LossScale
from jpipe.ops import OPS, Leaves, Op
from jpipe.plan import Plan
from jpipe.programs._instructions import (
    AllReduce,
    Compute,
    Load,
    Program,
    Receive,
    Release,
    Send,
    Update,
    ends_update,
)
from jpipe.runtime._transport import PendingTransfer, Transport, arrived
from jpipe.runtime.state import Fields, WeightVersions, WorkerState
from jpipe.stages._compiled_stage import CompiledStage, UpdateNumber, update_kind

Tree = Any


class RunResults(NamedTuple):
    """The losses, evaluations and other numbers that the workers of this process computed, as arrays that may not be ready."""

    # for each finished batch, by (batch, pipeline), the (mean loss, weight) of each of its updates; other replicas may still be computing
    # them. If replicas sum their gradients, the pipeline is 0.
    losses: dict[tuple[int, int], list[Tree]]
    evaluations: dict[int, Tree]  # for each evaluated microbatch, (sum, weight) of the loss and of each metric; in a prediction the outputs
    others: dict[str, dict[Any, Tree]]  # the numbers that capabilities report, by the kind of number


Data = dict[tuple[str, int], Tree]
"""The rows that workers load, by (name, microbatch); the name is "inputs" or "labels"."""

_COUNTED = ("sums",)  # the fields of a pending update with counted arrays
_Part = tuple[int, str, int]  # a part of the state: worker, kind (see `Worker.read_part`), number


class ConsumedArrays:
    """Deletes each array of the consumed states as soon as no part of the workers' current states holds it.

    `jax.Array.delete` does not wait: as after a donation, memory is free when the computations that read the array have ended.
    Arrays that the run itself has made are not counted, because only the run holds them.

    Attributes:
        parts: for each part that holds counted arrays the keys of these arrays.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, Any] = {}
        self._uses: dict[int, int] = {}
        self.parts: dict[_Part, list[int]] = {}

    def add(self, part: _Part, tree: Tree) -> None:
        """Count the arrays of a part of a consumed state."""
        leaves = [leaf for leaf in jax.tree_util.tree_leaves(tree) if hasattr(leaf, "delete")]
        for leaf in leaves:
            self._arrays[id(leaf)] = leaf
            self._uses.setdefault(id(leaf), 0)
        self._count(part, leaves)

    def recount(self, parts: Sequence[_Part], read: Callable[[_Part], Tree]) -> None:
        """After an instruction that has changed these parts, delete the arrays that no part holds any more; `read` returns a part."""
        before = [self.parts.pop(part) for part in parts if part in self.parts]
        for part in dict.fromkeys(parts) if before else ():
            self._count(part, jax.tree_util.tree_leaves(read(part)))
        uses = self._uses
        for key in itertools.chain.from_iterable(before):
            if key in uses:
                uses[key] -= 1
                if not uses[key]:
                    del uses[key]
                    self._arrays[key].delete()

    def keep(self, tree: Tree) -> None:
        """Stop counting these arrays, so that they are never deleted, because something other than the workers' states holds them."""
        for leaf in jax.tree.leaves(tree) if self._uses else ():
            self._uses.pop(id(leaf), None)

    def delete(self) -> None:
        """Delete all counted arrays, because the run has failed."""
        for key in self._uses:
            self._arrays[key].delete()

    def _count(self, part: _Part, leaves: Iterable[Any]) -> None:
        """Record that a part holds these leaves, if they are counted."""
        uses = self._uses
        if keys := [id(leaf) for leaf in leaves if id(leaf) in uses]:
            for key in keys:
                uses[key] += 1
            self.parts[part] = keys


@dataclass
class _MutableState:
    """The state of a worker while a program runs. Instructions change its fields; for the fields see `WorkerState`."""

    weights: WeightVersions
    optimizer: Tree
    layer_state: Tree
    accumulators: Tree
    key: jax.Array
    microbatches: dict[int, Fields]
    updates: dict[int, Fields]
    loss_scales: dict[int, LossScale]
    capabilities: dict[str, Tree]

    @classmethod
    def of(cls, state: WorkerState) -> "_MutableState":
        """Return a mutable copy of a state, with copies of its dicts."""
        return cls(**_with_copies(state))

    def freeze(self) -> WorkerState:
        """Return an immutable copy of this state, with copies of its dicts."""
        return WorkerState(**_with_copies(self))


def _with_copies(state: "WorkerState | _MutableState") -> dict[str, Any]:
    """Return the fields of a state with copied dicts, so that instructions change only one of the two states."""
    entries = {name: {number: {**fields} for number, fields in getattr(state, name).items()} for name in ("microbatches", "updates")}
    return {**vars(state), **entries, "loss_scales": {**state.loss_scales}, "capabilities": {**state.capabilities}}


class Added(NamedTuple):
    """The additions of a plan's capabilities to the interpreter."""

    handlers: dict[type, Callable[["Worker", Any], None]]  # for each additional type of instruction the function that runs it at a worker
    messages: dict[str, TransportHooks]  # the hooks of additional messages, by the name of the message
    joins: tuple[Hook, ...]  # the functions that join the pieces of sums
    updates: dict[str, UpdateHooks]  # the hooks that change updates, by the name of the capability
    for_updates: tuple[str, ...]  # the names of the fields that capabilities keep in a pending update until it is made

    @classmethod
    def by(cls, plan: Plan, capabilities: Collection[str]) -> "Added":
        """Return the additions of the capabilities of a plan and of stages (`StageFunctions.capabilities`)."""
        used = runtimes_of(plan, capabilities)
        for_updates = tuple(name for each in used for name in each.for_updates)
        return cls(merged("handlers", used), merged("messages", used), hooks("join_sums", used), updates_for(capabilities), for_updates)


class Worker:
    """A worker while a program runs, with a method for each type of instruction.

    Attributes:
        stage, replica, replicas: the number of the worker's stage, the number of its replica, and the number of replicas of the stage.
        sums: whether the replicas sum their gradients.
        separates_sums: as in `Program`, for the worker's stage.
        microbatch_shift, version_shift: the numbers to add to microbatches and versions of the program to get the numbers of the run.
        compiled, functions, calls: the compiled stage for the first bucket, its functions and its calls (see `stage_for`).
        stages, buckets: the arguments of `run`, for the worker's stage.
        transport: the transport to and from other workers.
        added: the additions of capabilities.
        frozen: the frozen parameters, which all versions share.
        completes_sums: whether something is done with complete accumulators before the update.
        has_rng, has_buckets: whether the stage draws random numbers, and whether there are several buckets.
        state: the state, which instructions change.
        data: the rows that the workers of this process load.
        workers: the workers of this process, by number.
        results: losses, evaluations and other numbers; the workers of this process share this object.
        consumed: the counter of arrays of the consumed states; the workers of this process share this object.
        changed_parts: the parts of the state that the current instruction has changed.
        done: an array that is ready when the last computation has ended; see `Event`.
        runs_serially: whether each computation must end before the next one is dispatched, see `Transport.crowded`.
    """

    def __init__(
        self,
        program: Program,
        worker: int,
        shift: int,
        stages: Sequence[CompiledStage],
        buckets: Callable[[int], int],
        state: WorkerState,
        transport: Transport,
        data: Data,
        workers: Mapping[int, "Worker"],
        results: RunResults,
        consumed: ConsumedArrays,
        added: Added,
    ) -> None:
        self.number, self.data, self.workers, self.consumed = worker, data, workers, consumed
        self.changed_parts: list[_Part] = []
        self.plan = plan = program.plan
        self.added = added
        self.stage, self.replica = plan.workers[worker]
        self.replicas = plan.replicas[self.stage]
        self.sums = program.sums_gradients[self.stage]
        self.separates_sums = program.separates_sums[self.stage]
        self.microbatch_shift, self.version_shift = shift * plan.microbatches, shift * program.updates_per_batch[self.stage]
        self.stages, self.buckets, self.transport = stages, buckets, transport
        self.compiled, self.functions, self.calls = stages[0], stages[0].functions, stages[0].calls
        self.state = _MutableState.of(state)
        trained, versions = self.functions.optimizer.trained, self.state.weights.params.values()
        # A version may still lack entries that other replicas update.
        self.frozen = trained.unchosen({entry: tree for params in versions for entry, tree in params.items()}) if trained.chosen else {}
        self.results = results
        self.has_rng, self.has_buckets = self.functions.specs.rng[1] is not None, len(stages) > 1
        self.done: jax.Array | None = None
        self.runs_serially = worker in transport.crowded
        self.completes_sums = self.separates_sums or "sum_devices" in self.calls

    def bucket(self, k: int) -> int:
        """Return the bucket of a microbatch."""
        return self.buckets(k)

    def stage_for(self, k: int) -> CompiledStage:
        """Return the compiled stage for the shapes of a microbatch."""
        return self.stages[self.bucket(k)]

    def settle(self) -> None:
        """Wait until all arrays of the worker's state are computed."""
        arrays = (leaf for leaf in jax.tree.leaves(vars(self.state)) if isinstance(leaf, jax.Array))
        jax.block_until_ready([leaf for leaf in arrays if not leaf.is_deleted()])

    def count_arrays(self) -> None:
        """Count the arrays of the consumed state. Donation deletes arrays that are not counted, such as the optimizer state."""
        state = self.state
        numbers = {"weights": state.weights.versions, "microbatch": state.microbatches, "update": state.updates, "layer state": (0,)}
        for part in [(self.number, kind, number) for kind, numbers_of_kind in numbers.items() for number in numbers_of_kind]:
            self.consumed.add(part, self.read_part(part))

    def read_part(self, part: _Part) -> Tree:
        """Return a part of the current state, without arrays that are never deleted: frozen parameters and numbers for metrics."""
        state, (_, kind, number) = self.state, part
        if kind == "weights":
            params = state.weights.params.get(number)
            return self.functions.trained.part(params) if self.frozen and params else params
        if kind == "microbatch":
            return state.microbatches.get(number)
        if kind == "update":
            pending, counted = state.updates.get(number), (*_COUNTED, *self.added.for_updates)
            return None if pending is None else [tree for name, tree in pending.items() if name.partition(" ")[0] in counted]
        return state.layer_state

    def delete_unused(self) -> None:
        """Delete the arrays of consumed states that no worker needs after the last instruction."""
        self.consumed.recount(self.changed_parts, self.read_part)
        self.changed_parts.clear()

    def delete_state(self) -> None:
        """Delete the arrays of the state that are not counted, because the run has failed."""
        state = self.state
        for leaf in jax.tree.leaves((state.optimizer, state.accumulators, state.capabilities)):
            leaf.delete()

    def changed(self, kind: str, number: int = 0) -> None:
        """Record that the instruction has changed a part of the state, if that may free arrays of a consumed state.

        An instruction that moves arrays must first change the part that has them: a part without counted arrays is recorded only after a
        part with counted arrays.
        """
        part = self.number, kind, number
        if self.changed_parts or part in self.consumed.parts:
            self.changed_parts.append(part)

    def used_microbatch(self, k: int) -> None:
        """Record that the instruction has taken fields from a microbatch in flight."""
        if not self.state.microbatches[k]:
            del self.state.microbatches[k]
        if self.consumed.parts:
            self.changed("microbatch", k)

    def change_update(self, update: int, **fields: Tree) -> None:
        """Set fields of a pending update. None removes a field; an update without fields is removed."""
        self.changed("update", update)
        pending = {**self.state.updates.pop(update, {}), **fields}
        if pending := {name: value for name, value in pending.items() if value is not None}:
            self.state.updates[update] = pending

    def change_layer_state(self, state: Tree) -> None:
        """Replace the layer state."""
        self.changed("layer state")
        self.state.layer_state = state

    @property
    def averages(self) -> bool:
        """Whether replicas average their layer state with each update."""
        return self.functions.average_state == "update"

    def load(self, i: Load) -> None:
        microbatch = self.state.microbatches.setdefault(i.microbatch + self.microbatch_shift, {})
        microbatch[i.data] = self.transport.load(i.worker, i.data, self.data.pop((i.data, i.microbatch)))

    def compute(self, i: Compute) -> None:
        """Run an op: take the fields that it reads from the microbatch, and keep its results."""
        op, state = OPS[i.op], self.state
        if not op.trains:
            self.evaluate(i)
            return
        k = i.microbatch + self.microbatch_shift
        stage, microbatch = self.stage_for(k) if self.has_buckets else self.compiled, state.microbatches[k]
        functions, reads = stage.functions, self.take(op, microbatch)
        sums = () if not op.finishes else (self.fresh_accumulators(i) if state.accumulators is None else state.accumulators,)
        left = self.run(i, op, stage, reads, sums)
        if "output" in left:
            microbatch["message" if self.functions.last else "output"] = left["output"]
        if "residuals" in left:
            microbatch["residuals"] = functions.residuals.keep(reads, (left["output"], state.layer_state)), left["residuals"]
        if "stash" in left and op.begins:
            microbatch["stash"] = functions.halves.stash_of(reads, state.layer_state, left["stash"])
        elif "stash" in left:
            microbatch["stash"] = functions.halves.late_inputs(*reads), left["stash"]
        self.used_microbatch(k)
        if op.finishes:
            state.accumulators = left["accumulators"]
            if self.completes_sums:
                self.after_backward(k)

    def run(self, i: Compute, op: Op, stage: CompiledStage, reads: tuple[Any, ...], sums: tuple[Tree, ...]) -> dict[Leaves, Tree]:
        """Run the program of an op on the fields `reads`, adding to the accumulators in `sums`, if it has any.

        Return the results; the worker has already stored the layer state and the gradient.
        """
        state, k, version = self.state, i.microbatch + self.microbatch_shift, i.version + self.version_shift
        rng, before = (np.uint32(k // self.plan.row_slices), state.key) if self.has_rng else (None, None), state.layer_state
        scale = () if op.parts == "F" else (state.loss_scales[version].value if state.loss_scales else None,)
        results, self.done = stage.calls[op.function](state.weights.read(version), *reads, *sums, rng, *scale)
        left = dict(zip(op.leaves, results if len(op.leaves) > 1 else (results,), strict=True))
        if "state" in left:
            self.change_layer_state(stage.functions.changed.joined(left["state"], before))
        if "gradient" in left and (not self.functions.first or stage.functions.positions is not None):
            state.microbatches[k]["gradient"] = left["gradient"]
        return left

    def take(self, op: Op, microbatch: Fields) -> tuple[Any, ...]:
        """Pop what an op reads: (state, x, labels), (kept arguments and outputs, saved arrays, message) or (late inputs, stash)."""
        if op.reads == "inputs":
            return self.state.layer_state, arrived(microbatch.pop("inputs")), microbatch.pop("labels", None)
        if op.reads == "residuals":
            return *microbatch.pop("residuals"), arrived(microbatch.pop("message"))
        return microbatch.pop("stash")

    def fresh_accumulators(self, i: Compute) -> Tree:
        """Return new accumulators for a computation, after the previous ones were set aside."""
        return self.calls["zero_accumulators"](self.state.weights.read(i.version + self.version_shift))

    def after_backward(self, k: int) -> None:
        """If the accumulators are complete, add them up over the devices of a mesh, and set them aside if the update comes later."""
        every = self.plan.microbatches_per_update(self.stage)
        if ends_update(self.plan, self.stage, k):
            self.state.accumulators = self.sum_devices(self.state.accumulators)
            if not self.separates_sums:
                return
            if self.functions.last and not self.sums:
                self.finish(k // every, self.calls["mean_loss"](self.state.accumulators))
            self.change_update(k // every, sums=self.state.accumulators)
            self.state.accumulators = None

    def sum_devices(self, accumulators: Tree, piece: str = "") -> Tree:
        """Add up complete accumulators over the devices of a mesh, if its backwards do not."""
        call = self.calls.get(f"sum_devices{piece}")
        summed = accumulators if call is None else call(accumulators)
        if self.runs_serially:
            jax.block_until_ready(summed)
        return summed

    def all_reduce(self, i: AllReduce) -> None:
        """Contribute this replica's part to a sum. After the last replica of this process, all its replicas get the sum."""
        state, update = self.state, i.batch + self.version_shift
        accumulators = state.updates[update][f"sums{i.piece}"]
        means = self.functions.averaged_state(state.layer_state) if self.averages and "weight" in accumulators else []
        if self.functions.summing is None:
            calls = self.calls[f"add{i.piece}"], self.calls[f"finish{i.piece}"]
            totals = self.transport.all_reduce(i, update, (accumulators, means), *calls)
        else:
            totals = self.functions.summing.run(self, i, accumulators, means)
        for w, total in totals.items():
            self.workers[w].take_sum(i, total, has_loss="loss" in accumulators)
            self.workers[w].delete_unused()

    def take_sum(self, i: AllReduce, total: Tree, *, has_loss: bool) -> None:
        """Keep the total over all replicas for the update: (sums, means of the layer state, (mean loss, weight) at the last stage)."""
        update = i.batch + self.version_shift
        pending = self.state.updates.get(update, {})
        if isinstance(total, PendingTransfer):
            self.consumed.keep(pending.get(f"sums{i.piece}"))  # the transfer may still read them
        self.change_update(update, **{f"sums{i.piece}": None, f"summed{i.piece}": total})
        if has_loss and self.replica == 0:
            self.finish(update, total[2])

    def arrived_sum(self, update: int) -> Tree:
        """Wait for the sum over all replicas, and return it in the form of `finish`."""
        for join in self.added.joins:
            join(self, update)
        return arrived(self.state.updates[update]["summed"])

    def complete(self, update: int) -> Tree:
        """Return the accumulators of a whole batch; the state keeps them."""
        if self.sums:
            self.change_update(update, summed=self.arrived_sum(update))
            return self.state.updates[update]["summed"][0]
        return self.state.updates[update]["sums"] if self.separates_sums else self.state.accumulators

    def replace_complete(self, update: int, accumulators: Tree) -> None:
        """Replace the accumulators of a whole batch."""
        if self.sums:
            self.change_update(update, summed=(accumulators, *self.state.updates[update]["summed"][1:]))
        elif self.separates_sums:
            self.change_update(update, sums=accumulators)
        else:
            self.state.accumulators = accumulators

    def send(self, i: Send) -> None:
        state, k, bucket = self.state, i.microbatch + self.microbatch_shift, 0
        tree: Tree
        if i.message in ("activation", "gradient"):
            tree = state.microbatches[k].pop("output" if i.message == "activation" else "gradient")
            bucket = self.bucket(k) if self.has_buckets else 0
            self.used_microbatch(k)
            if self.changed_parts:
                self.consumed.keep(tree)
        else:
            tree = self.added.messages[i.message].send(self, i, k // self.plan.microbatches)
            self.consumed.keep(tree)
        self.transport.send(i, k, tree, bucket)

    def receive(self, i: Receive) -> None:
        state, k = self.state, i.microbatch + self.microbatch_shift
        if i.message in ("activation", "gradient"):
            tree = self.transport.receive(i, k, self.bucket(k) if self.has_buckets else 0)
            state.microbatches.setdefault(k, {})["inputs" if i.message == "activation" else "message"] = tree
            return
        tree, update = self.transport.receive(i, k), k // self.plan.microbatches
        self.added.messages[i.message].receive(self, i, update, tree)

    def update(self, i: Update) -> None:
        state, update, kind = self.state, i.batch + self.version_shift, update_kind(i)
        accumulators = self.gradients(update)
        others = {name: hooks.argument(self, update, accumulators) for name, hooks in self.added.updates.items()}
        retires = None if i.retires is None else i.retires + self.version_shift
        memory = (state.weights.read(retires),) if retires is not None and kind == "into_retired" else ()
        number = UpdateNumber(self.plan, self.stage, i.batch)
        new, self.done = self.compiled.update(kind, memory, state.weights.read(update), state.optimizer, accumulators, others, number)
        params, state.optimizer, zeros, loss = new
        state.weights = state.weights.with_update(params, retires)
        if retires is not None:
            self.changed("weights", retires)
            state.loss_scales.pop(retires, None)
        if state.accumulators is None or not self.separates_sums:
            state.accumulators = zeros
        if self.functions.last and not self.separates_sums:
            self.finish(update, loss)

    def gradients(self, update: int) -> Tree:
        """Return the accumulators of a whole batch for its update; if replicas average the layer state at each update, average it."""
        if self.added.for_updates and update in self.state.updates:
            self.change_update(update, **dict.fromkeys(self.added.for_updates))
        if not self.separates_sums:
            return self.state.accumulators
        if not self.sums:
            sums = self.state.updates[update]["sums"]
            self.change_update(update, sums=None)
            return sums
        accumulators, means, _ = self.arrived_sum(update)
        self.change_update(update, summed=None)
        if self.averages:
            self.change_layer_state(self.functions.with_averages(self.state.layer_state, means))
        return accumulators

    def finish(self, update: int, loss: Tree) -> None:
        """Keep (mean loss, weight) of an update.

        The last update of a batch puts the losses of all updates of that batch into the results.
        """
        rate = self.plan.updates_per_batch(self.stage)
        self.change_update(update, loss=loss)
        if (update + 1) % rate == 0:
            updates = range(update + 1 - rate, update + 1)
            self.results.losses[update // rate, self.replica] = [self.state.updates[g]["loss"] for g in updates]
            for g in updates:
                self.change_update(g, loss=None)

    def release(self, i: Release) -> None:
        version = i.version + self.version_shift
        self.changed("weights", version)
        self.state.weights = self.state.weights.without(version)
        self.state.loss_scales.pop(version, None)

    def evaluate(self, i: Compute) -> None:
        """Run an evaluation; the last stage reports its results."""
        state, k, stage = self.state, i.microbatch, self.stage_for(i.microbatch) if self.has_buckets else self.compiled
        microbatch = state.microbatches[k]
        inputs = self.take(OPS[i.op], microbatch)
        rng = (np.uint32(k), state.key) if stage.functions.evaluation_rng[1] is not None else (None, None)
        y = stage.calls["evaluate"](state.weights.read(i.version), *inputs, rng)
        if self.runs_serially:
            jax.block_until_ready(y)
        if self.functions.last:
            self.results.evaluations[k] = y
        else:
            microbatch["output"] = y
        self.used_microbatch(k)
