"""The interpreter: runs a program instruction by instruction on the devices. It knows no schedule by name and reads no configuration."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jpipe._compile import CompiledStage, update_kind
from jpipe._program import (
    Backward,
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
from jpipe._state import WorkerState
from jpipe._transport import LocalTransport, rows

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


def run(
    program: Program,
    shift: int,
    stages: Sequence[CompiledStage],
    states: Sequence[WorkerState],
    batches: dict[str, Tree],
    rows_each: int,
    observe: Observer | None = None,
) -> tuple[tuple[WorkerState, ...], dict[int, tuple[Any, ...]]]:
    """Dispatch all instructions of `program`, `shift` batches later than it was lowered for.

    Args:
        program: what to run.
        shift: batches to add to every batch and version of the program, and m times as many microbatches.
        stages: one for each worker.
        states: one for each worker; emptied, not to be used again.
        batches: host arrays `{"inputs": …, "labels": …}` of the program's batches, one after the other.
        rows_each: rows of one microbatch.
        observe: called after each instruction is dispatched.

    Returns:
        The new states, and (mean loss, weight, norm or None) of each batch that was finished, without waiting for any of it.
    """
    transport = LocalTransport([stage.device for stage in stages])
    microbatches = program.plan.microbatches
    workers = [_Worker(stage, state, transport, shift, microbatches) for stage, state in zip(stages, states, strict=True)]
    for instruction in program.instructions:
        worker = workers[instruction.worker]
        if type(instruction) is Load:
            row = (instruction.microbatch - program.begin * microbatches) * rows_each
            worker.load(instruction, rows(batches[instruction.data], row, row + rows_each))
        else:
            _METHODS[type(instruction)](worker, instruction)
        if observe is not None:
            observe(Event(shifted(instruction, shift, microbatches), worker.done, worker.state()))
            worker.done = None
    return tuple(worker.state() for worker in workers), workers[-1].finished


class _Worker:
    """A worker while a program runs: its state unpacked, and a method for each type of instruction."""

    def __init__(self, stage: CompiledStage, state: WorkerState, transport: LocalTransport, shift: int, microbatches: int) -> None:
        self.calls, self.transport = stage.calls, transport
        self.residuals = stage.functions.residuals
        self.last, self.first = stage.functions.last, stage.functions.first
        self.stochastic = stage.functions.specs.draw[1] is not None
        self.shift, self.microbatch_shift = shift, shift * microbatches
        own = state.taken()
        self.versions, self.buffers, self.layer_state = own.versions, own.buffers, own.layer_state
        self.optimizer, self.sums, self.key = own.optimizer, own.sums, own.key
        self.microbatches = microbatches
        self.weight: jax.Array | None = None  # of the batch that is about to be updated with
        self.squares: tuple[jax.Array, ...] = ()  # of its gradients, from this stage to the last
        self.norm: jax.Array | None = None
        self.done: jax.Array | None = None
        self.finished: dict[int, Tree] = {}  # by batch (loss, weight); in an evaluation by microbatch

    def state(self) -> WorkerState:
        return WorkerState(self.versions, self.optimizer, self.layer_state, self.sums, self.buffers, self.key)

    def draw(self, k: int) -> tuple[Any, Any]:
        return (np.uint32(k), self.key) if self.stochastic else (None, None)

    def load(self, i: Load, data: Tree) -> None:
        self.buffers[i.data, i.microbatch + self.microbatch_shift] = self.transport.load(i.worker, data)

    def forward(self, i: Forward) -> None:
        k = i.microbatch + self.microbatch_shift
        params, before = self.versions[i.version + self.shift], self.layer_state
        x, labels = self.buffers.pop(("inputs", k)), self.buffers.pop(("labels", k), None)
        (y, self.layer_state, saved), self.done = self.calls["forward"](params, before, x, labels, self.draw(k))
        self.buffers["residuals", k] = self.residuals.keep((before, x, labels), (y, self.layer_state)), saved
        self.buffers["message" if self.last else "output", k] = y

    def backward(self, i: Backward) -> None:
        k = i.microbatch + self.microbatch_shift
        kept, saved = self.buffers.pop(("residuals", k))
        message = self.buffers.pop(("message", k))
        if not self.last and self.ends_batch(k):
            message, self.weight, self.squares = message
        params = self.versions[i.version + self.shift]
        (gradient, self.sums), self.done = self.calls["backward"](params, kept, saved, message, self.sums, self.draw(k))
        self.after_backward(k, gradient)

    def forward_backward(self, i: ForwardBackward) -> None:
        k = i.microbatch + self.microbatch_shift
        x, labels = self.buffers.pop(("inputs", k)), self.buffers.pop(("labels", k))
        params = self.versions[i.version + self.shift]
        arguments = params, self.layer_state, x, labels, self.sums, self.draw(k)
        (gradient, self.sums, self.layer_state), self.done = self.calls["forward_backward"](*arguments)
        self.after_backward(k, gradient)

    def after_backward(self, k: int, gradient: Tree) -> None:
        """Keep the input gradient to be sent; the weight of the batch rides with its last one, since every stage divides by it."""
        if self.last:
            self.weight, self.squares = self.sums["weight"], ()
        if not self.first:
            self.buffers["gradient", k] = (gradient, self.weight, self.squares) if self.ends_batch(k) else gradient

    def ends_batch(self, k: int) -> bool:
        return (k + 1) % self.microbatches == 0

    def sum_squares(self, i: SumSquares) -> None:
        self.squares = (self.calls["sum_squares"](self.sums["gradients"], self.weight), *self.squares)
        if self.first:
            self.norm = self.calls["norm"](self.squares)
        else:
            k = (i.batch + self.shift + 1) * self.microbatches - 1
            self.buffers["gradient", k] = (*self.buffers["gradient", k][:2], self.squares)

    def send(self, i: Send) -> None:
        k = i.microbatch + self.microbatch_shift
        if i.message == "norm":
            self.transport.send(i.to, i.message, k, self.norm)
            return
        buffer = self.buffers.pop(("output" if i.message == "activation" else "gradient", k))
        self.transport.send(i.to, i.message, k, buffer)

    def receive(self, i: Receive) -> None:
        k = i.microbatch + self.microbatch_shift
        if i.message == "norm":
            self.norm = self.transport.receive(i.worker, i.message, k)
            return
        self.buffers["inputs" if i.message == "activation" else "message", k] = self.transport.receive(i.worker, i.message, k)

    def update(self, i: Update) -> None:
        batch, kind = i.batch + self.shift, update_kind(i)
        params = self.versions[batch]
        retired = () if i.retires is None else (self.versions.pop(i.retires + self.shift),)
        memory = retired if kind == "into_retired" else ()
        sums = {name: part for name, part in self.sums.items() if name != "weight"}  # the update takes the memory of the sums
        arguments = *memory, params, self.optimizer, sums, self.weight, self.norm
        (self.versions[batch + 1], self.optimizer, self.sums, loss), self.done = self.calls[kind](*arguments)
        if self.last:
            self.finished[batch] = loss, self.weight, self.norm

    def release(self, i: Release) -> None:
        del self.versions[i.version + self.shift]

    def evaluate(self, i: Evaluate) -> None:
        k = i.microbatch + self.microbatch_shift
        x, labels = self.buffers.pop(("inputs", k)), self.buffers.pop(("labels", k), None)
        y = self.calls["evaluate"](self.versions[i.version + self.shift], self.layer_state, x, labels)
        if self.last:
            self.finished[k] = y
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
