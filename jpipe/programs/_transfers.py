"""Transfers between ranks and sums over replicas, as a prediction times them, and as rows below a text grid."""

from collections.abc import Iterable
from typing import NamedTuple

Cell = tuple[int, int, str]
"""The first tick, the tick after the last one, and the text of a cell of a grid."""


class Transfer(NamedTuple):
    """A message from one rank to another, or a sum over the replicas of a stage.

    Attributes:
        what: `activation`, `gradient` or another message of `Send`, or `sum`.
        ranks: the sender and the receiver; of a sum those of all replicas.
        number: the microbatch; of a sum the batch.
        start: when it begins to occupy its links, in seconds.
        end: when the links are free again.
        arrival: when the receiver has it, after the latency; of a sum, when it is complete.
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
        """The name of its row: that of the direction between two ranks, or of the ranks that sum."""
        return f"sum {','.join(map(str, self.ranks))}" if self.what == "sum" else "{} to {}".format(*self.ranks)

    @property
    def label(self) -> str:
        """What its row shows, such as `a3` for the activation of microbatch 3, `g3` for its gradient and `s0` for the sum of batch 0."""
        return f"{self.what[0]}{self.number}"


def transfer_rows(transfers: Iterable[Transfer], tick: float) -> dict[str, list[Cell]]:
    """Return the cells of transfers that take time, by row. Each takes one tick at least, as computations do.

    Args:
        transfers: in any order.
        tick: length of a tick in seconds.
    """
    rows: dict[str, list[Cell]] = {}
    for transfer in sorted(transfers, key=lambda transfer: (transfer.what == "sum", transfer.ranks, transfer.start)):
        if transfer.arrival > transfer.start:
            row = rows.setdefault(transfer.row, [])
            begin = max(round(transfer.start / tick), row[-1][1] if row else 0)
            row.append((begin, max(round(transfer.end / tick), begin + 1), transfer.label))
    return rows
