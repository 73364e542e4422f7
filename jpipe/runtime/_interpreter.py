"""The interpreter: runs a program instruction by instruction on the devices. It knows no schedule and reads no configuration."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe.meshes._place import crowded_meshes
from jpipe.model._precision import LossScale
from jpipe.ops import OPS, Op
from jpipe.programs._instructions import (
    AddShared,
    AllReduce,
    Compute,
    Instruction,
    Load,
    Program,
    Receive,
    Release,
    Send,
    SumSquares,
    TakeShared,
    Update,
    shifted,
)
from jpipe.runtime._lanes import arrived
from jpipe.runtime._nan_check import checked, is_on
from jpipe.runtime._state import WorkerState
from jpipe.runtime._transport import Transport, rows
from jpipe.stages._compiled_stage import CompiledStage, update_kind
from jpipe.stages.functions._sums import shared_with

Tree = Any


class Event(NamedTuple):
    """An instruction that was just dispatched.

    Attributes:
        instruction: what it was; batches, microbatches and versions as in the whole run.
        done: for a computation, an array that is ready when it is over: `done.block_until_ready()` waits for that. Else None.
        state: what its worker holds now, as arrays that may not be ready; only to be read, and only during the call.
    """

    instruction: Instruction
    done: jax.Array | None
    state: WorkerState


Observer = Callable[[Event], None]
Data = dict[tuple[str, int], Tree]
"""What workers load, by name (inputs or labels) and microbatch."""


class Found(NamedTuple):
    """What workers of this process computed besides their states, as arrays that may not be ready.

    Attributes:
        losses: for each finished batch, the (mean loss, weight) of each of its updates; perhaps still to come from other replicas.
        norms: for each update that used it, the `GlobalNorm` of the gradients, and after it the next loss scale if that is dynamic.
        evaluations: for each evaluated microbatch, (sum, weight) of the loss and of each metric; in a prediction the outputs.
    """

    losses: dict[int, list[Tree]]
    norms: dict[int, Tree]
    evaluations: dict[int, Tree]


def run(
    program: Program,
    shift: int,
    stages: Mapping[int, Sequence[CompiledStage]],
    buckets: Callable[[int], int],
    states: Mapping[int, WorkerState],
    transport: Transport,
    data: Data,
    observe: Observer | None = None,
) -> tuple[dict[int, WorkerState], Found]:
    """Dispatch all instructions of `program` that are for workers of this process, `shift` batches later than it was lowered for.

    Args:
        program: what to run.
        shift: batches to add to every batch and version of the program, and m times as many microbatches.
        stages: by worker of this process, for each bucket.
        buckets: gives the bucket of a batch, as counted in the run.
        states: by worker of this process; consumed.
        transport: between the workers.
        data: from `read_data`; consumed.
        observe: called after each instruction is dispatched.

    Returns:
        The new states, and what was found.
    """
    plan, found = program.plan, Found({}, {}, {})
    if is_on():
        stages = checked(plan, stages)
    workers = {w: _Worker(program, w, shift, stages[w], buckets, state, transport, found) for w, state in states.items()}
    crowded = crowded_meshes(own.compiled.place for own in workers.values())
    for own in workers.values():
        own.takes_turns = own.compiled.place in crowded
    try:
        for instruction in program.instructions:
            worker = workers.get(instruction.worker)
            if worker is None:
                continue
            if type(instruction) is Load:
                worker.load(instruction, data.pop((instruction.data, instruction.microbatch)))
            elif type(instruction) is AllReduce:
                for w, total in worker.all_reduce(instruction).items():
                    workers[w].take_sum(instruction, total)
            else:
                _METHODS[type(instruction)](worker, instruction)
            if worker.takes_turns:
                worker.settle()
            if observe is not None:
                observe(Event(shifted(instruction, plan, shift), worker.done, worker.held.state()))
                worker.done = None
    except BaseException:
        transport.forget()
        raise
    return {w: worker.held.state() for w, worker in workers.items()}, found


def read_data(program: Program, workers: Container[int], batches: Mapping[str, Tree], rows_each: int) -> Data:
    """Read all rows that these workers load in the program. Reading may fail, so it comes before the run, which consumes its states.

    Args:
        program: what will run.
        workers: those of this process.
        batches: host arrays `{"inputs": …, "labels": …}` of the program's batches, concatenated.
        rows_each: rows per microbatch.

    Raises:
        InputError: a part of a batch has other rows than its shape and dtype say.
    """
    found: Data = {}
    for i in program.instructions:
        if type(i) is Load and i.worker in workers:
            row = (i.microbatch - program.begin * program.plan.microbatches) * rows_each
            found[i.data, i.microbatch] = rows(batches[i.data], row, row + rows_each)
    return found


@dataclass
class _Held:
    """What a worker holds while a program runs: its state, unpacked, and the sums of squares until they are sent.

    Attributes:
        squares: sums of the squared gradients of this stage and those after it.
    """

    versions: dict[int, Tree]
    optimizer: Tree
    layer_state: Tree
    accumulators: Tree
    buffers: dict[tuple[str, int], Tree]
    key: jax.Array
    loss_scales: dict[int, LossScale]
    squares: tuple[Tree, ...] = ()

    def state(self) -> WorkerState:
        return WorkerState(self.versions, self.optimizer, self.layer_state, self.accumulators, self.buffers, self.key, self.loss_scales)

    def all_entries(self) -> Tree:
        """Weights of all entries, whichever version they are of: one may still lack what other replicas update."""
        return {entry: tree for params in self.versions.values() for entry, tree in params.items()}

    def retire(self, version: int) -> Tree:
        """The weights of a version, which is no longer kept."""
        self.loss_scales.pop(version, None)
        return self.versions.pop(version)

    def scale(self, version: int) -> jax.Array | None:
        """The loss scale of the microbatches that read a version, if it is dynamic."""
        return self.loss_scales[version].value if self.loss_scales else None

    def take_inputs(self, k: int) -> tuple[Tree, Tree]:
        """The stage input, waited for if it comes from another process, and at the last stage the labels."""
        return arrived(self.buffers.pop(("inputs", k))), self.buffers.pop(("labels", k), None)


class _Worker:
    """A worker while a program runs, with a method for each type of instruction.

    Attributes:
        stage, replica, replicas: its stage, which replica of it the worker is, and how many there are.
        sets_aside, global_norm: as in `Program`, for its stage.
        shared: as in `Program`.
        microbatch_shift, version_shift: to be added to the numbers of the program for those of the run.
        compiled, functions, calls: of its stage; what depends on the shapes of a microbatch is in `of`.
        stages, buckets: as given to `run`, for its stage.
        transport: to and from other workers.
        frozen: the frozen parameters, which all versions share.
        held: what instructions change.
        found: what they compute besides; shared by the workers of this process.
        done: of the last computation, see `Event`.
        takes_turns: whether each computation has to be over before the next one is dispatched, see `crowded_meshes`.
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
        found: Found,
    ) -> None:
        self.plan = plan = program.plan
        self.stage, self.replica = plan.workers[worker]
        self.replicas = plan.replicas[self.stage]
        self.sets_aside, self.global_norm = program.sets_aside[self.stage], program.global_norm
        self.shared = program.shared
        self.microbatch_shift, self.version_shift = shift * plan.microbatches, shift * plan.updates_per_batch(self.stage)
        self.stages, self.buckets, self.transport = stages, buckets, transport
        self.compiled, self.functions, self.calls = stages[0], stages[0].functions, stages[0].calls
        self.held = _Held(**vars(state.taken()))
        self.frozen = {} if self.functions.trained.is_all else self.functions.trained.others(self.held.all_entries())
        self.found = found
        self.done: jax.Array | None = None
        self.takes_turns = False

    def rng(self, k: int) -> tuple[Any, Any]:
        return (np.uint32(k), self.held.key) if self.functions.specs.rng[1] is not None else (None, None)

    def bucket(self, k: int) -> int:
        """The bucket of a microbatch."""
        return self.buckets(k // self.plan.microbatches)

    def of(self, k: int) -> CompiledStage:
        """What its stage computes a microbatch with."""
        return self.stages[self.bucket(k)]

    def settle(self) -> None:
        """Wait for all that the worker has computed."""
        arrays = (leaf for leaf in jax.tree.leaves(vars(self.held)) if isinstance(leaf, jax.Array))
        jax.block_until_ready([leaf for leaf in arrays if not leaf.is_deleted()])

    @property
    def averages(self) -> bool:
        """Whether replicas average their layer state with each update."""
        return self.functions.average_state == "update"

    def load(self, i: Load, data: Tree) -> None:
        self.held.buffers[i.data, i.microbatch + self.microbatch_shift] = self.transport.load(i.worker, i.data, data)

    def compute(self, i: Compute) -> None:
        """Run an op on what it reads, and keep what it leaves."""
        op, held = OPS[i.op], self.held
        if not op.trains:
            self.evaluate(i)
            return
        k, version = i.microbatch + self.microbatch_shift, i.version + self.version_shift
        params, before, stage = held.versions[version], held.layer_state, self.of(k)
        functions, reads = stage.functions, self.read(op, k)
        sums = (self.taken_accumulators(params),) if op.finishes else ()
        scale = (held.scale(version),) if op.parts != "F" else ()
        results, self.done = stage.calls[op.function](params, *reads, *sums, self.rng(k), *scale)
        left = dict(zip(op.leaves, results if len(op.leaves) > 1 else (results,), strict=True))
        if "state" in left:
            held.layer_state = functions.changed.joined(left["state"], before)
        if "output" in left:
            held.buffers["message" if self.functions.last else "output", k] = left["output"]
        if "residuals" in left:
            held.buffers["residuals", k] = functions.residuals.keep(reads, (left["output"], held.layer_state)), left["residuals"]
        if "stash" in left and op.begins:
            held.buffers["stash", k] = functions.halves.stash_of(reads, held.layer_state, left["stash"])
        elif "stash" in left:
            held.buffers["stash", k] = functions.halves.late_inputs(*reads), left["stash"]
        if op.gives_gradient and not self.functions.first:
            held.buffers["gradient", k] = left["gradient"]
        if op.finishes:
            held.accumulators = left["accumulators"]
            self.after_backward(k)

    def read(self, op: Op, k: int) -> tuple[Any, ...]:
        """Take what an op reads: (state, x, labels), (kept arguments and outputs, saved arrays, gradient message) or (rest, stash)."""
        if op.reads == "inputs":
            return self.held.layer_state, *self.held.take_inputs(k)
        if op.reads == "residuals":
            kept, saved = self.held.buffers.pop(("residuals", k))
            return kept, saved, arrived(self.held.buffers.pop(("message", k)))
        rest, stash = self.held.buffers.pop(("stash", k))
        return rest, stash

    def taken_accumulators(self, params: Tree) -> Tree:
        """The gradient accumulators, new ones if the last were set aside; the computation writes into their memory."""
        return self.held.accumulators if self.held.accumulators is not None else self.calls["zero_accumulators"](params)

    def after_backward(self, k: int) -> None:
        """Set the accumulators aside if they are complete and wait for their update."""
        if self.sets_aside:
            every = self.plan.microbatches_per_update(self.stage)
            if (k + self.replicas) // every > k // every:
                if self.functions.last and self.replicas == 1:
                    self.finish(k // every, self.calls["mean_loss"](self.held.accumulators))
                self.held.buffers["sums", k // every], self.held.accumulators = self.held.accumulators, None

    def all_reduce(self, i: AllReduce) -> Mapping[int, Tree]:
        held, update = self.held, i.batch + self.version_shift
        part = held.buffers.pop(("sums", update)), self.functions.averaged_state(held.layer_state) if self.averages else []
        return self.transport.all_reduce(i, update, part, self.calls["add"], self.calls["finish"])

    def take_sum(self, i: AllReduce, total: Tree) -> None:
        """Keep (sums, means of the layer state, (mean loss, weight) at the last stage) of all replicas for the update."""
        update = i.batch + self.version_shift
        self.held.buffers["summed", update] = total
        if self.functions.last and self.replica == 0:
            self.finish(update, total[2])

    def complete(self, update: int) -> Tree:
        """The accumulators of a whole batch, which stay where they are."""
        buffers = self.held.buffers
        if self.replicas > 1:
            buffers["summed", update] = arrived(buffers["summed", update])
            return buffers["summed", update][0]
        return buffers["sums", update] if self.sets_aside else self.held.accumulators

    def take_shared(self, i: TakeShared) -> None:
        update = i.batch + self.version_shift
        self.held.buffers["shared", update] = self.calls["take_shared"](self.complete(update))

    def add_shared(self, i: AddShared) -> None:
        """Add the shared gradients of the other stages; the computation writes into the memory of the accumulators."""
        held, update = self.held, i.batch + self.version_shift
        accumulators = self.complete(update)
        stages = [s for s in self.shared[i.group] if s != self.stage]
        for s in stages:
            held.buffers[f"shared of stage {s}", update] = arrived(held.buffers[f"shared of stage {s}", update])
        received = {s: held.buffers[f"shared of stage {s}", update] for s in stages}
        added = self.calls[f"add_shared {i.group}"](accumulators, received)
        if self.replicas > 1:
            held.buffers["summed", update] = (added, *held.buffers["summed", update][1:])
        elif self.sets_aside:
            held.buffers["sums", update] = added
        else:
            held.accumulators = added

    def sum_squares(self, i: SumSquares) -> None:
        held, update = self.held, i.batch + self.version_shift
        accumulators = self.complete(update)
        later = arrived(held.buffers.pop(("squares", update), ()))
        squares = self.calls["sum_squares"](accumulators), *later
        if self.functions.first:
            held.buffers["norm", update] = self.calls["norm"](squares)
        else:
            held.squares = squares

    def send(self, i: Send) -> None:
        held, k, bucket = self.held, i.microbatch + self.microbatch_shift, 0
        tree: Tree
        match i.message:
            case "norm":
                tree = arrived(held.buffers["norm", k // self.plan.microbatches])
            case "squares":
                tree, held.squares = held.squares, ()
            case "shared":
                tree = shared_with(self.functions, self.plan.workers[i.to][0], held.buffers["shared", k // self.plan.microbatches])
            case "weights":
                assert self.compiled.share is not None
                tree = self.compiled.share.outgoing(self.functions.trained.part(held.versions[k // self.plan.microbatches + 1]))
            case message:
                tree, bucket = held.buffers.pop(("output" if message == "activation" else "gradient", k)), self.bucket(k)
        self.transport.send(i, k, tree, bucket)

    def receive(self, i: Receive) -> None:
        held, k = self.held, i.microbatch + self.microbatch_shift
        tree = self.transport.receive(i, k, self.bucket(k) if i.message in ("activation", "gradient") else 0)
        match i.message:
            case "norm" | "squares":
                held.buffers[i.message, k // self.plan.microbatches] = tree
            case "shared":
                held.buffers[f"shared of stage {self.plan.workers[i.source][0]}", k // self.plan.microbatches] = tree
            case "weights":
                held.versions[k // self.plan.microbatches + 1] |= self.functions.trained.joined(arrived(tree), self.frozen)
            case message:
                held.buffers["inputs" if message == "activation" else "message", k] = tree

    def update(self, i: Update) -> None:
        held, update, kind = self.held, i.batch + self.version_shift, update_kind(i)
        accumulators, norm = self.gradients(update), self.norm(update)
        params = held.versions[update]
        if held.loss_scales:
            held.loss_scales[update + 1] = self.calls["next_scale"](held.loss_scales[update], norm)
        retired = () if i.retires is None else (held.retire(i.retires + self.version_shift),)
        memory = retired if kind == "into_retired" else ()
        new, self.done = self.compiled.update(kind, memory, params, held.optimizer, accumulators, norm)
        held.versions[update + 1], held.optimizer, zeros, found = new
        if held.accumulators is None or not self.sets_aside:
            held.accumulators = zeros
        if self.functions.last and not self.sets_aside:
            self.finish(update, found)
        if self.functions.last and self.replica == 0 and self.global_norm:
            scale = held.scale(update + 1)
            self.found.norms[update] = norm if scale is None else (*norm, scale)

    def norm(self, update: int) -> Tree:
        """The norm of the gradients of all stages, if updates use it; the worker keeps it, for it may have to send it on."""
        if not self.global_norm:
            return None
        self.held.buffers.pop(("norm", update - 1), None)
        norm = self.held.buffers["norm", update] = arrived(self.held.buffers["norm", update])
        return norm

    def gradients(self, update: int) -> Tree:
        """The accumulators of a whole batch, for its update; the layer state becomes its mean if replicas average it with each update."""
        for kind in ("shared", *(f"shared of stage {s}" for s in range(self.plan.depth if self.shared else 0))):
            self.held.buffers.pop((kind, update), None)
        if not self.sets_aside:
            return self.held.accumulators
        if self.replicas == 1:
            return self.held.buffers.pop(("sums", update))
        accumulators, means, _ = arrived(self.held.buffers.pop(("summed", update)))
        if self.averages:
            self.held.layer_state = self.functions.with_averages(self.held.layer_state, means)
        return accumulators

    def finish(self, update: int, found: Tree) -> None:
        """Keep (mean loss, weight) of an update; the last one of a batch reports those of all its updates."""
        buffers, rate = self.held.buffers, self.plan.updates_per_batch(self.stage)
        buffers["loss", update] = found
        if (update + 1) % rate == 0:
            self.found.losses[update // rate] = [buffers.pop(("loss", g)) for g in range(update + 1 - rate, update + 1)]

    def release(self, i: Release) -> None:
        self.held.retire(i.version + self.version_shift)

    def evaluate(self, i: Compute) -> None:
        held, k, stage = self.held, i.microbatch, self.of(i.microbatch)
        x, labels = held.take_inputs(k)
        rng = (np.uint32(k), held.key) if stage.functions.evaluation_rng[1] is not None else (None, None)
        y = stage.calls["evaluate"](held.versions[i.version], held.layer_state, x, labels, rng)
        if self.takes_turns:
            jax.block_until_ready(y)
        if self.functions.last:
            self.found.evaluations[k] = y
        else:
            held.buffers["output", k] = y


_METHODS: dict[type, Callable[[_Worker, Any], None]] = {
    Compute: _Worker.compute,
    Send: _Worker.send,
    Receive: _Worker.receive,
    TakeShared: _Worker.take_shared,
    AddShared: _Worker.add_shared,
    SumSquares: _Worker.sum_squares,
    Update: _Worker.update,
    Release: _Worker.release,
}
