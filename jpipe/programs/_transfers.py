"""Transfers between ranks, sums over replicas and moves to host memory: their predicted times, and their rows below a text grid."""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from jpipe.capabilities.protocol import MessageHooks, merged
from jpipe.capabilities.registry import programs

Cell = tuple[int, int, str]
"""The first tick, the tick after the last one, and the text of a cell of a grid."""

HOST = -1
"""The memory of its host, in place of a rank that sends or receives."""


@cache
def messages() -> dict[str, MessageHooks]:
    """Return how each message, sum and move is shown, by its name."""
    return {
        "activation": MessageHooks("a", "#7FC4EA", "activation sent"),
        "gradient": MessageHooks("g", "#D9A3C1", "gradient sent"),
        "sum": MessageHooks("s", "#009E73", "sum over replicas", is_sum=True),
        **merged("messages", programs().values()),
    }


class Transfer(NamedTuple):
    """A message from one rank to another, a sum over the replicas of a stage, or a move to or from host memory.

    Attributes:
        what: `activation`, `gradient` or another message of `Send`; `sum`, or what else is summed or moved.
        ranks: the sender and the receiver, where -1 is host memory; for a sum all replicas' ranks.
        number: the microbatch, the weight version, or of a sum the batch. What belongs to a batch, but is sent, has the number of its last
            microbatch; the optimizer state has 0.
        start: when it begins to occupy its links, in seconds.
        end: when the links are free again.
        arrival: when the receiver has it, after the latency; for a sum, when it is complete.
        size: the bytes that each sender sends.
    """

    what: str
    ranks: tuple[int, ...]
    number: int
    start: float
    end: float
    arrival: float
    size: float

    @property
    def row(self) -> str:
        """The row's label in the timeline: "0 → 1", "0 → host" or "sum 0, 1"."""
        names = ["host" if rank == HOST else str(rank) for rank in self.ranks]
        return f"sum {','.join(names)}" if self.is_sum else " to ".join(names)

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum over the replicas of a stage."""
        return messages()[self.what].is_sum

    @property
    def is_move(self) -> bool:
        """Whether it goes to host memory or comes from there."""
        return HOST in self.ranks

    @property
    def label(self) -> str:
        """The text in its row: `a` for an activation, `g` for a gradient, `s` for a sum or another letter, and the number."""
        message = messages()[self.what]
        return f"{message.letter}{self.number}" if message.has_number else message.letter


def in_rows(transfers: Iterable[Transfer]) -> dict[str, list[Transfer]]:
    """Return the transfers that take time, by row, in order of time; rows of moves come late, and rows of sums last."""
    rows: dict[str, list[Transfer]] = {}
    lasting = [transfer for transfer in transfers if transfer.arrival > transfer.start]
    for transfer in sorted(lasting, key=lambda transfer: (transfer.is_sum, transfer.is_move, transfer.ranks, transfer.start)):
        rows.setdefault(transfer.row, []).append(transfer)
    return rows


def transfer_rows(transfers: Iterable[Transfer], tick: float) -> dict[str, list[Cell]]:
    """Return the cells of transfers that take time, by row, without their latency.

    Each takes one tick at least, as computations do, and each row is rounded for itself.

    Args:
        transfers: the transfers in any order.
        tick: length of a tick in seconds.
    """
    rows: dict[str, list[Cell]] = {}
    for name, moved in in_rows(transfers).items():
        row = rows.setdefault(name, [])
        for transfer in moved:
            begin = max(round(transfer.start / tick), row[-1][1] if row else 0)
            row.append((begin, max(round(transfer.end / tick), begin + 1), transfer.label))
    return rows
