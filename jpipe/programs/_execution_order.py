"""An executable order of the instructions of all ranks, without times and bytes."""

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
    """A program that violates its schedule; the message ends with the grid up to the violation."""


class Violation(Exception):
    """A rule that a program breaks.

    Attributes:
        notes: (rank, note) pairs for the rows of a grid.
    """

    def __init__(self, message: str, notes: Sequence[tuple[int, str]]) -> None:
        super().__init__(message)
        self.notes = notes

    @classmethod
    def at(cls, plan: Plan, worker: int, what: str) -> "Violation":
        """Return a violation by one worker."""
        return cls(f"{plan.schedule}, {name_of(plan, worker)}: {what}", [(plan.rank_of[worker], what)])


def name_of(plan: Plan, worker: int) -> str:
    """Return the name of a worker in messages: its rank, and its stage where the rank has several."""
    rank = plan.rank_of[worker]
    return f"rank {rank}" + (f", stage {plan.workers[worker][0]}" if len(plan.rank_workers[rank]) > 1 else "")


def walk(program: Program) -> Iterator[Instruction]:
    """Yield all instructions in an executable order: each rank runs its instructions in order, and waits for other ranks.

    A transfer waits until both ranks have come to it; its receive follows its send at once. An update, or what comes between the sum of
    the gradients and it, waits until all replicas have begun to sum the gradients of its batch; so does an agreement with the changes of
    the weights. If the program has the instructions of some workers, nothing waits for other workers.

    Raises:
        Violation: a send has no receiver, the total order has an instruction before one that it waits for, or the ranks deadlock.
    """
    plan, instructions, rank_of = program.plan, program.instructions, program.plan.rank_of
    workers = range(len(plan.workers)) if program.workers is None else program.workers
    local = [sum(w in workers for w in replicas) for replicas in plan.stage_workers]
    queues: list[list[int]] = [[] for _ in plan.rank_workers]  # indices of instructions
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
                place = heads[to] + (to == rank)  # on the same rank the receive comes next
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
                        ready.append(source)  # the transfer happens there and makes this rank ready again
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
    """The sums over the replicas of stages that have begun, of gradients and of what capabilities sum.

    Args:
        plan: what runs.
        counts: the number of instructions that begin a sum, by stage.
        kinds: the types of these instructions.
        waits_for: the sum that an instruction of a capability waits for, by the type of instruction.
    """

    def __init__(
        self, plan: Plan, counts: Sequence[int], kinds: tuple[type, ...], waits_for: Mapping[type, Callable[[Any], tuple[type, int]]]
    ) -> None:
        self.kinds, self.concerned = kinds, {*kinds, *waits_for, Update}
        self._plan, self._counts, self._waits_for = plan, counts, waits_for
        self._begun: dict[tuple[int, int, type], list[int]] = {}  # by stage, batch and type, the indices of what has begun a sum so far

    def woken_by(self, i: Any) -> list[int]:
        """Return the ranks that can continue once all replicas have begun a sum."""
        s, _ = self._plan.workers[i.worker]
        complete = len(self._begun[s, i.batch, type(i)]) >= self._counts[s]
        return [self._plan.rank_of[w] for w in self._plan.stage_workers[s]] if complete else []

    def allow(self, i: Any, index: int) -> bool:
        """Note the beginning of a sum, and return whether all replicas have begun the sum that an instruction needs.

        Raises:
            Violation: the total order has the instruction before the sum.
        """
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
