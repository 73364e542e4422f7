"""Instructions and programs: frozen data that `lower` writes, `simulate` verifies and the runtime interprets.

Each instruction has the number of its worker, which is one replica of one stage; `Plan.workers` and `Plan.rank_of` map that number to stage
and rank.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from jpipe._frozen import FrozenMapping
from jpipe.capabilities.protocol import ProgramHooks
from jpipe.capabilities.registry import programs_of
from jpipe.plan import Plan

Data = Literal["inputs", "labels"]


@dataclass(frozen=True, slots=True)
class Instruction:
    """The base class of all instructions, also of capabilities. The field `worker` is the number of the worker that runs it."""

    if TYPE_CHECKING:

        @property
        def worker(self) -> int: ...

    @property
    def piece(self) -> str:
        """The piece of a computation or sum, as a suffix for the names of its calls; "" for the whole, or for the last piece of a sum."""
        return ""

    @property
    def following(self) -> int:
        """The number of pieces of the same computation or sum that follow."""
        return 0

    def later(self, microbatches: int, updates: int) -> Self:
        """Return the same instruction, shifted by `microbatches` microbatches and by `updates` updates of its stage."""
        moved = {"microbatch": microbatches, **dict.fromkeys(("version", "batch", "retires"), updates)}
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self) if each.name in moved}
        return replace(self, **{name: value + moved[name] for name, value in values.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Load(Instruction):
    """Load a microbatch's inputs at a worker of the first stage, or its labels at a worker of the last stage."""

    worker: int
    microbatch: int
    data: Data


@dataclass(frozen=True, slots=True)
class Compute(Instruction):
    """Run the program of an op (a name in `jpipe.ops.OPS`) on a microbatch, with version `version` of the weights."""

    op: str
    worker: int
    microbatch: int
    version: int

    @property
    def shown(self) -> str:
        """The op that its `Span` shows."""
        return self.op


@dataclass(frozen=True, slots=True)
class Send(Instruction):
    """Send the output (`activation`) or the input gradient (`gradient`) of a microbatch to the worker `to`, and free the array.

    Capabilities define further messages.
    """

    worker: int
    microbatch: int
    message: str
    to: int


@dataclass(frozen=True, slots=True)
class Receive(Instruction):
    """Receive a message from the worker `source`: the stage input (`activation`), the output gradient (`gradient`) or another message."""

    worker: int
    microbatch: int
    message: str
    source: int


@dataclass(frozen=True, slots=True)
class AllReduce(Instruction):
    """Begin to sum the gradients of `batch` over the replicas of the worker's stage. The update by `batch` waits for the sum.

    In the total order, the instructions of all replicas that begin one sum follow each other directly.
    """

    worker: int
    batch: int


@dataclass(frozen=True, slots=True)
class Update(Instruction):
    """Compute version `batch + 1` from version `batch` and the gradients of `batch`, in the memory of version `retires` if given.

    `batch` counts the updates of the worker's stage. With update_every "replicas" a stage makes several updates in a batch.
    """

    worker: int
    batch: int
    retires: int | None


@dataclass(frozen=True, slots=True)
class Release(Instruction):
    """Free the version `version` of the weights, which no further microbatch reads."""

    worker: int
    version: int


CoreInstruction = Load | Compute | Send | Receive | AllReduce | Update | Release


def ends_update(plan: Plan, s: int, k: int) -> bool:
    """Return whether microbatch k is the last before an update that its replica of stage s computes."""
    replicas, slices = plan.replicas[s], plan.row_slices  # the backward of the first slice is the last one
    return k % slices == 0 and (k // slices // replicas + 1) * slices % (plan.microbatches_per_update(s) // replicas) == 0


def shifted(instruction: Instruction, plan: Plan, batches: int) -> Instruction:
    """Return the same instruction for a place `batches` batches later in the run."""
    if not batches:
        return instruction
    return instruction.later(batches * plan.microbatches, batches * plan.updates_per_batch(plan.workers[instruction.worker][0]))


class Repeated(NamedTuple):
    """The part of a program that later batches repeat, with shifted numbers."""

    start: int  # the index of its first instruction
    stop: int  # one past the index of its last instruction
    batches: int  # the number of batches in it


@dataclass(frozen=True)
class Program:
    """The instructions of all workers, or of some, in one total order that extends data order and the order of each rank.

    Attributes:
        plan: the plan that was lowered.
        start: the batch before which the pipeline was empty.
        begin: the first batch that this program loads.
        end: one past the last batch that it loads.
        drained: whether the pipeline is empty after the program.
        uses: what the program does in addition to its plan, by the names of capabilities.
        separates_sums: for each stage, whether it sets a batch's gradients aside until their update, and accumulates the next batch
            meanwhile.
        versions: for each worker, after the program, the oldest version that a microbatch will still read, and the newest version.
        ended: the batches for which the program completes the gradients of the last stage, over all replicas.
        updated: for each stage, the batches for which the program completes the updates.
        instructions: the total order of loads, forwards, backwards, sends, receives, sums, updates, agreements and releases. The program of
            a rank has the instructions of its workers, in the same order.
        workers: the workers with instructions in the program; None: all.
        repeated: the part that later batches repeat, if `lower_repeated` has lowered the program.
        verified: not empty after the instructions have been verified; then simulations do not verify them again.
        prepared: data that simulations have computed from the instructions, for reuse by later simulations.
    """

    plan: Plan
    start: int
    begin: int
    end: int
    drained: bool
    uses: FrozenMapping[Any]
    separates_sums: tuple[bool, ...]
    versions: tuple[tuple[int, int], ...]
    ended: range
    updated: tuple[range, ...]
    instructions: tuple[Instruction, ...]
    workers: frozenset[int] | None = None
    repeated: Repeated | None = None
    verified: set[bool] = field(default_factory=set, init=False, compare=False, repr=False)
    prepared: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def hooks(self) -> list[ProgramHooks]:
        """The hooks of the capabilities that the program uses."""
        return programs_of(self.plan, self.uses)

    @cached_property
    def updates_per_batch(self) -> tuple[int, ...]:
        """The number of updates in a batch, for each stage."""
        return tuple(map(self.plan.updates_per_batch, range(self.plan.depth)))

    @cached_property
    def sums_gradients(self) -> tuple[bool, ...]:
        """Whether the replicas of each stage sum their gradients for each update."""
        return tuple(map(self.plan.sums_gradients, range(self.plan.depth)))

    def of(self, workers: Collection[int]) -> "Program":
        """Return the program with only the instructions of these workers."""
        chosen = frozenset(workers)
        return replace(self, instructions=tuple(i for i in self.instructions if i.worker in chosen), workers=chosen)

    def worker(self, worker: int) -> Iterator[Instruction]:
        """Yield the instructions of one worker in order; workers are counted from 0."""
        return (i for i in self.instructions if i.worker == worker)


def joined(parts: list[Program]) -> Program:
    """Return one program that runs several programs one after the other."""
    first, last = parts[0], parts[-1]
    return replace(
        last,
        start=first.start,
        begin=first.begin,
        drained=True,
        ended=range(first.ended.start, last.ended.stop),
        updated=tuple(range(before.start, after.stop) for before, after in zip(first.updated, last.updated, strict=True)),
        instructions=tuple(chain.from_iterable(part.instructions for part in parts)),
    )
