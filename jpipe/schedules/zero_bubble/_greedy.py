"""A list scheduler: it makes orders without deadlock for any ranks, from measured times and under a memory limit."""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice, product
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jpipe.schedules._schedule import Action, Ranks

Order = tuple[tuple[Action, ...], ...]
"""The computations of each rank. The last stage's forwards and backwards are not yet fused, and only stage 0 has whole backwards."""


@runtime_checkable
class StageTimes(Protocol):
    """The times of a stage that `greedy_order` reads, all in the same unit. A `jpipe.programs.StageCost` has these times."""

    @property
    def forward(self) -> Any: ...
    @property
    def backward(self) -> Any: ...
    @property
    def backward_input(self) -> Any: ...
    @property
    def backward_weight(self) -> Any: ...


class Problem:
    """The problem to order the computations of one batch, for one replica of each rank.

    Args:
        ranks: the stages of each rank.
        costs: the costs of each stage.
        microbatches: the number of microbatches.
        limits: for each rank the largest number of microbatches that it may hold from the forward to the end of the backward, summed over
            the rank's stages; at least the number of these stages.
        latency: the time that a message between two ranks takes.
    """

    def __init__(self, ranks: Ranks, costs: Sequence[StageTimes], microbatches: int, limits: Sequence[int], latency: Any) -> None:
        self.ranks, self.microbatches, self.limits, self.latency = ranks, microbatches, limits, latency
        self.last = len(costs) - 1
        self.rank_of = {s: p for p, stages in enumerate(ranks) for s in stages}
        self.times = {
            (op, s): time
            for s, cost in enumerate(costs)
            for op, time in zip("FBIW", (cost.forward, cost.backward, cost.backward_input, cost.backward_weight), strict=True)
        }

    def arrival(self, s: int, other: int, end: Any) -> Any:
        """Return when the result of stage s, available at `end`, arrives at another stage."""
        return end if self.rank_of[s] == self.rank_of[other] else end + self.latency

    def backward_op(self, s: int) -> str:
        """Return the op that a stage runs when a gradient arrives: at stage 0 a whole backward, because no other stage waits for it."""
        return "I" if s else "B"


class Rules(NamedTuple):
    """The preferences of a rank: first ready backwards for inputs, then forwards, then computations that no rank waits for."""

    deepest_first: bool  # among the ready forwards, whether to run the rank's last stage first instead of its first stage
    # of each stage, at most ahead (d - p - 1) + 1 microbatches on rank p of d wait for their backward for inputs; 0: as many as the memory
    # limit allows
    ahead: int
    patience: float  # a computation that no rank waits for begins only if this share of its time fits before the next known arrival


def list_schedules(problem: Problem) -> Iterator[Order]:
    """Yield one order for each of several rules."""
    straight = all(len(stages) == 1 for stages in problem.ranks)
    for rules in product((True,) if straight else (True, False), (0, 1, 2) if straight else (0,), (0.0, 0.5, 1.0)):
        yield _Run(problem, Rules(*rules)).order()


class _Rank:
    """The computations that a rank has done, and the computations that it can do next.

    Attributes:
        number: the number of the rank.
        arrived: for each op and stage the (arrival time, microbatch) of the inputs that were sent to it, in order.
        weights: the backwards for weights that can be done, in order.
        begun: for each unfinished microbatch the number of the rank's stages that have done its forward, and its whole backward.
    """

    def __init__(self, problem: Problem, number: int) -> None:
        self.number, self.stages, self.limit = number, problem.ranks[number], problem.limits[number]
        self.clock: Any = 0
        self.order: list[Action] = []
        ops: list[tuple[str, int]] = [(op, s) for s in self.stages for op in ("F", problem.backward_op(s))]
        self.arrived: dict[tuple[str, int], deque[tuple[Any, int]]] = {key: deque() for key in ops}
        self.weights: deque[Action] = deque()
        self.begun: dict[int, tuple[int, int]] = {}

    def has_room(self, k: int) -> bool:
        """Return whether all begun microbatches can still finish, in order, after the forward of microbatch k has taken memory.

        This is the banker's algorithm. The first unfinished microbatch can always continue, on this rank and on every other rank, so the
        ranks never deadlock.
        """
        counts = self.begun | {k: (self.begun.get(k, (0, 0))[0] + 1, self.begun.get(k, (0, 0))[1])}
        free = self.limit - sum(forwards - backwards for forwards, backwards in counts.values())
        for microbatch in sorted(counts):
            forwards, backwards = counts[microbatch]
            if len(self.stages) - forwards > free:
                return False
            free += forwards - backwards
        return True

    def note(self, k: int, forwards: int, backwards: int) -> None:
        """Count a forward or a whole backward of a microbatch."""
        before = self.begun.get(k, (0, 0))
        self.begun[k] = before[0] + forwards, before[1] + backwards
        if self.begun[k][1] == len(self.stages):
            del self.begun[k]


class _Run:
    """A simulated batch, in which each rank runs the computation that it prefers among those that can begin."""

    def __init__(self, problem: Problem, rules: Rules) -> None:
        self.problem, self.rules = problem, rules
        self.ranks = [_Rank(problem, p) for p in range(len(problem.ranks))]
        self.in_flight = [0] * (problem.last + 1)  # microbatches between forward and backward for inputs, by stage
        self.events = [(0, p) for p in range(len(self.ranks))]  # (time, rank): the time at which a rank chooses its next computation

    def order(self) -> Order:
        """Return the computations of each rank in the batch."""
        first = self.ranks[self.problem.rank_of[0]]
        first.arrived["F", 0].extend((0, k) for k in range(self.problem.microbatches))
        while self.events:
            now, p = heapq.heappop(self.events)
            rank = self.ranks[p]
            if now < rank.clock:
                continue  # the rank chooses again when its current computation ends
            if (entry := self._choose(rank, now)) is not None:
                self._do(rank, entry, now)
            elif later := [queue[0][0] for queue in rank.arrived.values() if queue and queue[0][0] > now]:
                heapq.heappush(self.events, (min(later), p))
        return tuple(tuple(rank.order) for rank in self.ranks)

    def _choose(self, rank: _Rank, now: Any) -> Action | None:
        """Return the next computation of a rank, or None if it waits for an arrival."""
        ready = [Action(op, s, queue[0][1]) for (op, s), queue in rank.arrived.items() if queue and queue[0][0] <= now]
        if inputs := [entry for entry in ready if entry.op == "I"]:
            return min(inputs, key=lambda entry: (entry.microbatch, -entry.stage))
        forwards = [entry for entry in ready if entry.op == "F"]
        if allowed := [entry for entry in forwards if self._allows(rank, entry.stage, entry.microbatch)]:
            return max(allowed, key=lambda entry: entry.stage if self.rules.deepest_first else -entry.stage)
        fillers = [entry for entry in ready if entry.op == "B"] + list(islice(rank.weights, 1))
        if not fillers:
            return None
        entry = min(fillers, key=lambda entry: (entry.microbatch, -entry.stage))
        arrivals = [
            queue[0][0]
            for (op, s), queue in rank.arrived.items()
            if queue and queue[0][0] > now and (op != "F" or self._allows(rank, s, queue[0][1]))
        ]
        ends = now + self.rules.patience * self.problem.times[entry.op, entry.stage]
        return entry if forwards or not arrivals or ends <= min(arrivals) else None  # a ready forward waits for memory

    def _allows(self, rank: _Rank, s: int, k: int) -> bool:
        """Return whether a rank may begin microbatch k at stage s."""
        most = self.rules.ahead * (len(self.ranks) - rank.number - 1) + 1
        return (not self.rules.ahead or self.in_flight[s] < most) and rank.has_room(k)

    def _do(self, rank: _Rank, entry: Action, now: Any) -> None:
        """Run a computation, and send its result."""
        op, s, k = entry
        (rank.weights if op == "W" else rank.arrived[op, s]).popleft()
        rank.clock = now + self.problem.times[op, s]
        rank.order.append(entry)
        heapq.heappush(self.events, (rank.clock, rank.number))
        rank.note(k, int(op == "F"), int(op in ("B", "W")))
        self.in_flight[s] += (op == "F") - (op in ("B", "I"))
        if op == "F":
            self._send("F" if s < self.problem.last else self.problem.backward_op(s), s, min(s + 1, self.problem.last), k, rank.clock)
        elif op == "I":
            rank.weights.append(Action("W", s, k))
            self._send(self.problem.backward_op(s - 1), s, s - 1, k, rank.clock)

    def _send(self, op: str, s: int, other: int, k: int, end: Any) -> None:
        time, to = self.problem.arrival(s, other, end), self.ranks[self.problem.rank_of[other]]
        to.arrived[op, other].append((time, k))
        heapq.heappush(self.events, (max(time, to.clock), to.number))


def seconds(problem: Problem, order: Order) -> tuple[Any, Any] | None:
    """Return the time that an order takes if each computation begins as soon as it can.

    Returns:
        The time from the first start on any rank to the last end on any rank, and the longest time from the first start to the last end on
        one rank; None if the order deadlocks.
    """
    ends = dict[tuple[bool, int, int], Any]()  # by (is forward, stage, microbatch): the ends of forwards and of input gradients
    clocks, starts, positions = [0 for _ in order], [None for _ in order], [0 for _ in order]
    p = waited = 0
    while waited < len(order):  # until no rank can continue
        before = positions[p]
        while positions[p] < len(order[p]):
            op, s, k = order[p][positions[p]]
            source = None if op == "W" else s - 1 if op == "F" else s + 1
            begins: Any = clocks[p]
            if source is not None and 0 <= source <= problem.last:
                if (op == "F", source, k) not in ends:
                    break
                begins = max(begins, problem.arrival(source, s, ends[op == "F", source, k]))
            starts[p] = begins if starts[p] is None else starts[p]
            clocks[p] = begins + problem.times[op, s]
            if op != "W":
                ends[op == "F", s, k] = clocks[p]
            positions[p] += 1
        waited = 0 if positions[p] > before else waited + 1
        p = (p + 1) % len(order)
    if any(position < len(entries) for position, entries in zip(positions, order, strict=True)):
        return None
    return max(clocks), max(clock - (start or 0) for clock, start in zip(clocks, starts, strict=True))
