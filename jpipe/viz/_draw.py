"""Timelines and memory as pictures: predictions and measurements in panels with the same axes.

Functions import Matplotlib when they need it, so that `import jpipe` stays fast. Matplotlib's global state is not changed.
"""

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from jpipe.capabilities.protocol import MessageHooks
from jpipe.errors import InputError, shortened
from jpipe.ops import OPS
from jpipe.plan import Plan
from jpipe.programs._timeline import MemorySample, MemoryTimeline, Span, Timeline
from jpipe.programs._transfers import Transfer, messages
from jpipe.viz._perfetto import rows_of

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

# Colours that colour-blind readers can distinguish, also in grey; in the order of the legend.
_FORWARD, _BACKWARD, _INPUT, _WEIGHT, _UPDATE, _IDLE = "#0072B2", "#F0A830", "#F2D06B", "#DF6722", "#1A1A1A", "#EFEFEF"
_COLOURS = {"F": _FORWARD, "B": _BACKWARD, "I": _INPUT, "W": _WEIGHT}  # by piece of an op
_NAMES = {colour: OPS[piece].label for piece, colour in _COLOURS.items()} | {_UPDATE: "update", _IDLE: "idle"}
_OTHER = MessageHooks("").colour  # the colour of messages that have none
_VERSIONS = ("#08519C", "#6BAED6", "#2171B5", "#BDD7E7")  # the colours of versions, in turn; neighbours differ most
_PARTS = {"optimizer": "#009E73", "gradients": "#F0A830", "residuals": "#CC79A7", "other": "#8C8C8C"}
_SMALL = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_LEFT, _RIGHT, _TOP, _BOTTOM = 0.85, 0.15, 0.8, 0.5  # inches: the margins of a figure


class _Page(NamedTuple):
    """The width of a figure in inches, and the size of the text inside its panels in points."""

    width: float
    inside: float

    def size(self, points: float) -> float:
        """Return the size of text outside the panels, which is at least `inside`."""
        return max(points, self.inside)

    def points(self, left: float, columns: int = 1) -> float:
        """Return the width of a column of panels in points."""
        return 72 * (self.width - left - _RIGHT) / columns

    def wrap(self, text: str, points: float) -> str:
        """Wrap a label into lines that fit into a width."""
        return "\n".join(textwrap.wrap(text, max(int(points / (0.55 * self.size(8))), 20)))


def draw_timeline(
    timelines: Mapping[str, Timeline],
    transfers: Mapping[str, Sequence[Transfer]] | None = None,
    *,
    title: str = "",
    unit: str = "s",
    seconds: Mapping[str, float] | float | None = None,
    plan: Plan | None = None,
    width: float = 12.0,
    font_size: float = 6.5,
) -> "matplotlib.figure.Figure":
    """Draw timelines below each other on one time axis, with one row per rank and idle time in grey.

    The title of each panel has the length of the timeline and its bubble, the share of the ranks' time that is idle. A box shows its
    microbatch, or `3.1` (microbatch 3 with the weights after 1 update) if all of these labels fit. If ranks have several stages, the chunk
    is the small number in labels such as `3¹`, and the number of lines at the bottom of a box: none for a rank's first stage, one for the
    second.

    Args:
        timelines: the timelines by name, in order, such as `{"predicted": …, "measured": …}`; they begin at time 0.
        transfers: the transfers by the same names, such as `Prediction.transfers` and `Trace.transfers`. There is a row below the ranks for
            each direction between two ranks, or between a rank and its host, and for each set of replicas that sum. A box lasts as long as
            the transfer occupies its links.
        title: the title of the picture.
        unit: the unit of time: `"s"` (shown as s, ms or µs), or any other word, such as `"forwards"`, which is shown unchanged.
        seconds: the length of each timeline, or one number for all. By default a timeline ends with its last span; pass a length for a
            window of a longer run.
        plan: the plan of these timelines. If ranks have several stages or replicas, the labels of the rows show the stages and the replica
            of each rank.
        width: the width in inches.
        font_size: the size of the text inside the panels in points; other text is at least as large. Size 11 in a picture 5.4 inches wide
            can be read on a phone.

    Returns:
        The figure; `figure.savefig(path)` works without a display.

    Raises:
        InputError: there is no timeline, a timeline has no length, the number of the plan's ranks differs from the number of rows, or
            `transfers` names an unknown timeline.
    """
    rows = {
        name: {_row_name(row[0]): row for row in each.values()} for name, each in rows_of("draw_timeline", timelines, transfers).items()
    }
    if seconds is None:
        ends = {name: [span.update_end for spans in timeline for span in spans] for name, timeline in timelines.items()}
        seconds = {name: max(each, default=0.0) for name, each in ends.items()}
    lengths = _lengths("draw_timeline", timelines, seconds)
    counts, page = [len(timeline) + len(rows[name]) for name, timeline in timelines.items()], _Page(width, font_size)
    row = min(max(8.0 / sum(counts), 0.17, 1.5 * font_size / 72), 0.34)  # inches
    names, note = _names("draw_timeline", max(map(len, timelines.values())), plan, ": ")
    left = _left(page, [*names, *(name for each in rows.values() for name in each)])
    scale, unit = _time_unit(max(lengths.values()), unit)
    points, spans = page.points(left) / max(lengths.values()), _spans(timelines)  # per unit of time
    versions = all(_fits(_label(span, versions=True), _room(span, points), points, font_size) for span in spans)
    written, legend = _size_in_boxes(spans, points, versions, font_size), _names_of_colours(timelines, lengths, rows)
    under = page.wrap(f"time ({unit}){_inside(spans, points, versions, written)}{note}", page.points(left))
    figure, panels = _figure(page, [row * count for count in counts], 1, title, legend, under, gap=0.42, sharey=False, left=left)
    for (axes,), (name, timeline) in zip(panels, timelines.items(), strict=True):
        _draw_rows(axes, timeline, lengths[name], points, versions, written)
        _draw_transfers(axes, rows[name], len(timeline), points, font_size)
        axes.set_yticks([n + 0.5 for n in range(len(timeline) + len(rows[name]))], [*names[: len(timeline)], *rows[name]])
        axes.set_ylim(len(timeline) + len(rows[name]), 0)
        axes.tick_params(axis="y", labelsize=page.size(8))
        words = f"{name}: {lengths[name] / scale:.4g} {unit}, bubble {_bubble(timeline, lengths[name]):.1%}"
        axes.set_title(words, loc="left", fontsize=page.size(9), pad=4)
        _time_axis(axes, lengths, scale, font_size)
    panels[-1][0].set_xlabel(under, fontsize=page.size(8))
    return figure


def draw_memory(
    memories: Mapping[str, MemoryTimeline],
    *,
    seconds: Mapping[str, float] | float,
    title: str = "",
    unit: str = "s",
    plan: Plan | None = None,
    width: float = 12.0,
    font_size: float = 6.5,
) -> "matplotlib.figure.Figure":
    """Draw the memory of the ranks over time, with one row per rank and one column per entry. All panels have the same axes.

    A line marks the peak. Weights are blue, with one shade per version, so that the versions alive can be counted.

    Args:
        memories: the memory by name, in order, such as `{"predicted": …, "measured": …}`.
        seconds: the length of each entry, or one number for all.
        title: the title of the picture.
        unit: the unit of time, as in `draw_timeline`.
        plan: as in `draw_timeline`.
        width: as in `draw_timeline`.
        font_size: as in `draw_timeline`.

    Raises:
        InputError: there is no entry, an entry has no length, or the number of the plan's ranks differs from the number of rows.
    """
    lengths = _lengths("draw_memory", memories, seconds)
    rows = max(len(memory) for memory in memories.values())
    names, note = _names("draw_memory", rows, plan, "\n")
    page = _Page(width, font_size)
    left = _LEFT * page.size(8) / 8
    scale, unit = _time_unit(max(lengths.values()), unit)
    legend = {"weights (one shade per version)": list(_VERSIONS)} | {part: [colour] for part, colour in _PARTS.items()}
    under = page.wrap(f"time ({unit}){note}", page.points(left, len(memories)))
    heights = [min(max(8.0 / rows, 0.7), 1.6)] * rows
    figure, panels = _figure(page, heights, len(memories), title, legend, under, gap=0.14, sharey=True, left=left)
    highest = max((sample.total for memory in memories.values() for samples in memory for sample in samples), default=0)
    shared = panels[0][0]  # all panels share its axes; they are set before anything is drawn, because each area would scale them again
    _time_axis(shared, lengths, scale, font_size)
    shared.set_ylim(0, 1.35 * (highest or 1))  # leaves space for the label of the peak
    shared.locator_params(axis="y", nbins=3)
    shared.yaxis.set_major_formatter(lambda count, _: _size(count))
    for column, (name, memory) in enumerate(memories.items()):
        for w, samples in enumerate(memory):
            _draw_areas(panels[w][column], samples, lengths[name], font_size)
        panels[0][column].set_title(name, loc="left", fontsize=page.size(9), pad=4)
        panels[-1][column].set_xlabel(under, fontsize=page.size(8))
    for name, row in zip(names, panels, strict=True):
        row[0].set_ylabel(name, fontsize=page.size(8))
        for axes in row:
            axes.tick_params(labelsize=font_size)
    return figure


# Timelines -------------------------------------------------------------------------------------------------------------


def _draw_rows(axes: "matplotlib.axes.Axes", timeline: Timeline, length: float, points: float, versions: bool, font_size: float) -> None:
    for rank, spans in enumerate(timeline):
        where = (rank + 0.08, 0.84)
        boxes: dict[str, list[tuple[float, float]]] = {colour: [] for colour in _NAMES if colour != _IDLE}
        lines: dict[int, list[tuple[float, float]]] = {}
        for span in spans:
            turn = _turn(span)
            for colour, (start, end) in zip(_colours(span), ((span.start, turn), (turn, span.end)), strict=False):
                boxes[colour].append((start, end - start))
            if span.updates:
                boxes[_UPDATE].append((span.update_start - _mark(span, points), _mark(span, points) + span.update_time))
            for line in range(span.chunk):
                lines.setdefault(line, []).append((span.start, span.end - span.start))
            label, (left, right), ink = _label(span, versions), _room(span, points), "white" if _colours(span) == [_FORWARD] else "black"
            if _fits(label, (left, right), points, font_size):
                axes.text((left + right) / 2, rank + 0.5, label, size=font_size, color=ink, ha="center", va="center_baseline")
        axes.broken_barh([(0, length)], where, color=_IDLE, linewidth=0)
        usual = points * statistics.median(span.end - span.start for span in spans) if spans else 0.0
        edge = min(0.1 * usual, 0.7) if usual > 4 else 0.0  # thin boxes would consist of edges only
        for colour, intervals in boxes.items():
            axes.broken_barh(intervals, where, facecolor=colour, edgecolor="white", linewidth=0 if colour == _UPDATE else edge)
        for line, intervals in lines.items():
            axes.broken_barh(intervals, (rank + 0.82 - min(0.13, 0.5 / len(lines)) * line, 0.05), facecolor="white", linewidth=0)
    axes.tick_params(axis="y", length=0)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


def _spans(timelines: Mapping[str, Timeline]) -> list[Span]:
    return [span for timeline in timelines.values() for spans in timeline for span in spans]


def _left(page: _Page, names: Sequence[str]) -> float:
    """Return the left margin in inches, with room for the names of the rows."""
    return _LEFT + 0.065 * page.size(8) / 8 * max(0, max(map(len, names)) - len("rank 10"))


def _names_of_colours(
    timelines: Mapping[str, Timeline], lengths: Mapping[str, float], rows: Mapping[str, Mapping[str, Sequence[Transfer]]]
) -> dict[str, list[str]]:
    """Return the colours of a legend, by name."""
    spans = _spans(timelines)
    used = {colour for span in spans for colour in _colours(span)} | ({_UPDATE} if any(span.updates for span in spans) else set())
    used |= {_IDLE} if any(_bubble(timeline, lengths[name]) > 0.0005 for name, timeline in timelines.items()) else set()
    moved = [transfer for each in rows.values() for row in each.values() for transfer in row]
    legend = {name: [colour] for colour, name in _NAMES.items() if colour in used}
    return legend | {messages()[kinds[0].what].legend: [colour] for colour, kinds in _by_colour(moved).items()}


def _row_name(transfer: Transfer) -> str:
    """Return the name of a transfer's row, in which a long list of ranks is abbreviated."""
    return transfer.row if len(transfer.ranks) < 6 else f"sum {transfer.ranks[0]},{transfer.ranks[1]},…,{transfer.ranks[-1]}"


def _by_colour(transfers: Sequence[Transfer]) -> dict[str, list[Transfer]]:
    """Return transfers by colour, in the order of the legend. Transfers that have no colour come last."""
    order = sorted(messages().values(), key=lambda message: message.colour == _OTHER)
    by_colour = {message.colour: list[Transfer]() for message in order}
    for transfer in transfers:
        by_colour[messages()[transfer.what].colour].append(transfer)
    return {colour: several for colour, several in by_colour.items() if several}


def _draw_transfers(
    axes: "matplotlib.axes.Axes", rows: Mapping[str, Sequence[Transfer]], first: int, points: float, font_size: float
) -> None:
    for n, row in enumerate(rows.values(), start=first):
        for colour, transfers in _by_colour(row).items():
            boxes = [(transfer.start, max(transfer.end - transfer.start, 0.8 / points)) for transfer in transfers]
            edge = 0.4 if points * statistics.median(width for _, width in boxes) > 4 else 0.0
            axes.broken_barh(boxes, (n + 0.22, 0.56), facecolor=colour, edgecolor="white", linewidth=edge)
        for transfer in row:
            label = transfer.label if transfer.is_move else str(transfer.number)
            if _fits(label, (transfer.start, transfer.end), points, font_size):
                middle, ink = (transfer.start + transfer.end) / 2, "white" if transfer.is_sum else "black"
                axes.text(middle, n + 0.5, label, size=font_size, color=ink, ha="center", va="center_baseline", clip_on=True)


def _bubble(timeline: Timeline, length: float) -> float:
    busy = sum(span.end - span.start + span.update_time for spans in timeline for span in spans)
    return max(1 - busy / (length * len(timeline)), 0.0)


def _colours(span: Span) -> list[str]:
    return [_COLOURS[piece] for piece in OPS[span.op].pieces]


def _turn(span: Span) -> float:
    """Return the end of the first piece of a span, such as the forward of a fused computation. All pieces are drawn with equal lengths."""
    op = OPS[span.op]
    return span.start + (span.end - span.start) / len(op.parts) if len(op.pieces) > 1 else span.end


def _mark(span: Span, points: float) -> float:
    """Return the part of a span's end that shows its update, so that even a very short update is visible."""
    seen = min(1.2 / points, (span.end - span.start) / 4)
    return max(seen - span.update_time, 0.0) if span.updates else 0.0


def _room(span: Span, points: float) -> tuple[float, float]:
    """Return the start and the end of the space for a label; in a fused computation this is the backward."""
    return (_turn(span) if len(OPS[span.op].pieces) > 1 else span.start), span.end - _mark(span, points)


def _label(span: Span, versions: bool) -> str:
    chunk = str(span.chunk).translate(_SMALL) if span.chunk else ""
    return f"{span.microbatch}.{span.version}{chunk}" if versions else f"{span.microbatch}{chunk}"


def _inside(spans: Sequence[Span], points: float, versions: bool, font_size: float) -> str:
    """Return the note that explains the labels and lines of these spans."""
    chunks = any(span.chunk for span in spans)
    labelled = [span for span in spans if _fits(_label(span, versions), _room(span, points), points, font_size)]
    if not labelled:
        return ";  lines in a box: its chunk" if chunks else ""
    numbers = "the small number, and the lines" if any(span.chunk for span in labelled) else "the lines"
    return f";  in a box: {'microbatch.version of its weights' if versions else 'its microbatch'}" + (f"; {numbers}: its chunk" * chunks)


def _size_in_boxes(spans: Sequence[Span], points: float, versions: bool, font_size: float) -> float:
    """Return the size of labels, or infinity if few boxes have room for a label, because those would look special."""
    labelled = sum(_fits(_label(span, versions), _room(span, points), points, font_size) for span in spans)
    return font_size if labelled > len(spans) / 20 else math.inf


def _fits(label: str, room: tuple[float, float], points: float, font_size: float) -> bool:
    width = font_size * sum(0.32 if letter == "." else 0.64 if letter in "0123456789" else 0.42 for letter in label)
    return (room[1] - room[0]) * points >= width + 1.4


# Memory ----------------------------------------------------------------------------------------------------------------


def _draw_areas(axes: "matplotlib.axes.Axes", samples: Sequence[MemorySample], length: float, font_size: float) -> None:
    from matplotlib.collections import PolyCollection

    if not samples:
        return
    times = [*(sample.time for sample in samples), length]
    base = [0] * len(samples)
    areas: list[list[tuple[float, float]]] = []
    colours: list[str] = []
    for version in sorted({version for sample in samples for version in sample.weights}):
        alive = [i for i, sample in enumerate(samples) if version in sample.weights]
        first, last = alive[0], alive[-1]
        top = [below + sample.weights.get(version, 0) for below, sample in zip(base, samples, strict=True)]
        areas.append(_area(times[first : last + 2], base[first : last + 1], top[first : last + 1]))
        colours.append(_VERSIONS[version % len(_VERSIONS)])
        base = top
    for part, colour in _PARTS.items():
        top = [below + getattr(sample, part) for below, sample in zip(base, samples, strict=True)]
        if any(high > low for high, low in zip(top, base, strict=True)):
            areas.append(_area(times, base, top))
            colours.append(colour)
        base = top
    axes.add_collection(PolyCollection(areas, facecolors=colours, linewidths=0), autolim=False)
    peak = max(base)
    axes.axhline(peak, color="black", linewidth=0.6, linestyle=(0, (4, 3)))
    axes.plot([times[base.index(peak)]], [peak], color="black", marker="o", markersize=2.5)
    axes.annotate(
        f"at most {_size(float(peak))}", (1, peak), xycoords=("axes fraction", "data"), xytext=(-3, 2), textcoords="offset points",
        ha="right", va="bottom", size=font_size,
    )  # fmt: skip


def _area(times: Sequence[float], bottom: Sequence[int], top: Sequence[int]) -> list[tuple[float, float]]:
    """Return the corners of an area with steps: each value holds until the next time."""
    corners = [
        [(time, value) for i, value in enumerate(values) for time in (times[i], times[i + 1])]  # the ends of each step
        for values in (top, bottom)
    ]
    return [*corners[0], *reversed(corners[1])]


def _size(count: float) -> str:
    """Return a number of bytes as text with a unit, such as `98.6 MB`."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


# Both ------------------------------------------------------------------------------------------------------------------


def _lengths(where: str, entries: Mapping[str, Any], seconds: Mapping[str, float] | float) -> dict[str, float]:
    if not entries or not all(entries.values()):
        raise InputError(f"{where}: expected at least one entry, each with at least one rank, found {list(entries) or 'none'}; give some")
    lengths = {name: seconds.get(name, 0.0) if isinstance(seconds, Mapping) else seconds for name in entries}
    for name, length in lengths.items():
        if not 0 < length < float("inf"):
            raise InputError(where=where, expected=f"a duration above 0 for '{name}'", found=length, change="check its times, or `seconds`")
    return lengths


def _time_unit(longest: float, unit: str) -> tuple[float, str]:
    if unit != "s":
        return 1.0, unit
    return next((scale, name) for scale, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if longest >= scale or name == "µs")


def _time_axis(axes: "matplotlib.axes.Axes", lengths: Mapping[str, float], scale: float, font_size: float) -> None:
    axes.tick_params(axis="x", labelsize=font_size)
    axes.set_xlim(0, max(lengths.values()))
    axes.xaxis.set_major_formatter(lambda time, _: f"{time / scale:.4g}")


def _names(where: str, count: int, plan: Plan | None, between: str) -> tuple[list[str], str]:
    """Return the names of the rows, and a note that explains them. If ranks have several stages or replicas, the names show them."""
    names = [f"rank {rank}" for rank in range(count)]
    if plan is None:
        return names, ""
    if len(plan.rank_workers) != count:
        ranks = f"{count} rank{'s' if count > 1 else ''}"
        raise InputError(f"{where}: plan: expected {ranks}, one for each row, found {len(plan.rank_workers)}; give the plan that ran")
    replicated, chunks = len(plan.workers) > plan.depth, plan.depth > len(plan.pipeline_ranks)
    if not replicated and not chunks:
        return names, ""
    named = []
    for name, workers in zip(names, plan.rank_workers, strict=True):
        stages = shortened([str(plan.workers[w][0]) for w in workers])
        named.append(f"{name}{between}{stages}" + (f"·{plan.workers[workers[0]][1]}" if replicated else ""))
    return named, ";  beside a rank: " + ("stage" if not chunks else "its stages") + ("·replica" if replicated else "")


def _figure(
    page: _Page,
    heights: Sequence[float],
    columns: int,
    title: str,
    legend: Mapping[str, list[str]],
    under: str,
    *,
    gap: float,
    sharey: bool,
    left: float,
) -> "tuple[matplotlib.figure.Figure, list[list[matplotlib.axes.Axes]]]":
    """Return a figure with panels below each other, a title, a legend, and space for a label below; heights and gaps are in inches."""
    from matplotlib.figure import Figure
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    start = left
    shown = _legend_columns(list(legend), page.points(left), page.size(8))
    if shown < len(legend):  # in several rows, which begin at the left end of the figure
        start = 0.1
        shown = _legend_columns(list(legend), page.points(start), page.size(8))
        shown = min(shown, -(-len(legend) // 2))
    under_title = 0.32 if title else 0.1
    top = _TOP - 0.32 + under_title + 1.5 * (page.size(8) * -(-len(legend) // shown) - 8) / 72
    bottom = _BOTTOM + (1.3 * page.size(8) * (under.count("\n") + 1) - 1.3 * 8) / 72
    height = sum(heights) + gap * (len(heights) - 1) + top + bottom
    figure = Figure(figsize=(page.width, height), dpi=150)
    margins = {"left": left / page.width, "right": 1 - _RIGHT / page.width, "top": 1 - top / height, "bottom": bottom / height}
    spaces = {"height_ratios": list(heights), "hspace": gap * len(heights) / sum(heights), "wspace": 0.04}
    panels = figure.subplots(len(heights), columns, sharex=True, sharey=sharey, squeeze=False, gridspec_kw=margins | spaces)
    figure.text(start / page.width, 1 - 0.1 / height, title, fontsize=page.size(11), va="top")
    patches = [tuple(Patch(facecolor=colour) for colour in colours) for colours in legend.values()]  # each name has one or several colours
    figure.legend(
        handles=patches, labels=list(legend), handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, loc="upper left",
        bbox_to_anchor=(start / page.width, 1 - under_title / height), borderpad=0, borderaxespad=0, ncols=shown, frameon=False,
        fontsize=page.size(8),
    )  # fmt: skip
    return figure, panels.tolist()


def _legend_columns(labels: Sequence[str], points: float, size: float) -> int:
    """Return the number of columns of a legend that fits into a width; columns are filled from top to bottom."""
    widths = [size * (0.55 * len(label) + 4) for label in labels]
    for rows in range(1, len(labels)):
        if sum(max(widths[i : i + rows]) for i in range(0, len(labels), rows)) <= points:
            return -(-len(labels) // rows)
    return 1
