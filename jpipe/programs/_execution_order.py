"""The order in which the instructions of all ranks can be executed, without times and bytes."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jpipe.capabilities.protocol import merged
from jpipe.plan import Plan
from jpipe.programs._instructions import (
    AllReduce,
    Instruction,
    Program,
    Receive,
    Send,
    Update,
)


class ProgramError(ValueError):
    """A program violates its schedule. The message ends with the timeline up to the violation, as a text grid."""


class Violation(Exception):
    """A rule that a program breaks.

    Attributes:
        notes: (rank, note) pairs; `format_grid` shows each note at the row of the rank.
    """

    def __init__(self, message: str, notes: Sequence[tuple[int, str]]) -> None:
        super().__init__(message)
        self.notes = notes

    @classmethod
    def at(cls, plan: Plan, worker: int, what: str) -> "Violation":
        """Return a violation by one worker."""
        return cls(f"{plan.schedule}, {name_of(plan, worker)}: {what}", [(plan.rank_of[worker], what)])


def name_of(plan: Plan, worker: int) -> str:
    """Return the name of a worker in messages: its rank, with its stage if the rank has several stages."""
    rank = plan.rank_of[worker]
    return f"rank {rank}" + (f", stage {plan.workers[worker][0]}" if len(plan.rank_workers[rank]) > 1 else "")


def walk(program: Program) -> Iterator[Instruction]:
    """Yield all instructions in an executable order: each rank runs its instructions in order, and waits for other ranks.

    A transfer waits until both ranks have reached it; then its receive follows its send directly. An update, and any instruction between it
    and its sum, waits until all replicas have begun to sum the batch's gradients. Likewise an agreement waits for the sum of the weight
    changes. If the program has only some workers' instructions, no instruction waits for other workers. Raise Violation if a send has no
    receiver, the total order has an instruction before one that it waits for, or the ranks deadlock.
    """
    plan, instructions, rank_of = program.plan, program.instructions, program.plan.rank_of
    workers = range(len(plan.workers)) if program.workers is None else program.workers
    local = [sum(w in workers for w in replicas) for replicas in plan.stage_workers]
    queues: list[list[int]] = [[] for _ in plan.rank_workers]  # the indices of the instructions of each rank
    for index, instruction in enumerate(instructions):
        queues[rank_of[instruction.worker]].append(index)
    heads = [0 for _ in queues]
    begun = _Sums(plan, local, (AllReduce, *(kind for hooks in program.hooks for kind in hooks.sums)), merged("waits_for", program.hooks))
    ready = deque(range(len(queues)))
    while ready:
        rank = ready.popleft()
        queue = queues[rank]
        while heads[rank] < len(queue):
            index = queue[heads[rank]]
            i = instructions[index]
            if type(i) is Send and i.to in workers:
                to = rank_of[i.to]
                place = heads[to] + (to == rank)  # on the same rank the receive is the next instruction
                if place >= len(queues[to]):
                    raise Violation.at(plan, i.worker, f"{i} has no receiver")
                received = queues[to][place]
                receive = instructions[received]
                if type(receive) is not Receive or not _is_of(receive, i):
                    break
                if received < index:
                    raise Violation.at(plan, i.worker, f"{receive} stands before its {i} in the total order")
                heads[to] += 1
                ready.append(to)
                yield i
                yield receive
            elif type(i) is Receive and i.source in workers:
                source = rank_of[i.source]
                if source != rank and heads[source] < len(queues[source]):
                    send = instructions[queues[source][heads[source]]]
                    if type(send) is Send and send.to == i.worker:
                        ready.append(source)  # that rank yields the transfer, which makes this rank ready again
                break
            elif type(i) in begun.concerned and not begun.allow(i, index):
                break
            else:
                if type(i) in begun.kinds:
                    ready.extend(begun.woken_by(i))
                yield i
            heads[rank] += 1
    stuck = [rank for rank, queue in enumerate(queues) if heads[rank] < len(queue)]
    if stuck:
        notes = [(rank, f"waits at {instructions[queues[rank][heads[rank]]]}") for rank in stuck]
        raise Violation(f"{plan.schedule}: deadlock, ranks {stuck} wait for each other", notes)


def _is_of(receive: Receive, send: Send) -> bool:
    """Return whether a receive and a send are the two ends of one transfer."""
    ends = receive.source, receive.worker, receive.microbatch, receive.message
    return ends == (send.worker, send.to, send.microbatch, send.message)


class _Sums:
    """Tracks which sums over replicas have begun: sums of gradients and of arrays of capabilities.

    Args:
        plan: the plan that runs.
        counts: by stage, the number of instructions that begin one sum.
        kinds: the types of these instructions.
        waits_for: by the type of an instruction of a capability, a function that returns the sum for which the instruction waits.
    """

    def __init__(
        self, plan: Plan, counts: Sequence[int], kinds: tuple[type, ...], waits_for: Mapping[type, Callable[[Any], tuple[type, int]]]
    ) -> None:
        self.kinds, self.concerned = kinds, {*kinds, *waits_for, Update}
        self._plan, self._counts, self._waits_for = plan, counts, waits_for
        self._begun: dict[tuple[int, int, type], list[int]] = {}  # indices of instructions, by stage, batch and type

    def woken_by(self, i: Any) -> list[int]:
        """Return the ranks that can continue after an instruction begins a sum: all replicas' if all have begun it, otherwise none."""
        s, _ = self._plan.workers[i.worker]
        complete = len(self._begun[s, i.batch, type(i)]) >= self._counts[s]
        return [self._plan.rank_of[w] for w in self._plan.stage_workers[s]] if complete else []

    def allow(self, i: Any, index: int) -> bool:
        """Record that an instruction begins a sum. Return whether all replicas have begun the sum that the instruction waits for."""
        s, kind = self._plan.workers[i.worker][0], type(i)
        if kind in self.kinds:
            self._begun.setdefault((s, i.batch, kind), []).append(index)
            return True
        if kind in self._waits_for:
            needed, batch = self._waits_for[kind](i)
        elif kind is Update and self._plan.sums_gradients(s):
            needed, batch = AllReduce, i.batch
        else:
            return True
        begun = self._begun.get((s, batch, needed), [])
        if 0 < len(begun) < self._counts[s]:
            return False
        if max(begun, default=index) > index:
            raise Violation.at(self._plan, i.worker, f"{i} stands before the sum of {batch} in the total order")
        return True
