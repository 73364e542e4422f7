"""Draw time to accuracy from its table: the seconds of data parallelism and of a pipeline for each model and number of hosts."""

from matplotlib.figure import Figure

from benchmarks.papers.document import Table
from docs import style

LOOKS = {"data parallelism": (style.ORANGE, "s"), "pipeline": (style.BLUE, "o")}


@style.styled()
def draw(table: Table) -> Figure:
    """Draw a row for each model and number of hosts.

    Args:
        table: as `benchmarks.hosts.accuracy.table` makes it, or as it stands on a page.
    """
    column = {name: n for n, name in enumerate(table.head)}
    rows: dict[str, list[tuple[float, str]]] = {}  # seconds and speed-up: first of data parallelism, then of the pipeline
    for row in table.rows:
        name = f"{row[column['model']]}, {row[column['hosts']]} hosts"
        rows.setdefault(name, []).append((float(str(row[column["seconds"]])), str(row[column["speed-up"]])))
    figure = style.figure(1.5 + 0.36 * len(rows))
    axes = figure.subplots()
    for n, times in enumerate(rows.values()):
        axes.plot([seconds for seconds, _ in times], [n] * len(times), color=style.LIGHT_GREY, linewidth=3, zorder=1)
        for (seconds, speed_up), (label, (colour, mark)) in zip(times, LOOKS.items(), strict=False):
            axes.plot(seconds, n, mark, color=colour, markersize=8, label=label if n == 0 else None)
            if label == "pipeline":
                text = f"{speed_up} ×" if speed_up[:1].isdigit() else speed_up
                axes.annotate(text, (seconds, n), xytext=(-8, 0), textcoords="offset points", ha="right", va="center")
    style.label_rows(axes, list(rows))
    seconds = [time for times in rows.values() for time, _ in times]
    axes.set_xscale("log")
    axes.set_xlim(min(seconds) / 4, max(seconds) * 1.4)
    ticks = [tick for tick in (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000) if min(seconds) / 4 <= tick <= max(seconds) * 1.4]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("seconds to the same validation loss")
    lines = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    style.share_legend(figure, lines, 2)
    return figure
