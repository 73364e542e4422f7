"""Prices of actions: the seconds and bytes of an action, computed from the costs of the stages."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jpipe.capabilities.protocol import MessageHooks, merged
from jpipe.ops import OPS
from jpipe.programs._costs import StageCost, pieces_of
from jpipe.programs._instructions import Program


class Change(NamedTuple):
    """The bytes that an action adds to its rank; negative numbers are bytes that it frees."""

    live: int = 0  # the bytes of all arrays on the device
    while_running: int = 0  # the additional bytes that the device holds while the action runs
    sent: int = 0  # the bytes that the action sends to other ranks
    residuals: int = 0  # the part of `live` for residuals and stashes
    optimizer: int = 0  # the part of `live` for optimizer state, and for arrays that capabilities keep in addition to it
    in_host: int = 0  # the bytes in host memory, if a capability keeps arrays there
    moved: int = 0  # the bytes that it moves to host memory or back


class Prices:
    """The prices of a program's actions.

    Args:
        program: the program that runs.
        costs: the cost of each stage.
    """

    def __init__(self, program: Program, costs: Sequence[StageCost]) -> None:
        self.program, self.plan, self.costs = program, program.plan, costs
        self._messages: dict[str, MessageHooks] = merged("messages", program.hooks)
        self._changes = CHANGES | merged("changes", program.hooks)
        self._of_slices: list[Prices] = []
        if any(cost.by_slice for cost in costs):
            of_slices = [[cost.by_slice[n] if cost.by_slice else cost for cost in costs] for n in range(program.plan.row_slices)]
            self._of_slices = [Prices(program, each) for each in of_slices]

    def of(self, number: int) -> "Prices":
        """Return the prices of a slice of the rows; number 0 for whole rows."""
        return self._of_slices[number] if self._of_slices else self

    def seconds(self, s: int, op: str, number: int = 0) -> float:
        """Return the time of an op for a slice of the rows; "" stands for an update."""
        return self.of(number).costs[s].seconds(op) if op else self.costs[s].update

    def change(self, number: int, name: str, s: int, *arguments: object) -> Change:
        """Return a change of bytes at stage s for a slice of the rows, by its name in `CHANGES` or in the changes of a capability."""
        prices = self.of(number)
        return self._changes[name](prices, prices.costs[s], s, *arguments)

    def computes(self, s: int, name: str, before: str | None, after: str | None) -> Change:
        """Return the change of bytes by a computation.

        `before` and `after` are the parts of ops that the previous and the next stage have computed for the microbatch; None: on another
        rank.
        """
        op, cost = OPS[name], self.costs[s]
        left = {"residuals": cost.residuals + cost.carries, "stash": cost.stash}
        made = cost.gradient + cost.carry_gradient if op.gives_gradient else 0
        residuals = sum(size for kind, size in left.items() if kind in op.leaves)
        made += residuals
        if "output" in op.leaves:
            made += cost.message if s == self.plan.depth - 1 else cost.outputs - cost.kept_outputs
        used = {"inputs": cost.carries_used_up, "residuals": cost.residuals + cost.carries_freed, "stash": cost.stash}[op.reads]
        residuals -= used
        freed = used + {"inputs": cost.inputs + cost.labels, "residuals": cost.message + cost.carry_message, "stash": 0}[op.reads]
        # Arrays that two stages of a rank keep are freed when the second stage frees them.
        if before is not None:
            freed -= sum(arrays.size for arrays in cost.passed if arrays.receiver in op.parts and arrays.sender not in before)
        if after is not None:
            passed = self.costs[s + 1].passed
            freed -= sum(arrays.size for arrays in passed if arrays.sender in op.parts and arrays.receiver not in after)
        return Change(made - freed, made + cost.temporary, residuals=residuals)

    def message(self, message: str, source: int, to: int) -> tuple[int, int, int]:
        """Return the bytes that a message frees at its sender, the bytes that it carries, and the bytes that it adds at its receiver."""
        if message in self._messages:
            freed, size, added = self._messages[message].price(self, source, to)
            return freed, size, added
        (s, _), (other, _), rank_of = self.plan.workers[source], self.plan.workers[to], self.plan.rank_of
        cost, receiver = self.costs[s], self.costs[other]
        if message == "gradient":
            return cost.gradient, cost.gradient, receiver.message
        passed = receiver.passed if rank_of[source] == rank_of[to] else ()
        return cost.outputs - cost.kept_outputs, cost.outputs, receiver.inputs - sum(arrays.size for arrays in passed)

    def sends(self, message: str, source: int, to: int) -> Change:
        """Return the change of bytes by sending a message."""
        freed, size, _ = self.message(message, source, to)
        return Change(-freed, sent=size if self.plan.rank_of[source] != self.plan.rank_of[to] else 0)

    def sum(self, what: str, s: int, piece: int = 0) -> tuple[float, int]:
        """Return the bytes that each replica of a stage sends for a sum, or a piece of a sum, and how often data goes around their ring.

        If replicas gather the parts, these go around once, and each replica adds them. Otherwise shares go around first, and then their
        sums.
        """
        cost, others = self.costs[s], self.plan.replicas[s] - 1
        if what == "sum" and cost.gathered:
            return others * cost.gathered[piece], 1
        if what != "sum" and (sent := self._messages[what].gathered(self, s)):
            return others * sent, 1
        size = pieces_of(self.plan, self.plan.stages[s], cost)[piece] if what == "sum" else self._messages[what].price(self, s)
        return 2 * others / (others + 1) * size, 2

    def share(self, s: int, replicas: Sequence[int]) -> int:
        """Return the bytes of the shares of these replicas in one version, if replicas divide updates; otherwise 0."""
        return sum(self.costs[s].updated[replica] for replica in replicas) if self.costs[s].updated else 0


def _begin(prices: Prices, cost: StageCost, s: int, versions: int, optimizer_in_host: bool) -> Change:
    optimizer = cost.kept + (0 if optimizer_in_host else cost.optimizer)
    live = versions * cost.trained + cost.frozen + cost.state + cost.accumulators + optimizer
    return Change(live, optimizer=optimizer, in_host=cost.optimizer if optimizer_in_host else 0)


def _sum(prices: Prices, cost: StageCost, s: int, piece: int) -> Change:
    """Return the bytes that a replica holds and sends for a sum. If it gathers parts, all parts are assumed to arrive at the same time."""
    held = prices.plan.replicas[s] * cost.gathered[piece] + cost.temporary if cost.gathered else 0
    return Change(0, held, round(prices.sum("sum", s, piece)[0]))


CHANGES: dict[str, Callable[..., Change]] = {
    "begin": _begin,
    "inputs": lambda prices, cost, s: Change(cost.inputs),
    "labels": lambda prices, cost, s: Change(cost.labels),
    "compute": lambda prices, cost, s, *arguments: prices.computes(s, *arguments),
    "accumulate": lambda prices, cost, s: Change(cost.accumulators),
    "send": lambda prices, cost, s, *arguments: prices.sends(*arguments),
    "receive": lambda prices, cost, s, *arguments: Change(prices.message(*arguments)[2]),
    "take state": lambda prices, cost, s: Change(cost.state),
    "sum": _sum,
    "average state": lambda prices, cost, s: Change(-cost.state),
    "set aside": lambda prices, cost, s: Change(-cost.accumulators),
    "update": lambda prices, cost, s: Change(cost.trained),
    "release": lambda prices, cost, s: Change(-cost.trained),
    "release in host": lambda prices, cost, s: Change(in_host=-cost.trained),
    "lack shares": lambda prices, cost, s, replica: Change(prices.share(s, [replica]) - sum(cost.updated)),
}
"""By name, functions that return a change of bytes from the prices, the cost of the stage, the stage's number and further arguments."""
