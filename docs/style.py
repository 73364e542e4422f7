"""The style of all pictures of the documentation: SVG files that can be read on a phone, on light and on dark pages.

A phone shows a page 390 pixels wide. There a picture of `WIDTH` inches has a pixel for each point, so no text is smaller than 11 points.
Panels stand below each other. The background is white, and text is drawn as paths, so that a picture looks the same in every viewer.
"""

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from jpipe import files

WIDTH = 5.4  # inches
TEXT, TITLE = 11.0, 12.0  # points
BLACK, GREY, LIGHT_GREY = "#1A1A1A", "#767676", "#C4C4C4"
BLUE, LIGHT_BLUE, ORANGE, YELLOW, GREEN, PURPLE = "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7"  # told apart by all eyes

STYLE: dict[str, Any] = {
    **{"font.family": "DejaVu Sans", "font.size": TEXT, "text.color": BLACK, "legend.fontsize": TEXT, "legend.frameon": False},
    **{"axes.titlesize": TITLE, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 8.0},
    **{"axes.labelsize": TEXT, "axes.labelcolor": BLACK, "axes.edgecolor": GREY, "axes.axisbelow": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "grid.color": "#E4E4E4", "grid.linewidth": 0.8},
    **{"xtick.labelsize": TEXT, "ytick.labelsize": TEXT, "xtick.color": GREY, "ytick.color": GREY},
    **{"xtick.labelcolor": BLACK, "ytick.labelcolor": BLACK, "lines.linewidth": 1.8, "figure.facecolor": "white"},
    **{"svg.fonttype": "path", "svg.hashsalt": "jpipe"},
}


def styled() -> Any:
    """Return a decorator for functions that draw: what they draw has this style."""
    return matplotlib.rc_context(STYLE)


@styled()
def figure(height: float) -> Figure:
    """Return an empty figure of the width of all pictures.

    Args:
        height: in inches.
    """
    return Figure(figsize=(WIDTH, height), layout="constrained")


@styled()
def write(picture: Figure, path: Path) -> None:
    """Write a picture as SVG; the same picture gives the same file.

    Args:
        picture: what to write.
        path: of the file; its folder is created if it does not exist.
    """
    buffer = io.StringIO()
    picture.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomically(path, _shortened(buffer.getvalue()))


def _shortened(svg: str) -> str:
    """Return the text of a picture with two decimals, hundredths of a point, and without comments, which repeat the text that is drawn."""
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"scale\([^)]*\)|(\.\d\d)\d+", lambda match: match[1] or match[0], svg)
    return re.sub(r" *\n\s*", "\n", svg)


def stack(picture: Figure, height: float, ratios: Sequence[float] | None = None) -> None:
    """Put the panels of a picture below each other, and give all its text the sizes of this style.

    Args:
        picture: a figure with a constrained layout.
        height: in inches.
        ratios: of the heights of the panels.
    """
    from matplotlib.text import Text

    picture.set_size_inches(WIDTH, height)
    for axes, place in zip(picture.axes, picture.add_gridspec(len(picture.axes), 1, height_ratios=ratios), strict=True):
        axes.set_subplotspec(place)
    for text in picture.findobj(Text):
        text.set_fontsize(max(text.get_fontsize(), TEXT))


def title(axes: Any, text: str) -> None:
    """Put a title above a panel, from the left end of the picture on.

    Args:
        axes: the panel.
        text: of the title.
    """
    axes.set_title(" ")  # the layout keeps space for it
    above = {"xytext": (4, 8), "textcoords": "offset points", "size": TITLE, "weight": "bold", "in_layout": False, "annotation_clip": False}
    axes.annotate(text, (0, 1), xycoords=("figure fraction", "axes fraction"), **above)


def legend_below(axes: Any, columns: int = 1, below: float = 0.2) -> None:
    """Put the legend of a panel below it, where it hides nothing.

    Args:
        axes: the panel.
        columns: of the legend.
        below: the distance, as a share of the height of the panel.
    """
    axes.legend(
        loc="upper left", bbox_to_anchor=(0, -below), ncols=columns, borderaxespad=0, handlelength=1.4, columnspacing=1.2, labelspacing=0.3
    )


def label_rows(axes: Any, names: Sequence[str]) -> None:
    """Label a row for each name, from top to bottom.

    Args:
        axes: the panel.
        names: of the rows.
    """
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def share_legend(picture: Figure, entries: Mapping[str, Any], columns: int = 2) -> None:
    """Put one legend for all panels above them.

    Args:
        picture: the figure.
        entries: what is drawn, by label.
        columns: of the legend.
    """
    picture.legend(entries.values(), entries.keys(), loc="outside upper left", ncols=columns, handlelength=1.8, columnspacing=1.2)
