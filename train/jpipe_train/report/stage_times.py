"""A table of the stages of a run: layers, parameters, and the times of their computations."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import jpipe


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        layers: the ids of its layers.
        parameters: the number of its parameters.
        positions: for each of its replicas the rank, and its index among the rank's stages.
    """

    layers: tuple[str, ...]
    parameters: int
    positions: tuple[tuple[int, int], ...]


def table(stages: Sequence[Stage], window: jpipe.programs.Window | None) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of the table; the times are medians over the computations of a window, or `–`."""
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
    """Return the spans of all replicas of a stage, with the parts of a backward as one span."""
    rows = ([span for span in window.timeline[rank] if span.chunk == chunk] for rank, chunk in stage.positions)
    return [span for row in rows for span in jpipe.programs.whole_spans(row)]


def _median(seconds: Sequence[float]) -> str:
    return f"{1000 * statistics.median(seconds):.3g}" if seconds else "–"


def _layers(ids: Sequence[str]) -> str:
    return " ".join(ids) if len(ids) <= 3 else f"{ids[0]} … {ids[-1]} ({len(ids)})"
