"""Compare measured step times and memory with the simulation and with the planner's prediction."""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import jpipe

WITHOUT_TEMPORARIES = "held memory"
_MUCH_SLOWER = 1.5  # from this ratio of measured to predicted time, the report explains why steps take longer
_SHORT = 2e-3  # seconds of a computation that is short compared with starting it
_MOST_RANKS = 8  # the temporaries of at most this many ranks are listed


class Comparison(NamedTuple):
    """The predicted and the measured value of a quantity as text. `ratio` is measured / predicted. Unknown values are `–`."""

    quantity: str
    predicted: str
    measured: str
    ratio: str


def compare(
    predicted: jpipe.programs.Window | None, measured: jpipe.programs.Window | None, temporary: Sequence[int | None] = ()
) -> list[Comparison]:
    """Compare the predicted and the measured step time, bubble, and held and peak memory of each rank.

    The peak memory of a rank is shown only if its temporaries are known from `temporary_bytes`.
    """
    windows = predicted, measured
    ranks = max((len(window.memory) for window in windows if window), default=0)
    rows = [
        _comparison("time of a step", time_text, [None if window is None else window.step_seconds for window in windows]),
        _comparison("bubble (idle share)", share_text, [None if window is None else window.bubble for window in windows]),
    ]
    for rank in range(ranks):
        sizes = [window.held_bytes[rank] if window and len(window.memory) > rank and window.memory[rank] else None for window in windows]
        if any(sizes):
            rows.append(_comparison(f"{WITHOUT_TEMPORARIES}, rank {rank}", bytes_text, sizes))
            more = temporary[rank] if rank < len(temporary) else None
            if more is not None:
                peaks = [None if size is None else size + more for size in sizes]
                rows.append(_comparison(f"peak memory, rank {rank}", bytes_text, peaks))
    return rows


def temporary_words(temporary: Sequence[int | None]) -> str:
    """Return a sentence about the temporaries that the peak memory includes; "" if none are known."""
    known = [f"{bytes_text(size)} at rank {rank}" for rank, size in enumerate(temporary) if size is not None]
    if not known:
        return ""
    sizes = known[:_MOST_RANKS] + (["…"] if len(known) > _MOST_RANKS else [])
    note = "; the temporaries of other ranks are known only in their processes" if len(known) < len(temporary) else ""
    return f"peak memory is the held memory plus the temporaries of the largest compiled program: {', '.join(sizes)}{note}"


def as_predicted(plan: jpipe.Plan, measured: jpipe.programs.Window, costs: Sequence[jpipe.programs.StageCost]) -> jpipe.plan.Predicted:
    """Return the measurement of a plan in the form of the planner's prediction.

    The costs include the temporaries, which a window does not; see `temporary_of_ranks`.
    """
    ranks = [[plan.rank_of[w] for w in plan.stage_workers[stages[0]]] for stages in plan.pipeline_ranks]
    sizes = [max(measured.held_bytes[rank] for rank in replicas) for replicas in ranks]
    peaks = tuple(size + more for size, more in zip(sizes, temporary_of_ranks(plan, costs), strict=True))
    bubble = min(max(measured.bubble, 0.0), 1.0)
    return jpipe.plan.Predicted(batch_seconds=measured.step_seconds, bubble=bubble, peak_bytes=peaks, delay=plan.mean_delay)


def temporary_of_ranks(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost]) -> list[int]:
    """Return the bytes that each pipeline rank needs only while a program runs.

    These bytes are scratch memory, and the inputs and labels of a program that begins with a forward.
    """
    schedule = jpipe.schedules.SCHEDULES[plan.schedule]
    temporary = [cost.temporary for cost in costs]
    if schedule.begins_fused(plan, plan.depth - 1):
        temporary[-1] += costs[-1].inputs + costs[-1].labels
    return [max(temporary[s] for s in stages) for stages in plan.pipeline_ranks]


def temporary_bytes(plan: jpipe.Plan, costs: Sequence[jpipe.programs.StageCost], compiled: Collection[int]) -> tuple[int | None, ...]:
    """Return for each rank the bytes that it needs only while a program runs; None if this process did not compile its stages.

    Each replica is a rank of its own.
    """
    temporary = temporary_of_ranks(plan, costs)
    return tuple(temporary[rank] if set(plan.pipeline_ranks[rank]) <= set(compiled) else None for rank, _ in plan.rank_positions)


def compare_with_plan(plan: jpipe.Plan, predicted: jpipe.plan.Predicted, measured: jpipe.plan.Predicted) -> list[Comparison]:
    """Compare the planner's prediction with the measurement."""
    rows = [
        _comparison("time of a step", time_text, [predicted.batch_seconds, measured.batch_seconds]),
        _comparison("bubble (idle share)", share_text, [predicted.bubble, measured.bubble]),
    ]
    for stages, *peaks in zip(plan.pipeline_ranks, predicted.peak_bytes, measured.peak_bytes, strict=True):
        named = f"stage {stages[0]}" if len(stages) == 1 else f"stages {' '.join(map(str, stages))}"
        rows.append(_comparison(f"peak memory, {named}", bytes_text, peaks))
    return rows


def why_slower(predicted: jpipe.programs.Window | None, measured: jpipe.programs.Window | None, processes: int = 1) -> str | None:
    """Explain why the measured steps take much longer than predicted; None if they do not."""
    if predicted is None or measured is None or measured.step_seconds <= _MUCH_SLOWER * predicted.step_seconds:
        return None
    median = statistics.median(span.end - span.start for spans in measured.timeline for span in spans)
    if median < _SHORT:
        return (
            f"Steps take longer than predicted: the computations are so short (median {time_text(median)}) that the host takes longer to "
            "start them than the devices to run them; with larger microbatches or a larger model the difference vanishes."
        )
    if processes > 1:
        return (
            "Steps take longer than predicted: the prediction ignores transfers between processes, and the sharing of cores by processes "
            "on one machine; plan.extra_in_flight=1 keeps one more microbatch in flight, which hides transfers between stages."
        )
    return "Steps take longer than predicted: other programs used the cores at the same time."


def _comparison(quantity: str, text_of: Callable[[int | float], str], values: Sequence[int | float | None]) -> Comparison:
    predicted, measured = values
    first, second = ("–" if value is None else text_of(value) for value in values)
    return Comparison(quantity, first, second, "–" if not predicted or measured is None else f"{measured / predicted:.2f}")


def time_text(seconds: int | float) -> str:
    """Return a duration with its unit, such as `1.5 ms`."""
    return _scaled(seconds, {1.0: "s", 1e-3: "ms", 1e-6: "µs"})


def bytes_text(size: int | float) -> str:
    """Return a size with its unit, such as `1.5 MB`."""
    return _scaled(size, {1e9: "GB", 1e6: "MB", 1e3: "kB", 1.0: "B"})


def share_text(part: int | float) -> str:
    """Return a fraction as a percentage."""
    return f"{part:.1%}"


def _scaled(value: int | float, units: Mapping[float, str]) -> str:
    factor = next((factor for factor in units if float(f"{abs(value) / factor:.3g}") >= 1), list(units)[-1])  # 999.9 µs are 1 ms
    return f"{value / factor:.3g} {units[factor]}"
