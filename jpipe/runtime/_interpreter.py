"""The interpreter: runs a program instruction by instruction on the devices. It knows no schedule by name and reads no configuration."""

from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe.programs._instructions import (
    AllReduce,
    Backward,
    Data,
    Evaluate,
    Forward,
    ForwardBackward,
    Instruction,
    Load,
    Program,
    Receive,
    Release,
    Send,
    SumSquares,
    Update,
    shifted,
)
from jpipe.runtime._lanes import arrived
from jpipe.runtime._state import WorkerState
from jpipe.runtime._transport import Transport, rows
from jpipe.stages._compile import CompiledStage, update_kind
from jpipe.stages._functions import floats_of, with_floats

Tree = Any


class Event(NamedTuple):
    """An instruction that was just dispatched.

    Attributes:
        instruction: what it was; batches, microbatches and versions as in the whole run.
        done: for a computation, an array that is there when it is over: `done.block_until_ready()` waits for that. Else None.
        state: what its worker holds now, as arrays that may still be on their way; only to look at, while the call lasts.
    """

    instruction: Instruction
    done: jax.Array | None
    state: WorkerState


Observer = Callable[[Event], None]


class Found(NamedTuple):
    """What a program found out about its batches, as far as workers of this process did; nothing of it is waited for.

    Attributes:
        losses: by batch finished the (mean loss, weight) of each of its updates; perhaps still coming from other replicas.
        norms: by batch finished the global norm, where gradients are clipped.
        evaluations: by microbatch evaluated (sum, weight) of the loss and of each metric.
    """

    losses: dict[int, list[Tree]]
    norms: dict[int, jax.Array]
    evaluations: dict[int, list[tuple[jax.Array, jax.Array]]]


def run(
    program: Program,
    shift: int,
    stages: Mapping[int, CompiledStage],
    states: Mapping[int, WorkerState],
    transport: Transport,
    data: dict[tuple[Data, int], Tree],
    observe: Observer | None = None,
) -> tuple[dict[int, WorkerState], Found]:
    """Dispatch all instructions of `program` that are for workers of this process, `shift` batches later than it was lowered for.

    Args:
        program: what to run.
        shift: batches to add to every batch and version of the program, and m times as many microbatches.
        stages: by worker of this process.
        states: by worker of this process; emptied, not to be used again.
        transport: between the workers.
        data: what `read_data` gives; is emptied.
        observe: called after each instruction is dispatched.

    Returns:
        The new states, and what was found.
    """
    plan, found = program.plan, Found({}, {}, {})
    workers = {w: _Worker(program, w, stages[w], state, transport, shift, found) for w, state in states.items()}
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
        if observe is not None:
            observe(Event(shifted(instruction, plan, shift), worker.done, worker.state()))
            worker.done = None
    return {w: worker.state() for w, worker in workers.items()}, found


def read_data(program: Program, workers: Container[int], batches: dict[str, Tree], rows_each: int) -> dict[tuple[Data, int], Tree]:
    """All rows that these workers load in the program. They are read before a run, which uses up its states, since reading may fail.

    Args:
        program: what will run.
        workers: those of this process.
        batches: host arrays `{"inputs": …, "labels": …}` of the program's batches, one after the other.
        rows_each: rows of one microbatch.

    Raises:
        InputError: a part of a batch has other rows than its shape and dtype say.
    """
    found: dict[tuple[Data, int], Tree] = {}
    for i in program.instructions:
        if type(i) is Load and i.worker in workers:
            row = (i.microbatch - program.begin * program.plan.microbatches) * rows_each
            found[i.data, i.microbatch] = rows(batches[i.data], row, row + rows_each)
    return found


class _Worker:
    """A worker while a program runs: its state unpacked, and a method for each type of instruction."""

    def __init__(
        self, program: Program, number: int, stage: CompiledStage, state: WorkerState, transport: Transport, shift: int, found: Found
    ) -> None:
        plan = program.plan
        self.found = found
        s, self.replica = plan.workers[number]
        self.calls, self.transport = stage.calls, transport
        self.residuals = stage.functions.residuals
        self.last, self.first = stage.functions.last, stage.functions.first
        self.stochastic = stage.functions.specs.draw[1] is not None
        self.averages = stage.functions.average_state == "update"
        self.replicas, self.every = plan.replicas[s], plan.microbatches_per_update(s)
        self.updates_per_batch = plan.updates_per_batch(s)
        self.microbatches = plan.microbatches
        self.microbatch_shift, self.update_shift = shift * plan.microbatches, shift * self.updates_per_batch
        own = state.taken()
        self.versions, self.buffers, self.layer_state = own.versions, own.buffers, own.layer_state
        self.optimizer, self.sums, self.key = own.optimizer, own.sums, own.key
        self.squares: tuple[jax.Array, ...] = ()  # of the gradients of this stage and those after it
        self.norm: jax.Array | None = None
        self.done: jax.Array | None = None

    def state(self) -> WorkerState:
        return WorkerState(self.versions, self.optimizer, self.layer_state, self.sums, self.buffers, self.key)

    def draw(self, k: int) -> tuple[Any, Any]:
        return (np.uint32(k), self.key) if self.stochastic else (None, None)

    def load(self, i: Load, data: Tree) -> None:
        self.buffers[i.data, i.microbatch + self.microbatch_shift] = self.transport.load(i.worker, data)

    def forward(self, i: Forward) -> None:
        k = i.microbatch + self.microbatch_shift
        params, before = self.versions[i.version + self.update_shift], self.layer_state
        x, labels = arrived(self.buffers.pop(("inputs", k))), self.buffers.pop(("labels", k), None)
        (y, self.layer_state, saved), self.done = self.calls["forward"](params, before, x, labels, self.draw(k))
        self.buffers["residuals", k] = self.residuals.keep((before, x, labels), (y, self.layer_state)), saved
        self.buffers["message" if self.last else "output", k] = y

    def backward(self, i: Backward) -> None:
        k = i.microbatch + self.microbatch_shift
        kept, saved = self.buffers.pop(("residuals", k))
        message = arrived(self.buffers.pop(("message", k)))
        params = self.versions[i.version + self.update_shift]
        (gradient, self.sums), self.done = self.calls["backward"](params, kept, saved, message, self.taken_sums(params), self.draw(k))
        self.after_backward(k, gradient)

    def forward_backward(self, i: ForwardBackward) -> None:
        k = i.microbatch + self.microbatch_shift
        x, labels = arrived(self.buffers.pop(("inputs", k))), self.buffers.pop(("labels", k))
        params = self.versions[i.version + self.update_shift]
        arguments = params, self.layer_state, x, labels, self.taken_sums(params), self.draw(k)
        (gradient, self.sums, self.layer_state), self.done = self.calls["forward_backward"](*arguments)
        self.after_backward(k, gradient)

    def taken_sums(self, params: Tree) -> Tree:
        """What the batch has accumulated, nothing if the last one was set aside: the computation writes into its memory."""
        return self.sums if self.sums is not None else self.calls["zero_sums"](params)

    def after_backward(self, k: int, gradient: Tree) -> None:
        """Keep the input gradient to be sent; set the batch aside if it is complete and waits for those of other replicas."""
        if not self.first:
            self.buffers["gradient", k] = gradient
        if self.replicas > 1 and (k + self.replicas) // self.every > k // self.every:
            self.buffers["sums", k // self.every] = self.sums
            self.sums = None

    def all_reduce(self, i: AllReduce) -> Mapping[int, Tree]:
        batch = i.batch + self.update_shift
        part = self.buffers.pop(("sums", batch)), floats_of(self.layer_state) if self.averages else []
        return self.transport.all_reduce(i, batch, part, self.calls["add"], self.calls["finish"])

    def take_sum(self, i: AllReduce, total: Tree) -> None:
        """Keep (sums, means of the layer state, (mean loss, weight) at the last stage) of all replicas for the update."""
        self.buffers["summed", i.batch + self.update_shift] = total
        if self.last and self.replica == 0:
            self.finish(i.batch + self.update_shift, total[2])

    def sum_squares(self, i: SumSquares) -> None:
        batch = i.batch + self.update_shift
        if self.replicas > 1:
            self.buffers["summed", batch] = arrived(self.buffers["summed", batch])
        sums = self.sums if self.replicas == 1 else self.buffers["summed", batch][0]
        later = arrived(self.buffers.pop(("squares", batch), ()))
        self.squares = (self.calls["sum_squares"](sums), *later)
        if self.first:
            self.norm = self.calls["norm"](self.squares)

    def send(self, i: Send) -> None:
        k = i.microbatch + self.microbatch_shift
        tree: Tree
        match i.message:
            case "norm":
                tree = self.norm
            case "squares":
                tree, self.squares = self.squares, ()
            case message:
                tree = self.buffers.pop(("output" if message == "activation" else "gradient", k))
        self.transport.send(i, k, tree)

    def receive(self, i: Receive) -> None:
        k = i.microbatch + self.microbatch_shift
        tree = self.transport.receive(i, k)
        match i.message:
            case "norm":
                self.norm = arrived(tree)
            case "squares":
                self.buffers["squares", k // self.microbatches] = tree
            case message:
                self.buffers["inputs" if message == "activation" else "message", k] = tree

    def update(self, i: Update) -> None:
        batch, kind = i.batch + self.update_shift, update_kind(i)
        sums = self.sums if self.replicas == 1 else self.summed(batch)
        params = self.versions[batch]
        retired = () if i.retires is None else (self.versions.pop(i.retires + self.update_shift),)
        memory = retired if kind == "into_retired" else ()
        arguments = *memory, params, self.optimizer, sums, self.norm
        (self.versions[batch + 1], self.optimizer, zeros, found), self.done = self.calls[kind](*arguments)
        if self.replicas == 1 or self.sums is None:
            self.sums = zeros
        if self.last and self.replicas == 1:
            self.finish(batch, found)
        if self.last and self.replica == 0 and self.norm is not None:
            self.found.norms[batch] = self.norm

    def summed(self, batch: int) -> Tree:
        """What the replicas have accumulated together; their layer states become the mean with it if they average them now."""
        sums, means, _ = arrived(self.buffers.pop(("summed", batch)))
        if self.averages:
            self.layer_state = with_floats(self.layer_state, means)
        return sums

    def finish(self, update: int, found: Tree) -> None:
        """Note (mean loss, weight); where several updates make a batch, with the last of them."""
        self.buffers["loss", update] = found
        if (update + 1) % self.updates_per_batch == 0:
            batch = update // self.updates_per_batch
            updates = range(batch * self.updates_per_batch, update + 1)
            self.found.losses[batch] = [self.buffers.pop(("loss", g)) for g in updates]

    def release(self, i: Release) -> None:
        del self.versions[i.version + self.update_shift]

    def evaluate(self, i: Evaluate) -> None:
        k = i.microbatch
        x, labels = arrived(self.buffers.pop(("inputs", k))), self.buffers.pop(("labels", k), None)
        y = self.calls["evaluate"](self.versions[i.version], self.layer_state, x, labels)
        if self.last:
            self.found.evaluations[k] = y
        else:
            self.buffers["output", k] = y


_METHODS: dict[type, Callable[[_Worker, Any], None]] = {
    Forward: _Worker.forward,
    Backward: _Worker.backward,
    ForwardBackward: _Worker.forward_backward,
    Send: _Worker.send,
    Receive: _Worker.receive,
    SumSquares: _Worker.sum_squares,
    Update: _Worker.update,
    Release: _Worker.release,
    Evaluate: _Worker.evaluate,
}
