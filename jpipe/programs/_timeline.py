"""Timelines, and the grid of ranks and times: a timeline as text for human readers.

Each rank has a row, and each tick a column. `F3.1` is the forward of microbatch 3 with weight version 1, `B3.1` its backward, `FB3.1` both
in one program. `I3.1` and `W3.1` are the halves of a backward, for inputs and for weights, and `FI3.1` is a forward and the first half in
one program. `F3.1/2` is a forward of the rank's chunk 2, its third stage. `B3.1:2` is part 2 of a backward. `*` means that an update
follows, `-` continues the cell to the left, and `.` is an idle tick.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jpipe.programs._transfers import Cell


class Span(NamedTuple):
    """One computation on a rank's row. Times are in the unit of the timeline: seconds, or ticks of a grid.

    Attributes:
        op: `F`, a forward; `B`, a backward; `FB`, both in one program; `I` and `W`, the halves of a backward, for inputs and for weights;
            `FI`, a forward and the first half in one program.
        microbatch: the number of the microbatch, from 0.
        version: the version of the weights that it reads.
        start: when it begins.
        end: when it ends.
        updates: whether an update follows.
        update_time: how long that update takes.
        update_wait: the time from `end` to the beginning of the update, which may wait for the norm of all gradients.
        chunk: the index of the stage among the stages of the rank, from 0.
        part: the part of the stage that it computes, from 0 for the last layers; None: the whole stage.
    """

    op: str
    microbatch: int
    version: int
    start: float
    end: float
    updates: bool = False
    update_time: float = 0.0
    update_wait: float = 0.0
    chunk: int = 0
    part: int | None = None

    @property
    def update_start(self) -> float:
        return self.end + self.update_wait

    @property
    def update_end(self) -> float:
        return self.update_start + self.update_time


Timeline = tuple[tuple[Span, ...], ...]
"""The spans of each rank, in order."""


class MemorySample(NamedTuple):
    """The bytes that one rank holds from a time on.

    Attributes:
        time: the time in seconds.
        weights: the bytes of each version alive, by version, summed over the rank's stages.
        optimizer: optimizer state, and the arrays that capabilities keep in addition to it.
        gradients: the sums of gradients of the batch that is being accumulated.
        residuals: arrays kept from forwards for their backwards, and from one half of a backward for the other.
        other: waiting inputs and messages, and layer state.
    """

    time: float
    weights: Mapping[int, int]
    optimizer: int
    gradients: int
    residuals: int
    other: int

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        return sum(self.weights.values()) + self.optimizer + self.gradients + self.residuals + self.other


MemoryTimeline = tuple[tuple[MemorySample, ...], ...]
"""The samples of each rank, in order of time: one after each of its computations."""


def whole_spans(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of one stage, with one span for all parts of a backward. Its duration is the sum of the durations of the parts.

    Args:
        spans: the spans in the order of a rank.
    """
    whole, places = list[Span](), dict[int, int]()
    for span in spans:
        if span.part and span.microbatch in places:
            first = whole[places[span.microbatch]]
            end = first.end + span.end - span.start
            whole[places[span.microbatch]] = span._replace(op=first.op, start=first.start, end=end, part=None)
        else:
            places |= {} if span.part is None else {span.microbatch: len(whole)}
            whole.append(span._replace(part=None))
    return whole


def to_ticks(timeline: Sequence[Sequence[Span]], tick: float = 1.0) -> Timeline:
    """Round all times to whole ticks. Every span has at least one tick.

    Args:
        timeline: the spans of each rank.
        tick: length of a tick, in the unit of the timeline.

    Returns:
        The timeline in ticks. Updates take no ticks, because a grid marks them with `*`.
    """
    rows: list[tuple[Span, ...]] = []
    for spans in timeline:
        row: list[Span] = []
        free = 0
        for span in spans:
            start = max(round(span.start / tick), free)
            free = max(round(span.end / tick), start + 1)
            row.append(span._replace(start=start, end=free, update_time=0.0, update_wait=0.0))
        rows.append(tuple(row))
    return tuple(rows)


def format_grid(
    timeline: Sequence[Sequence[Span]], marked: Iterable[tuple[int, str]] = (), below: Mapping[str, Sequence[Cell]] | None = None
) -> str:
    """Return a timeline in whole ticks (see `to_ticks`) as text.

    Args:
        timeline: the spans of each rank.
        marked: (rank, note) pairs; each note is written at the end of the rank's row, to show an error.
        below: further rows by name, such as transfers.

    Returns:
        A header row with the ticks, a row for each rank, and the further rows.
    """
    cells_of = {f"rank {rank}": [_cell(span) for span in spans] for rank, spans in enumerate(timeline)} | dict(below or {})
    ticks = max((end for cells in cells_of.values() for _, end, _ in cells), default=0)
    rows = [[str(tick) for tick in range(ticks)], *(_tokens(cells, ticks) for cells in cells_of.values())]
    widths = [max(len(token) for token in column) for column in zip(*rows, strict=True)]
    names, longest = ["tick", *cells_of], max(map(len, ("tick", *cells_of)))
    notes: dict[int, str] = {}
    for rank, note in marked:
        notes[rank] = f"{notes[rank]}; {note}" if rank in notes else note
    lines = []
    for rank, (name, row) in enumerate(zip(names, rows, strict=True), start=-1):
        cells = "".join(f" {token:>{width}}" for token, width in zip(row, widths, strict=True))
        lines.append(f"{name:<{longest}} |{cells}" + (f"  <<< {notes[rank]}" if rank in notes else ""))
    return "\n".join(lines)


def _cell(span: Span) -> Cell:
    return int(span.start), int(span.end), cell_of(span) + ("*" if span.updates else "")


def _tokens(cells: Iterable[Cell], ticks: int) -> list[str]:
    row = ["."] * ticks
    for first, end, text in cells:
        row[first:end] = ["-"] * (end - first)
        row[first] = text
    return row


def cell_of(span: Span) -> str:
    """Return the text of a span's cell in a text grid, such as `F3.1/2`, without the `*` that marks an update."""
    chunk, part = f"/{span.chunk}" if span.chunk else "", "" if span.part is None else f":{span.part}"
    return f"{span.op}{span.microbatch}.{span.version}{chunk}{part}"
