"""Draw the life of a microbatch, step by step, from the table of docs/explanation/how-it-works.md."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from benchmarks.papers.document import Table
from docs import style

NAME = "life of a microbatch"  # of the table
BANDS = ("#EAF2FA", "#FDF3E1")
BOX, STEP, HEADING = 38.0, 51.0, 28.0  # points: the height of a box, from box to box, of a heading


@style.styled()
def picture(table: Table) -> Figure:
    """Draw a box for each row, below each other, in a band for each time when steps are made.

    Args:
        table: with the columns step, when, file, function and result.
    """
    groups: dict[str, list[Sequence[object]]] = {}
    for row in table.rows:
        groups.setdefault(str(row[1]), []).append(row)
    height = sum(HEADING + STEP * len(rows) + 6 for rows in groups.values())
    figure = style.figure(height / 72)
    figure.set_layout_engine("none")
    axes = figure.add_axes((0, 0, 1, 1))
    width = 72 * style.WIDTH
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    y = 0.0
    for (when, rows), colour in zip(groups.items(), BANDS, strict=True):
        axes.axhspan(y, y + HEADING + STEP * len(rows), facecolor=colour)
        axes.text(8, y + HEADING / 2 + 2, when, size=style.TITLE, weight="bold", va="center")
        y += HEADING
        for step, _, file, function, result in rows:
            axes.add_patch(
                FancyBboxPatch((8, y), width - 16, BOX, boxstyle="round,pad=0,rounding_size=4", facecolor="white", edgecolor=style.GREY)
            )
            axes.text(16, y + 12, str(step), weight="bold", va="center")
            axes.text(width - 16, y + 12, str(result), ha="right", va="center")
            where = f"{str(file).strip('`').removeprefix('jpipe/')}: {str(function).strip('`')}"
            axes.text(16, y + 27, where, color=style.GREY, va="center")
            if step != table.rows[-1][0]:
                gap = STEP - BOX + (HEADING + 6 if step == rows[-1][0] else 0)
                axes.annotate("", (width / 2, y + BOX + gap), (width / 2, y + BOX), arrowprops={"arrowstyle": "->", "color": style.GREY})
            y += STEP
        y += 6
    return figure
