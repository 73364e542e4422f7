"""Transfers between ranks, sums over replicas and moves to host memory, as a prediction times them, and as rows below a text grid."""

from collections.abc import Iterable
from typing import NamedTuple

Cell = tuple[int, int, str]
"""The first tick, the tick after the last one, and the text of a cell of a grid."""

HOST = -1
"""The memory of its host, in place of a rank that sends or receives."""

_SUMS = "sum", "changes"
_LETTERS = {"activation": "a", "gradient": "g", "sum": "s", "shared": "p", "squares": "q", "norm": "n", "weights": "w", "changes": "c"}
_LETTERS |= {"optimizer": "o", "versions": "v", "residuals": "r", "stash": "h"}


class Transfer(NamedTuple):
    """A message from one rank to another, a sum over the replicas of a stage, or a move to or from host memory (`Plan.offload`).

    Attributes:
        what: `activation`, `gradient` or another message of `Send`; `sum`, or `changes`, the sum of what pipelines that agree have changed;
            of a move `optimizer`, `versions`, `residuals` or `stash`.
        ranks: the sender and the receiver, where -1 is host memory; of a sum those of all replicas.
        number: the microbatch, the weight version, or of a sum the batch. What belongs to a batch, but is sent, has the number of its last
            microbatch; the optimizer state has 0.
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
        """The name of its row: that of the direction between two ranks, or a rank and its host, or of the ranks that sum."""
        names = ["host" if rank == HOST else str(rank) for rank in self.ranks]
        return f"sum {','.join(names)}" if self.what in _SUMS else " to ".join(names)

    @property
    def is_move(self) -> bool:
        """Whether it goes to host memory or comes from there."""
        return HOST in self.ranks

    @property
    def label(self) -> str:
        """What its row shows: the number behind `a` for an activation, `g` for a gradient and `s` for a sum.

        Gradients of shared parameters have `p`, sums of squares `q`, norms `n`, and weights that another replica has updated `w`;
        sums of changes have `c`. Of moves, optimizer state has `o` alone, and weight versions have `v`, residuals `r` and stashes `h`.
        """
        if self.what == "optimizer":
            return _LETTERS[self.what]
        return f"{_LETTERS[self.what]}{self.number}"


def in_rows(transfers: Iterable[Transfer]) -> dict[str, list[Transfer]]:
    """Return the transfers that take time, by row, in order of time; rows of moves come late, and those of sums last."""
    rows: dict[str, list[Transfer]] = {}
    lasting = [transfer for transfer in transfers if transfer.arrival > transfer.start]
    for transfer in sorted(lasting, key=lambda transfer: (transfer.what in _SUMS, transfer.is_move, transfer.ranks, transfer.start)):
        rows.setdefault(transfer.row, []).append(transfer)
    return rows


def transfer_rows(transfers: Iterable[Transfer], tick: float) -> dict[str, list[Cell]]:
    """Return the cells of transfers that take time, by row, without their latency.

    Each takes one tick at least, as computations do, and each row is rounded for itself.

    Args:
        transfers: in any order.
        tick: length of a tick in seconds.
    """
    rows: dict[str, list[Cell]] = {}
    for name, moved in in_rows(transfers).items():
        row = rows.setdefault(name, [])
        for transfer in moved:
            begin = max(round(transfer.start / tick), row[-1][1] if row else 0)
            row.append((begin, max(round(transfer.end / tick), begin + 1), transfer.label))
    return rows
