"""Windows of a run in steady state. Predictions and measurements compute step time and bubble from them in the same way."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jpipe.errors import InputError
from jpipe.ops import OPS
from jpipe.plan import Plan
from jpipe.programs._costs import Link, Network, Overlap, StageCost, uses_by_costs
from jpipe.programs._simulate import simulate
from jpipe.programs._timeline import MemorySample, MemoryTimeline, Span, Timeline
from jpipe.programs._transfers import Transfer
from jpipe.programs.lowering import batches_until_full, lower


@dataclass(frozen=True)
class Window:
    """A steady-state window: from the first forward of one batch to the first forward of a later one.

    Attributes:
        timeline: the spans of each rank in the window, cut off at both ends, in seconds from the beginning of the window.
        memory: the memory samples of each rank in the window; the first sample is the state at its beginning.
        seconds: length of the window.
        batches: the number of batches that enter the pipeline in the window.
        bubble: the share of the ranks' time in which they neither compute nor update.
        transfers: the messages and sums in the window that take time, cut off at both ends like the spans.
    """

    timeline: Timeline = field(repr=False)  # thousands of spans
    memory: MemoryTimeline = field(repr=False)
    seconds: float
    batches: int
    bubble: float
    transfers: tuple[Transfer, ...] = field(default=(), repr=False)

    @property
    def step_seconds(self) -> float:
        """Seconds per batch."""
        return self.seconds / self.batches

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """For each rank, the largest number of bytes of arrays that it holds after any computation."""
        return tuple(max((sample.total for sample in samples), default=0) for samples in self.memory)


def extract_window(
    timeline: Timeline, memory: MemoryTimeline, microbatches: int, first: int, batches: int, transfers: Iterable[Transfer] = ()
) -> Window:
    """Extract the window of `batches` batches from batch `first` on. The run must have at least one more batch.

    Args:
        timeline: the timeline of the run, in seconds; microbatches are counted from the start of the run.
        memory: the memory samples of each rank in the run; a rank may have none.
        microbatches: m, the number of microbatches in a batch.
        first: the batch that enters the pipeline at the beginning of the window.
        batches: the number of batches after which the window ends.
        transfers: the transfers of the run.

    Raises:
        InputError: in this timeline, batch `first` or batch `first + batches` does not enter the pipeline.
    """
    entries: dict[int, tuple[float, int, int]] = {}  # by microbatch, the start, rank and index of its first span
    for rank, spans in enumerate(timeline):
        for index, span in enumerate(spans):
            if OPS[span.op].begins:
                entry = span.start, rank, index
                entries[span.microbatch] = min(entry, entries.get(span.microbatch, entry))
    try:
        (begin, first_rank, first_index), (end, *_) = (entries[batch * microbatches] for batch in (first, first + batches))
    except KeyError as missing:
        raise InputError(
            f"extract_window: expected a run that holds the batches {first} to {first + batches}, found no microbatch {missing}"
        ) from None
    rows = tuple(_cut_spans(spans, begin, end, first_index if rank == first_rank else 0) for rank, spans in enumerate(timeline))
    busy = sum(span.end - span.start + span.update_time for spans in rows for span in spans)
    samples = tuple(_cut_samples(row, begin, end) for row in memory)
    bubble = 1 - busy / ((end - begin) * len(rows))
    return Window(rows, samples, end - begin, batches, bubble, _cut_transfers(transfers, begin, end))


def predict_window(
    plan: Plan,
    costs: Sequence[StageCost],
    first: int,
    batches: int,
    *,
    link: Link | Network | None = None,
    overlap: Overlap = "transfers and sums",
    **uses: Any,
) -> Window:
    """Predict the window that `extract_window` extracts from a run, to compare it with the measured one.

    Args:
        plan: the plan that runs.
        costs: the cost of each stage, in seconds and bytes; `fit_costs` computes costs from a measurement.
        first: the batch that enters at the beginning of the window, counted from the start of the run.
        batches: the number of batches after which the window ends.
        link: the link between ranks, as in `simulate`.
        overlap: what can overlap with the computations of a rank, as in `simulate`.
        uses: what the programs do in addition to the plan, as in `lower`.
    """
    start = max(first - 2 * batches_until_full(plan), 0)  # early enough that the pipeline is in steady state when the window begins
    program = lower(plan, first + batches + 1, begin=start, start=start, **(uses_by_costs(costs) | uses))
    prediction = simulate(program, costs, link, overlap)
    return extract_window(prediction.timeline, prediction.memory, plan.counted.microbatches, first, batches, prediction.transfers)


def _cut_spans(spans: Sequence[Span], begin: float, end: float, first: int) -> tuple[Span, ...]:
    """Return the parts of a rank's spans between two times.

    The spans before index `first` have ended by `begin`, but updates after them may start later. Times alone do not show which spans have
    ended: measured spans can have length 0, because a busy machine records several ends at once.
    """
    inside = []
    for index, span in enumerate(spans):
        is_later = span.update_start > begin if index < first else span.update_end > begin or span.start >= begin
        if not is_later or span.start >= end:
            continue
        times = span.start, span.end, span.update_start, span.update_end
        start, stop, update, updated = (min(max(time, begin), end) - begin for time in times)
        inside.append(span._replace(start=start, end=stop, update_wait=update - stop, update_time=updated - update))
    return tuple(inside)


def _cut_transfers(transfers: Iterable[Transfer], begin: float, end: float) -> tuple[Transfer, ...]:
    inside = []
    for transfer in transfers:
        if transfer.arrival > transfer.start and transfer.arrival > begin and transfer.start < end:
            start, stop, arrival = (min(max(time, begin), end) - begin for time in transfer[3:6])
            inside.append(transfer._replace(start=start, end=stop, arrival=arrival))
    return tuple(inside)


def _cut_samples(samples: Sequence[MemorySample], begin: float, end: float) -> tuple[MemorySample, ...]:
    before = [sample for sample in samples if sample.time <= begin][-1:]
    inside = [sample for sample in samples if begin < sample.time < end]
    return tuple(sample._replace(time=max(sample.time - begin, 0.0)) for sample in before + inside)
