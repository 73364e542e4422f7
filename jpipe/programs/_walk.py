"""How the workers of a program run together: which waits for which, without times and bytes."""

from collections import deque
from collections.abc import Iterator, Sequence

from jpipe.plan import Plan
from jpipe.programs._instructions import AddShared, AllReduce, Instruction, Program, Receive, Send, SumSquares, TakeShared, Update

_NEED_SUM = Update, SumSquares, TakeShared, AddShared


class Violation(Exception):
    """A rule that a program breaks.

    Attributes:
        notes: (worker, note) pairs, to be written behind the workers' rows of a grid.
    """

    def __init__(self, message: str, notes: Sequence[tuple[int, str]]) -> None:
        super().__init__(message)
        self.notes = notes

    @classmethod
    def at(cls, plan: Plan, worker: int, what: str) -> "Violation":
        """A violation by one worker."""
        return cls(f"{plan.schedule}, worker {worker}: {what}", [(worker, what)])


def walk(program: Program) -> Iterator[Instruction]:
    """All instructions in an executable order: each worker runs its own in order, and waits for other workers.

    A transfer waits until both workers have come to it; its receive follows its send at once. An update, or what comes
    between the sum of the gradients and it, waits until all replicas have begun to sum the gradients of its batch.

    Raises:
        Violation: a send has no receiver, the total order has an instruction before one that it waits for, or the workers deadlock.
    """
    plan, instructions = program.plan, program.instructions
    queues: list[list[int]] = [[] for _ in plan.workers]  # indices of instructions
    for index, instruction in enumerate(instructions):
        queues[instruction.worker].append(index)
    heads = [0 for _ in queues]
    parts: dict[tuple[int, int], list[int]] = {}  # the all-reduces of each stage and batch so far
    ready = deque(range(len(queues)))
    while ready:
        w = ready.popleft()
        s, _ = plan.workers[w]
        replicas, queue = plan.replicas[s], queues[w]
        while heads[w] < len(queue):
            index = queue[heads[w]]
            i = instructions[index]
            if type(i) is Send:
                if heads[i.to] >= len(queues[i.to]):
                    raise Violation.at(plan, w, f"{i} has no receiver")
                received = queues[i.to][heads[i.to]]
                receive = instructions[received]
                if type(receive) is not Receive or (receive.microbatch, receive.message, receive.source) != (i.microbatch, i.message, w):
                    break
                if received < index:
                    raise Violation.at(plan, w, f"{receive} stands before its {i} in the total order")
                heads[i.to] += 1
                ready.append(i.to)
                yield i
                yield receive
            elif type(i) is Receive:
                if heads[i.source] < len(queues[i.source]):
                    send = instructions[queues[i.source][heads[i.source]]]
                    if type(send) is Send and send.to == w:
                        ready.append(i.source)  # it does the transfer and makes this worker ready again
                break
            else:
                if type(i) is AllReduce:
                    part = parts.setdefault((s, i.batch), [])
                    part.append(index)
                    if len(part) >= replicas:
                        ready.extend(plan.stage_workers[s])
                elif isinstance(i, _NEED_SUM) and replicas > 1:
                    part = parts.get((s, i.batch), [])
                    if 0 < len(part) < replicas:
                        break
                    if max(part, default=index) > index:
                        raise Violation.at(plan, w, f"{i} stands before the sum of {i.batch} in the total order")
                yield i
            heads[w] += 1
    stuck = [w for w, queue in enumerate(queues) if heads[w] < len(queue)]
    if stuck:
        notes = [(w, f"waits at {instructions[queues[w][heads[w]]]}") for w in stuck]
        raise Violation(f"{plan.schedule}: deadlock, workers {stuck} wait for each other", notes)
