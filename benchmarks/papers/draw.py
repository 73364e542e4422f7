"""Draw the pictures of the papers from the cells of their tables on the pages, so that both show the same."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.papers.document import Table
from docs import style
from docs.style import BLACK, BLUE, GREEN, GREY, LIGHT_BLUE, ORANGE, YELLOW


class Picture(NamedTuple):
    """A picture.

    Attributes:
        tables: the names of those that it shows.
        height: in inches.
        draw: puts the tables into a figure.
    """

    tables: tuple[str, ...]
    height: float
    draw: Callable[[Any, Mapping[str, Table]], None]


@style.styled()
def draw_all(tables: Mapping[str, Table], new: Collection[str], folder: Path) -> list[Path]:
    """Write each picture that shows a new table and has all its tables.

    Args:
        tables: by name.
        new: the names of the new ones.
        folder: of the pictures; created if it does not exist.

    Returns:
        The files written.
    """
    written = []
    for name, picture in PICTURES.items():
        if set(picture.tables) <= set(tables) and not set(picture.tables).isdisjoint(new):
            figure = style.figure(picture.height)
            picture.draw(figure, tables)
            written.append(folder / f"papers-{name}.svg")
            style.write(figure, written[-1])
    return written


def numbers(cell: object) -> list[float]:
    """Return all numbers of a cell, in order: `15-1 (5.28)` has 15, 1 and 5.28, `-72%` has -72."""
    texts = re.findall(r"(?:^[-+])?\d[\d,]*(?:\.\d+)?", str(cell))
    return [float(one.replace(",", "")) for one in texts]


def _last(cell: object) -> float | None:
    """Return the last number of a cell, which is in brackets or the only number."""
    return all_numbers[-1] if (all_numbers := numbers(cell)) else None


def _titled(axes: Any, title: str, across: str = "", up: str = "") -> None:
    style.title(axes, title)
    axes.set(xlabel=across, ylabel=up)


def _bars(axes: Any, names: Sequence[str], series: Mapping[str, Sequence[float | None]], colours: Sequence[str]) -> None:
    """Draw upright bars in groups, one group per name, without a bar if there is no number."""
    width = 0.8 / len(series)
    for n, ((label, values), colour) in enumerate(zip(series.items(), colours, strict=True)):
        positions = [place + (n - (len(series) - 1) / 2) * width for place in range(len(names))]
        axes.bar(positions, [value or 0 for value in values], width, color=colour, label=label)
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y")


def _draw_plans(figure: Any, tables: Mapping[str, Table]) -> None:
    left, right = figure.subplots(2, 1, height_ratios=(1.6, 1))
    rows = tables["table 1"].rows
    marks = {"the paper": (2, "D", BLACK), "planned": (3, "o", BLUE), "the paper's stages, planned": (4, "s", ORANGE)}
    for label, (column, mark, colour) in marks.items():
        shown = [(_last(row[column]), n) for n, row in enumerate(rows)]
        left.plot(*zip(*shown, strict=True), mark, color=colour, label=label, markersize=7, fillstyle="none", markeredgewidth=1.6)
    waits = {(str(row[0]).split(",")[0], row[1]): _last(row[4]) for row in tables["table 1, sums"].rows}
    shown = [(wait, n) for n, row in enumerate(rows) if (wait := waits.get((row[0], row[1])))]
    left.plot(*zip(*shown, strict=True), "x", color=ORANGE, label="the same, if sums wait", markersize=7, markeredgewidth=1.8)
    style.label_rows(left, [f"{row[0]}, {row[1]}" for row in rows])
    left.set_xscale("log", base=2)
    left.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
    left.axvline(1, color=GREY, linewidth=1, zorder=0)
    _titled(left, "Table 1: throughput ÷ data parallelism", "speed-up (1: data parallelism)")
    style.legend_below(left, 1, 0.14)
    sums = tables["table 1, sums"].rows
    right.plot([_last(row[5]) for row in sums], range(len(sums)), "|", color=GREY, markersize=14, markeredgewidth=3, label="the link")
    right.plot([_last(row[6]) for row in sums], range(len(sums)), "D", color=BLACK, markersize=6, label="needed for its speed-up")
    style.label_rows(right, [f"{row[0]}, {row[1]}".replace(" rows a GPU", " rows") for row in sums])
    right.set_xscale("log")
    right.set_xticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    _titled(right, "The rate of the sums of gradients", "GB/s, if sums do not overlap")
    style.legend_below(right, 1, 0.22)


def _draw_waits(figure: Any, tables: Mapping[str, Table]) -> None:
    table = tables["figure 1"]
    for axes, first in zip(panels := figure.subplots(3, 1), (1, 3, 5), strict=True):
        for shift, column, colour in ((-0.17, first, LIGHT_BLUE), (0.17, first + 1, BLUE)):
            label = f"{str(table.head[column]).split(', ')[-1]}"
            for n, row in enumerate(table.rows):
                _range(axes, n + shift, row[column], colour, label if n == 0 else "")
        style.label_rows(axes, [str(row[0]) for row in table.rows])
        _titled(axes, "Figure 1: " + str(table.head[first]).rsplit(", ", 1)[0], "share of time that waits (%)" if first == 5 else "")
    for axes in panels:
        axes.set_xlim(0, 100)
        style.legend_below(axes, 2, 0.3 if axes is panels[2] else 0.13)
    ends = "A bar is a range. Its left end: sums overlap with the\ncomputation. Its right end: they begin after it."
    figure.legend([], [], title=ends, loc="outside upper left", alignment="left", borderaxespad=0.3)


def _range(axes: Any, place: float, cell: object, colour: str, label: str) -> None:
    low, high = numbers(cell)
    axes.barh(place, max(high - low, 1.0), 0.3, left=low, color=colour, label=label or None)


def _draw_bytes(figure: Any, tables: Mapping[str, Table]) -> None:
    left, right = figure.subplots(2, 1, height_ratios=(1.7, 1))
    rows = tables["figure 17"].rows
    alone = [numbers(row[1])[0] for row in rows]
    series: dict[str, list[float | None]] = {"data parallelism": list(alone)}
    for label, column in {"fastest pipeline": 3, "pipeline with fewest bytes": 5, "the paper's stages, fewest bytes": 8}.items():
        changes = [numbers(row[column]) for row in rows]
        series[label] = [one * (1 + change[0] / 100) if change else None for one, change in zip(alone, changes, strict=True)]
    for n, ((label, values), colour) in enumerate(zip(series.items(), (GREY, LIGHT_BLUE, BLUE, ORANGE), strict=True)):
        left.barh([row + 0.2 * (n - 1.5) for row in range(len(rows))], [value or 0 for value in values], 0.2, color=colour, label=label)
    style.label_rows(left, [str(row[0]) for row in rows])
    left.set_xscale("log")
    left.set_xticks([0.1, 0.3, 1, 3, 10, 30], ["0.1", "0.3", "1", "3", "10", "30"])
    _titled(left, "Figure 17: bytes for each sample, four GPUs", "MB per sample")
    style.legend_below(left, 1, 0.16)
    claims = tables["figure 17, claims"].rows
    for n, row in enumerate(claims):
        ends = sorted(-numbers(row[column])[0] for column in (4, 5))
        right.barh(
            n, max(ends[1] - ends[0], 0.8), 0.4, left=ends[0], color=ORANGE, label="from fastest cuts to fewest bytes" if n == 0 else None
        )
        for m, claim in enumerate(numbers(row[6])):
            right.plot(claim, n, "D", color=BLACK, markersize=7, label="the paper and its preprint" if n + m == 0 else None)
    style.label_rows(right, [f"{row[0]}, {row[2]}\n{row[1]}, {row[3]} rows" for row in claims])
    right.set_xlim(30, 100)
    _titled(right, "The paper's claims: bytes saved", "% less than data parallelism")
    style.legend_below(right, 1, 0.26)


def _draw_memory(figure: Any, tables: Mapping[str, Table]) -> None:
    rows = tables["figure 16"].rows
    left, middle, right = figure.subplots(3, 1, height_ratios=(1.2, 1.2, 1))
    names = [str(row[0]) for row in rows]
    colours = (BLUE, LIGHT_BLUE, GREEN, YELLOW)
    _bars(left, names, {f"stage {n}": [_last(row[1 + n]) for row in rows] for n in range(4)}, colours)
    for n, row in enumerate(rows):
        left.plot([n - 0.45, n + 0.45], [_last(row[5])] * 2, color=BLACK, linewidth=2, label="data parallelism" if n == 0 else None)
    _titled(left, "Figure 16: memory of four stages", "", "GB of a GPU")
    style.legend_below(left, 3, 0.16)
    flights = tables["figure 18"].rows
    stages = {f"stage {n}": [_last(row[2 + n]) for row in flights] for n in range(4)}
    _bars(middle, [str(row[0]) for row in flights], stages, colours)
    _titled(middle, "Figure 18: GNMT-8, memory", "microbatches in flight", "GB of a GPU")
    style.legend_below(middle, 3, 0.3)
    right.bar([str(row[0]) for row in flights], [numbers(row[1])[0] for row in flights], 0.6, color=BLUE)
    right.grid(axis="y")
    _titled(right, "Figure 18: GNMT-8, throughput", "microbatches in flight", "samples/s")


def _draw_2bw(figure: Any, tables: Mapping[str, Table]) -> None:
    left, middle, right = figure.subplots(3, 1)
    *rows, paper = tables["figure 6"].rows
    names = ["\n".join([*str(row[0]).split(", "), str(row[1])]) for row in rows]
    colours = (BLUE, GREEN, ORANGE)
    _bars(
        left,
        names,
        {str(label): [_last(row[4 + n]) for row in rows] for n, label in enumerate(tables["figure 6"].head[4:7])},
        colours,
    )
    for n, colour in enumerate(colours):
        left.axhline(numbers(paper[4 + n])[0], color=colour, linestyle="--", linewidth=1.2)
    left.set_yscale("log", base=2)
    left.set_yticks([1, 2, 4, 8], ["1", "2", "4", "8"])
    _titled(left, "Figure 6: throughput (dashed: the paper's largest)", "model and batch", "times as fast")
    style.legend_below(left, 3, 0.48)
    memory = tables["figure 7"]
    rows = [row for row in memory.rows if row[0] == "full"]
    series = {str(memory.head[n]).replace("pipedream_", ""): [_last(row[n]) for row in rows] for n in range(3, 8)}
    _bars(middle, [f"{row[1]}, {row[2]}" for row in rows], series, (GREY, ORANGE, BLUE, GREEN, LIGHT_BLUE))
    middle.axhline(16, color=BLACK, linewidth=1)
    middle.text(-0.4, 16.3, "the GPU's 16 GB")
    _titled(middle, "Figure 7: GPT of 2.2B, recomputing", "batch, rows of a microbatch", "GB of a GPU")
    style.legend_below(middle, 2, 0.3)
    depths = tables["figure 8"]
    looks = zip(depths.rows, (LIGHT_BLUE, BLUE, GREEN, ORANGE), ("o", "s", "^", "D"), strict=True)
    for row, colour, mark in looks:
        shown = [(str(depths.head[n]).removeprefix("batch "), value) for n in (2, 3, 4) if (value := _last(row[n]))]
        label = f"d = {row[0]}, b = {row[1]}" + (" (does not fit)" if "too much" in str(row[5]) else "")
        right.plot(*zip(*shown, strict=True), mark + "-", color=colour, label=label)
    right.set_ylim(bottom=0)
    right.grid()
    _titled(right, "Figure 8: GPT of 1.3B, 64 GPUs", "batch", "samples/s")
    style.legend_below(right, 1, 0.3)


PICTURES = {
    "plans": Picture(("table 1", "table 1, sums"), 8.6, _draw_plans),
    "bytes": Picture(("figure 17", "figure 17, claims"), 9.6, _draw_bytes),
    "waits": Picture(("figure 1",), 9.8, _draw_waits),
    "memory": Picture(("figure 16", "figure 18"), 9.2, _draw_memory),
    "2bw": Picture(("figure 6", "figure 7", "figure 8"), 10.6, _draw_2bw),
}
"""By name: docs/pictures/papers-NAME.svg."""
