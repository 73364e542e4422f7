"""Draw the chart of speed of the README from the tables that the documentation shows, and read the results of the study of learning."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.patches import Patch

import jpipe
from benchmarks.learning.grid import Row
from benchmarks.papers.document import Table, read
from docs import style

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "learning" / "h100.json"


def tables_of_pages() -> list[Table]:
    """Return the tables of all pages of docs/explanation, page by page."""
    return [table for page in sorted((ROOT / "docs" / "explanation").rglob("*.md")) for table in read(page.read_text(encoding="utf-8"))]


def find(tables: Iterable[Table], *cells: str) -> Table:
    """Return the first table with all these cells in its heading.

    Args:
        tables: to search.
        cells: of its heading.

    Raises:
        jpipe.InputError: no table has them.
    """
    for table in tables:
        if set(cells) <= set(table.head):
            return table
    raise jpipe.InputError(
        f"docs/explanation: expected a table with the columns {', '.join(cells)}, found none; write its heading like that"
    )


@style.styled()
def speed(tables: Sequence[Table]) -> Figure:
    """Draw programs and schedules as shares of the ceiling, and pipelines over slow links beside data parallelism.

    Args:
        tables: of the pages.
    """
    figure = style.figure(8.9)
    shares, *models = figure.subplots(3, 1, height_ratios=(3.1, 1, 1))
    _draw_shares(shares, find(tables, "share of the ceiling", "goal"))
    links = find(tables, "2 hosts: straight", "replicated")
    for axes, row in zip(models, links.rows, strict=True):
        _draw_links(axes, links.head, row)
    models[-1].set_xlabel("data parallelism waits for links, of its time:")
    style.legend_below(models[-1], 3, 0.5)
    return figure


def _draw_shares(axes: Any, table: Table) -> None:
    names = [str(row[0]).replace("`", "") for row in table.rows]
    columns = {m: table.head.index(m) for m in ("m = 8", "m = 2")}
    for shift, (m, column) in zip((-0.19, 0.19), columns.items(), strict=True):
        ends = [_ends(str(row[column])) for row in table.rows]
        colours = [_colour(name)[m == "m = 2"] for name in names]
        places = [n + shift for n in range(len(names))]
        axes.barh(places, [(low + high) / 2 for low, high in ends], 0.36, color=colours)
        axes.hlines(places, [low for low, _ in ends], [high for _, high in ends], color=style.BLACK, linewidth=1)
    axes.axvline(1, color=style.BLACK, linewidth=1)
    style.label_rows(axes, names)
    axes.set_xlim(0, 1.2)
    slowest = min(range(len(names)), key=lambda n: max(_ends(str(table.rows[n][column]))[1] for column in columns.values()))
    axes.annotate("two jobs", (1, slowest), xytext=(-4, 0), textcoords="offset points", ha="right", va="center")
    style.title(axes, "Two cores: throughput ÷ two separate JAX jobs'")
    both = {kind: tuple(Patch(color=colour) for colour in colours) for kind, colours in LOOKS.items()}
    shades = "dark: {}, light: {} microbatches".format(*(m.removeprefix("m = ") for m in columns))
    place = {"loc": "upper left", "bbox_to_anchor": (-0.55, -0.08), "borderaxespad": 0, "labelspacing": 0.3}
    handles = {"handler_map": {tuple: HandlerTuple(ndivide=None, pad=0.3)}, "handlelength": 3}
    axes.legend(both.values(), both.keys(), title=shades, alignment="left", **handles, **place)


def _ends(cell: str) -> tuple[float, float]:
    """Return both ends of a range such as "0.97 to 1.02", of a single number twice; of an empty cell zeros."""
    numbers = [float(number) for number in cell.split(" to ")] if cell else [0.0]
    return numbers[0], numbers[-1]


LOOKS = {
    "another program": (style.GREY, style.LIGHT_GREY),
    "jpipe, flush": (style.BLUE, style.LIGHT_BLUE),
    "jpipe, delayed weights": (style.ORANGE, style.YELLOW),
}


PIPELINES = {"straight": "PipeDream", "replicated": "with replicas"}


def _colour(name: str) -> tuple[str, str]:
    if not name.startswith("jpipe"):
        return LOOKS["another program"]
    schedule = re.match(r"jpipe (\w+)", name.replace(",", ""))
    delayed = schedule is not None and schedule[1] in jpipe.schedules.SCHEDULES and not jpipe.schedules.SCHEDULES[schedule[1]].flushes
    return LOOKS["jpipe, delayed weights" if delayed else "jpipe, flush"]


def _draw_links(axes: Any, head: Sequence[str], row: Sequence[object]) -> None:
    columns = [n for n in range(1, len(head)) if not head[n].startswith("bytes")]
    names, hosts = [], ""
    for n in columns:
        hosts, name = head[n].split(": ") if ": " in head[n] else (hosts, head[n])
        names.append(f"{PIPELINES.get(name, name)}, {hosts}")
    looks = {"50%": (style.LIGHT_GREY, "o"), "80%": (style.LIGHT_BLUE, "s"), "90%": (style.BLUE, "D")}  # of its time data parallelism waits
    speeds = [[float(number) for number in str(row[n]).split(", ")] for n in columns]
    for (label, (colour, mark)), values in zip(looks.items(), zip(*speeds, strict=True), strict=True):
        axes.plot(values, range(len(names)), mark, color=colour, label=label, markersize=7, zorder=3)
    style.label_rows(axes, names)
    axes.set_xscale("log")
    axes.set_xlim(0.9, 25)
    axes.set_xticks([1, 2, 5, 10, 20], ["1", "2", "5", "10", "20"])
    axes.set_xticks([], minor=True)
    axes.axvline(1, color=style.BLACK, linewidth=1)
    style.title(axes, f"Slow links, {row[0]}: throughput ÷ data parallelism's")


def results(path: Path = RESULTS) -> list[Row]:
    """Return the runs of the study.

    Args:
        path: of the results in JSON.
    """
    runs: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return [Row(**row) for row in runs["rows"]]


def draw_all(folder: Path) -> None:
    """Write speed.svg.

    Args:
        folder: of the pictures.
    """
    style.write(speed(tables_of_pages()), folder / "speed.svg")
