"""Windows of a run in steady state: step time and bubble, computed the same way for predictions and measurements."""

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
        timeline: the spans of each rank inside, cut off at both ends; in seconds from the beginning of the window.
        memory: the bytes of each rank inside, beginning with those at its start.
        seconds: length of the window.
        batches: the number of batches that entered the pipeline.
        bubble: share of the ranks' time in which they neither compute nor update.
        transfers: the messages and sums inside that take time, cut off at both ends like the spans.
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
        """The most bytes of arrays that each rank holds after a computation."""
        return tuple(max((sample.total for sample in samples), default=0) for samples in self.memory)


def extract_window(
    timeline: Timeline, memory: MemoryTimeline, microbatches: int, first: int, batches: int, transfers: Iterable[Transfer] = ()
) -> Window:
    """Extract `batches` batches, from batch `first` on, from a run of at least one batch more.

    Args:
        timeline: the timeline of the run, in seconds, microbatches counted as in the run.
        memory: the memory of the run; may be empty for each rank.
        microbatches: m, of one batch.
        first: the batch that enters at the beginning.
        batches: how many batches later the window ends.
        transfers: the transfers of the run.

    Raises:
        InputError: the run does not hold the entry of batch `first` or of batch `first + batches`.
    """
    entries: dict[int, tuple[float, int, int]] = {}  # when each microbatch enters the first stage, and the rank and index of that span
    for rank, spans in enumerate(timeline):
        for index, span in enumerate(spans):
            if OPS[span.op].begins:
                entry = span.start, rank, index
                entries[span.microbatch] = min(entry, entries.get(span.microbatch, entry))
    try:
        (begin, first_rank, first_index), (end, *_) = (entries[batch * microbatches] for batch in (first, first + batches))
    except KeyError as missing:
        raise InputError(
            f"extract_window: expected a run that holds the batches {first} to {first + batches}, found none of microbatch {missing}"
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
        plan: what runs.
        costs: one for each stage, in seconds and bytes; `fit_costs` takes them from a measurement.
        first: the batch that enters at the beginning, counted as in the run.
        batches: how many batches later the window ends.
        link: between the ranks, as in `simulate`.
        overlap: what goes on beside the computations of a rank, as in `simulate`.
        uses: what it does beside the plan, as in `lower`.
    """
    start = max(first - 2 * batches_until_full(plan), 0)  # from there the pipeline is in steady state when the window begins
    program = lower(plan, first + batches + 1, begin=start, start=start, **(uses_by_costs(costs) | uses))
    prediction = simulate(program, costs, link, overlap)
    return extract_window(prediction.timeline, prediction.memory, plan.microbatches, first, batches, prediction.transfers)


def _cut_spans(spans: Sequence[Span], begin: float, end: float, first: int) -> tuple[Span, ...]:
    """Return the parts of a rank's spans between two times.

    The spans before index `first` have ended at `begin`, apart from updates that start later. The clock alone cannot tell: measured spans
    may have no length, because a busy machine records the ends of several computations at once.
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
