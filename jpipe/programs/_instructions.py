"""Instructions and programs: frozen data that `lower` writes, `simulate` verifies and the runtime interprets.

Each instruction names its worker, one replica of one stage, and so its stage and its rank (`Plan.workers`, `Plan.rank_of`).
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

from jpipe._frozen import FrozenMapping
from jpipe.capabilities.protocol import ProgramHooks
from jpipe.capabilities.registry import programs_of
from jpipe.plan import Plan

Data = Literal["inputs", "labels"]


@dataclass(frozen=True, slots=True)
class Instruction:
    """What a worker does: the base of all instructions, capabilities' included. Each has a field `worker`, its number."""

    if TYPE_CHECKING:

        @property
        def worker(self) -> int: ...

    @property
    def piece(self) -> str:
        """The piece of a computation or a sum, a suffix of the names of its calls; empty: the whole, or what remains of a sum."""
        return ""

    @property
    def following(self) -> int:
        """How many further pieces of the same computation or sum follow."""
        return 0

    def later(self, microbatches: int, updates: int) -> Self:
        """Return the same instruction, shifted by this many microbatches and updates of its stage."""
        moved = {"microbatch": microbatches, **dict.fromkeys(("version", "batch", "retires"), updates)}
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self) if each.name in moved}
        return replace(self, **{name: value + moved[name] for name, value in values.items() if value is not None})


@dataclass(frozen=True, slots=True)
class Load(Instruction):
    """Bring a microbatch's inputs to a worker of the first stage, or its labels to one of the last."""

    worker: int
    microbatch: int
    data: Data


@dataclass(frozen=True, slots=True)
class Compute(Instruction):
    """Run the program of an op (a name of `jpipe.ops.OPS`) on a microbatch, with weights `version`."""

    op: str
    worker: int
    microbatch: int
    version: int

    @property
    def shown(self) -> str:
        """The op of its `Span`."""
        return self.op


@dataclass(frozen=True, slots=True)
class Send(Instruction):
    """Send the output (`activation`) or the input gradient (`gradient`) of a microbatch to the worker `to`, and free it.

    Capabilities have other messages.
    """

    worker: int
    microbatch: int
    message: str
    to: int


@dataclass(frozen=True, slots=True)
class Receive(Instruction):
    """Receive a message of the worker `source`: the stage input (`activation`), the output gradient (`gradient`) or another message."""

    worker: int
    microbatch: int
    message: str
    source: int


@dataclass(frozen=True, slots=True)
class AllReduce(Instruction):
    """Begin to sum the gradients of `batch` over the replicas of the worker's stage; its update waits for the sum.

    The instructions of all replicas stand side by side in the total order.
    """

    worker: int
    batch: int


@dataclass(frozen=True, slots=True)
class Update(Instruction):
    """Make version `batch + 1` from version `batch` and the gradients of `batch`, in the memory of version `retires` if there is one.

    `batch` counts the updates of the worker's stage: with update_every "replicas" those are more than the batches.
    """

    worker: int
    batch: int
    retires: int | None


@dataclass(frozen=True, slots=True)
class Release(Instruction):
    """Free the weights `version`, which no microbatch will read again."""

    worker: int
    version: int


CoreInstruction = Load | Compute | Send | Receive | AllReduce | Update | Release


def ends_update(plan: Plan, s: int, k: int) -> bool:
    """Return whether microbatch k is the last that its replica of stage s has in an update."""
    replicas = plan.replicas[s]
    return (k // replicas + 1) % (plan.microbatches_per_update(s) // replicas) == 0


def shifted(instruction: Instruction, plan: Plan, batches: int) -> Instruction:
    """Return the same instruction `batches` batches later in the run."""
    if not batches:
        return instruction
    return instruction.later(batches * plan.microbatches, batches * plan.updates_per_batch(plan.workers[instruction.worker][0]))


@dataclass(frozen=True)
class Program:
    """The instructions of all workers, or of some, in one total order that extends data order and the order of each rank.

    Attributes:
        plan: what was lowered.
        start: the batch before which the pipeline was empty.
        begin: the first batch that this program loads.
        end: one past the last batch that it loads.
        drained: whether the pipeline is empty afterwards.
        uses: what it does beside its plan, by the names of the capabilities.
        separates_sums: for each stage, whether it sets the gradients of a batch aside until their update, to accumulate the next
            batch meanwhile.
        versions: for each worker, afterwards, the oldest version that a microbatch will still read and the newest there is.
        ended: the batches for which it completes the gradients of the last stage, over all replicas.
        updated: for each stage, the batches that it completes the updates of.
        instructions: the total order of loads, forwards, backwards, sends, receives, sums, updates, agreements and releases; the program
            of a rank is the instructions of its workers, in the same order.
        workers: the workers that it has instructions for; None: all.
        verified: not empty once the instructions have been verified, which the next simulation then leaves out.
        prepared: what simulations have made of the instructions, for further ones.
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
    verified: set[bool] = field(default_factory=set, init=False, compare=False, repr=False)
    prepared: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def hooks(self) -> list[ProgramHooks]:
        """What the capabilities that it uses add to it."""
        return programs_of(self.plan, self.uses)

    @cached_property
    def updates_per_batch(self) -> tuple[int, ...]:
        """The updates of each stage in a batch."""
        return tuple(map(self.plan.updates_per_batch, range(self.plan.depth)))

    @cached_property
    def sums_gradients(self) -> tuple[bool, ...]:
        """Whether the replicas of each stage sum their gradients for each update."""
        return tuple(map(self.plan.sums_gradients, range(self.plan.depth)))

    def of(self, workers: Collection[int]) -> "Program":
        """Return the program with the instructions of these workers alone."""
        chosen = frozenset(workers)
        return replace(self, instructions=tuple(i for i in self.instructions if i.worker in chosen), workers=chosen)

    def worker(self, worker: int) -> Iterator[Instruction]:
        """Yield the instructions of one worker, counted from 0, in order."""
        return (i for i in self.instructions if i.worker == worker)
