"""Make a table of the stages of a run with their layers, parameters and computation times, and find slow ranks."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jpipe


@dataclass(frozen=True)
class Stage:
    """One stage."""

    layers: tuple[str, ...]  # the ids of the stage's layers
    parameters: int  # the number of parameters in one replica
    positions: tuple[tuple[int, int], ...]  # for each replica, its rank, and its index among the stages of this rank


def table(stages: Sequence[Stage], window: jpipe.programs.Window | None) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the rows of the table. Times are medians over the computations in a window; unknown times are `–`."""
    used = {span.op for stage in stages for span in _spans(window, stage)} if window is not None else set[str]()
    kinds = [op for op in jpipe.ops.OPS if op in used]
    head = "stage", "layers", "parameters", *(f"{jpipe.ops.OPS[op].label}, ms" for op in kinds), *(() if window is None else ("busy",))
    rows = []
    for s, stage in enumerate(stages):
        cells = [str(s), _layers(stage.layers), f"{stage.parameters:,}"]
        if window is not None:
            spans = _spans(window, stage)
            cells += [_median([span.end - span.start for span in spans if span.op == op]) for op in kinds]
            busy = sum(span.end - span.start + span.update_time for span in spans)
            cells.append(f"{busy / (window.seconds * len(stage.positions)):.0%}")
        rows.append(tuple(cells))
    return head, rows


def _spans(window: jpipe.programs.Window, stage: Stage) -> list[jpipe.programs.Span]:
    """Return the spans of all replicas of a stage. The parts of one backward are joined into one span."""
    rows = ([span for span in window.timeline[rank] if span.chunk == chunk] for rank, chunk in stage.positions)
    return [span for row in rows for span in jpipe.programs.whole_spans(row)]


def _median(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.3g}" if seconds else "–"


def _layers(ids: Sequence[str]) -> str:
    return " ".join(ids) if len(ids) <= 3 else f"{ids[0]} … {ids[-1]} ({len(ids)})"


_SLOW = 1.15  # a rank is slow above this ratio to the median rank
SHORT = 2e-3
"""If a microbatch takes fewer seconds than this, starting its computations takes a large part of the time."""


def slow_ranks(plan: jpipe.Plan, window: jpipe.programs.Window) -> dict[int, float]:
    """Return the ranks that take longer than others for the same work, each with the factor by which they take longer.

    The plan's prediction says how much work a stage is. Without a prediction only the replicas of a stage are compared. Ranks that take
    less than `SHORT` for a microbatch are left out.
    """
    seconds = microbatch_seconds(plan, window)
    if not all(all(row.values()) for row in seconds):
        return {}
    predicted = plan.predicted.stage_seconds if plan.predicted is not None else ()
    if not predicted or not all(predicted):
        predicted = tuple(min(row[s] for row in seconds if s in row) for s in range(plan.depth))
    ratios = {rank: sum(row.values()) / sum(predicted[s] for s in row) for rank, row in enumerate(seconds) if sum(row.values()) >= SHORT}
    if not ratios:
        return {}
    usual = statistics.median_low(ratios.values())
    return {rank: ratio / usual for rank, ratio in ratios.items() if ratio > _SLOW * usual}


def microbatch_seconds(plan: jpipe.Plan, window: jpipe.programs.Window) -> list[dict[int, float]]:
    """Return for each rank a dict from its stages to the seconds that they compute for a microbatch; 0 means not measured."""
    return [
        {
            plan.workers[w][0]: _microbatch_seconds([span for span in row if span.chunk == chunk], window.seconds, plan.counted.row_slices)
            for chunk, w in enumerate(workers)
        }
        for workers, row in zip(plan.rank_workers, window.timeline, strict=True)
    ]


def _microbatch_seconds(spans: Sequence[jpipe.programs.Span], end: float, slices: int) -> float:
    """Return the seconds that a stage computes for the slices of a microbatch; 0 means not measured."""
    seconds = [_seconds([span for span in spans if span.microbatch % slices == n], end) for n in range(slices)]
    return sum(seconds) if all(seconds) else 0.0


def _seconds(spans: Sequence[jpipe.programs.Span], end: float) -> float:
    """Return the seconds that a stage computes for one number of `spans`, from the medians of its computations; 0 means not measured.

    The window ends at second `end`. Computations that it cuts off count only if there are no others. A short window may have different
    numbers of forwards and backwards, so ops are weighted only by their shares among the ops that do the same part of the work.
    """
    whole, cut = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    for span in jpipe.programs.whole_spans(spans):
        (whole if span.start > 0 and span.end < end else cut)[span.op].append(span.end - span.start)
    seconds = {op: statistics.median(times) for op, times in {**cut, **whole}.items()}
    shares: dict[str, float] = {}
    for part in "FIW":  # each microbatch has each of these parts once
        remaining = 1.0 - sum(share for op, share in shares.items() if part in jpipe.ops.OPS[op].parts)
        beginning = {op: len(whole[op]) + len(cut[op]) for op in seconds if jpipe.ops.OPS[op].parts[0] == part}
        shares |= {op: remaining * count / sum(beginning.values()) for op, count in beginning.items()}
        if not shares:
            return 0.0
    return sum(share * seconds[op] for op, share in shares.items())


def slow_words(slow: Mapping[int, float], devices: Sequence[Sequence[int]], processes: Sequence[int]) -> str:
    """Return a sentence that names the slow ranks, with their devices and process, and how to plan with them; "" without any."""
    if not slow or len(set(devices)) < len(devices):  # ranks that share a device wait for each other
        return ""
    several = len(set(processes)) > 1
    ranks = ", ".join(f"{rank} (process {processes[rank]})" if several else str(rank) for rank in slow)
    factors = ", ".join(f"{factor:.2f}" for factor in slow.values())
    entries = ", ".join(f"{{devices: {list(devices[rank])}, speed: {1 / factor:.2f}}}" for rank, factor in slow.items())
    what, verb = ("Rank", "computes") if len(slow) == 1 else ("Ranks", "compute")
    return (
        f"{what} {ranks} {verb} {factors} times as long as the others for the same work. To plan for these speeds, use jpipe plan CONFIG "
        f"--topology FILE with differing: [{entries}] in FILE."
    )
