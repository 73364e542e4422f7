"""Transfers between ranks, sums over replicas and moves to host memory: their predicted times, and their rows in a text grid."""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from jpipe.capabilities.protocol import MessageHooks, merged
from jpipe.capabilities.registry import programs

Cell = tuple[int, int, str]
"""The first tick, the tick after the last one, and the text of a cell of a grid."""

HOST = -1
"""Stands for host memory, in place of the number of a sending or receiving rank."""


@cache
def messages() -> dict[str, MessageHooks]:
    """Return how messages, sums and moves are shown (their letter, color and description), by name."""
    return {
        "activation": MessageHooks("a", "#7FC4EA", "activation sent"),
        "gradient": MessageHooks("g", "#D9A3C1", "gradient sent"),
        "sum": MessageHooks("s", "#009E73", "sum over replicas", is_sum=True),
        **merged("messages", programs().values()),
    }


class Transfer(NamedTuple):
    """A message from one rank to another, a sum over the replicas of a stage, or a move to or from host memory.

    Attributes:
        what: `activation`, `gradient` or another message of `Send`; `sum`, or the name of other arrays that are summed or moved.
        ranks: the sender and the receiver, with -1 for host memory; for a sum the ranks of all replicas.
        number: the microbatch, the weight version, or for a sum the batch. A message about a batch has the number of its last microbatch;
            the optimizer state has 0.
        start: when it begins to occupy its links, in seconds.
        end: when the links are free again.
        arrival: when it has arrived, after the latency; for a sum, when the sum is complete.
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
        """The label of its row in the timeline: "0 → 1", "0 → host" or "sum 0, 1"."""
        names = ["host" if rank == HOST else str(rank) for rank in self.ranks]
        return f"sum {','.join(names)}" if self.is_sum else " to ".join(names)

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum over the replicas of a stage."""
        return messages()[self.what].is_sum

    @property
    def is_move(self) -> bool:
        """Whether it is a move to host memory or back."""
        return HOST in self.ranks

    @property
    def label(self) -> str:
        """Its text in the row: a letter (`a` for an activation, `g` for a gradient, `s` for a sum) and the number."""
        message = messages()[self.what]
        return f"{message.letter}{self.number}" if message.has_number else message.letter


def in_rows(transfers: Iterable[Transfer]) -> dict[str, list[Transfer]]:
    """Return the transfers that take time, by row and in order of time. The rows are of messages, then moves, then sums."""
    rows: dict[str, list[Transfer]] = {}
    lasting = [transfer for transfer in transfers if transfer.arrival > transfer.start]
    for transfer in sorted(lasting, key=lambda transfer: (transfer.is_sum, transfer.is_move, transfer.ranks, transfer.start)):
        rows.setdefault(transfer.row, []).append(transfer)
    return rows


def transfer_rows(transfers: Iterable[Transfer], tick: float) -> dict[str, list[Cell]]:
    """Return the cells of transfers that take time, by row, without their latency; `tick` is in seconds.

    Each transfer takes at least one tick, as computations do. The times of each row are rounded independently.
    """
    rows: dict[str, list[Cell]] = {}
    for name, moved in in_rows(transfers).items():
        row = rows.setdefault(name, [])
        for transfer in moved:
            begin = max(round(transfer.start / tick), row[-1][1] if row else 0)
            row.append((begin, max(round(transfer.end / tick), begin + 1), transfer.label))
    return rows
