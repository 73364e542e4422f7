"""Instructions, and the program that holds them: tiny frozen data that `lower` writes, `simulate` proves and the runtime interprets."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from jpipe._plan import Plan

Data = Literal["inputs", "labels"]
Message = Literal["activation", "gradient", "norm"]


@dataclass(frozen=True, slots=True)
class Load:
    """Bring a microbatch's inputs to the first worker, or its labels to the last."""

    worker: int
    microbatch: int
    data: Data


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the stage on the stage input with weights `version`; leaves the output and the residuals."""

    worker: int
    microbatch: int
    version: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Turn residuals and output gradient into the input gradient with weights `version`; add to the gradients of the batch."""

    worker: int
    microbatch: int
    version: int


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """Forward and backward of one microbatch in one program, where the backward follows at once (the last stage)."""

    worker: int
    microbatch: int
    version: int


@dataclass(frozen=True, slots=True)
class Send:
    """Give the output (`activation`) or the input gradient (`gradient`) of a microbatch to the worker `to`, and let go of it.

    `norm`: the norm of the batch that ends with the microbatch, to the next stage.
    """

    worker: int
    microbatch: int
    message: Message
    to: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Take what the worker `source` sends: the stage input (`activation`), the output gradient (`gradient`) or the `norm`."""

    worker: int
    microbatch: int
    message: Message
    source: int


@dataclass(frozen=True, slots=True)
class SumSquares:
    """Sum the squares of the mean gradient of `batch`, layer by layer, to be sent with its last gradient; at stage 0 make the norm."""

    worker: int
    batch: int


@dataclass(frozen=True, slots=True)
class Update:
    """Make version `batch + 1` from version `batch` and the gradients of `batch`, in the memory of version `retires` if there is one."""

    worker: int
    batch: int
    retires: int | None


@dataclass(frozen=True, slots=True)
class Release:
    """Let go of weights `version`: no microbatch will read them again."""

    worker: int
    version: int


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Run the stage forward only, in evaluation mode, with weights `version`."""

    worker: int
    microbatch: int
    version: int


Instruction = Load | Forward | Backward | ForwardBackward | Send | Receive | SumSquares | Update | Release | Evaluate


def shifted(instruction: Instruction, batches: int, microbatches: int) -> Instruction:
    """The same instruction so many batches, of `microbatches` each, later in the run."""
    moved = {"microbatch": batches * microbatches, "version": batches, "batch": batches, "retires": batches}
    fields = {name: getattr(instruction, name) for name in instruction.__slots__}
    return replace(instruction, **{name: value + moved[name] for name, value in fields.items() if name in moved and value is not None})


@dataclass(frozen=True)
class Program:
    """The instructions of all workers in one total order that extends data order and each worker's program order.

    Attributes:
        plan: what was lowered.
        start: the batch before which the pipeline was empty.
        begin: the first batch whose data this program loads.
        end: one past the last batch whose data it loads.
        drained: whether the pipeline is empty afterwards.
        clips: whether updates wait for the norm of all stages' gradients.
        instructions: the total order of loads, forwards, backwards, sends, receives, updates and releases; one worker's
            program is what is left when the others' are taken out.
    """

    plan: Plan
    start: int
    begin: int
    end: int
    drained: bool
    clips: bool
    instructions: tuple[Instruction, ...]

    def worker(self, worker: int) -> Iterator[Instruction]:
        """The instructions of one worker, counted from 0, in order."""
        return (i for i in self.instructions if i.worker == worker)
