"""The predicted time, memory and bytes moved of a program, and its timeline as text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jpipe.programs._timeline import MemoryTimeline, Timeline, format_grid, to_ticks
from jpipe.programs._transfers import Transfer, transfer_rows


@dataclass(frozen=True)
class Prediction:
    """The predicted time, memory and bytes moved of a program.

    Attributes:
        timeline: the spans of each rank, in seconds.
        transfers: the messages between ranks, the sums over replicas and the moves to host memory and back.
        memory: the bytes of each rank, at the beginning and after each of its computations.
        seconds: the time from the first start to the last end.
        bubble: the share of the ranks' time, up to the last end, in which they do not compute.
        held_bytes: for each rank the largest number of bytes of arrays alive after any instruction: weights, optimizer state, accumulators,
            residuals, messages and waiting inputs.
        peak_bytes: for each rank the peak memory: the largest number of bytes at any time, including arrays that exist only while a
            computation runs.
        moved_bytes: for each rank the bytes that it sends to other ranks.
        versions_alive: for each worker the largest number of weight versions alive at a time.
        host_bytes: for each rank the largest number of bytes that it has in host memory (`Plan.offload`).
        host_moved_bytes: for each rank the bytes that it moves to host memory and back.
    """

    timeline: Timeline = field(repr=False)  # thousands of spans
    transfers: tuple[Transfer, ...] = field(repr=False)
    memory: MemoryTimeline = field(repr=False)
    seconds: float
    bubble: float
    held_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    moved_bytes: tuple[int, ...]
    versions_alive: tuple[int, ...]
    host_bytes: tuple[int, ...]
    host_moved_bytes: tuple[int, ...]

    @property
    def temporary_bytes(self) -> tuple[int, ...]:
        """For each rank `peak_bytes` minus `held_bytes`: the memory that exists only while a computation runs.

        It consists of the scratch memory of programs (`StageCost.temporary`) and of results that exist before their inputs are freed.
        """
        return tuple(peak - persistent for peak, persistent in zip(self.peak_bytes, self.held_bytes, strict=True))

    def grid(self, tick: float | None = None, transfers: bool = False) -> str:
        """Return the timeline as text.

        Args:
            tick: the length of a tick in seconds; by default the duration of the shortest computation.
            transfers: whether rows for transfers follow the rows of the ranks: a row for each direction between two ranks, to and from host
                memory, and for replicas that sum. `a3` is the activation of microbatch 3, `g3` its gradient, and `s0` the sum of batch 0
                (see `Transfer.label`). Transfers that take no time, and latency, are left out. Each row is rounded to ticks independently.
        """
        return draw_grid(self.timeline, tick, transfers=self.transfers if transfers else ())


def draw_grid(
    timeline: Timeline, tick: float | None = None, notes: Sequence[tuple[int, str]] = (), transfers: Sequence[Transfer] = ()
) -> str:
    """Return a timeline in seconds as text, with notes at the ends of rows. A tick is by default as long as the shortest computation."""
    shortest = min((span.end - span.start for spans in timeline for span in spans), default=1.0)
    tick = tick or shortest or 1.0
    return format_grid(to_ticks(timeline, tick), notes, transfer_rows(transfers, tick))
