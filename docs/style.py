"""The style of all pictures of the documentation: SVG files that can be read on a phone, on light and on dark pages.

A phone shows a page 390 pixels wide. There a picture of `WIDTH` inches has a pixel for each point, so no text is smaller than 11 points.
Panels stand below each other. The background is white, and text is drawn as paths, so that a picture looks the same in every viewer.
"""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.text import Text

from jpipe import files

WIDTH = 5.4  # inches
TEXT, TITLE = 11.0, 12.0  # points
SIZES = {"width": WIDTH, "font_size": TEXT}  # of jpipe's own pictures
BLACK, GREY, LIGHT_GREY = "#1A1A1A", "#767676", "#C4C4C4"
BLUE, LIGHT_BLUE, ORANGE, YELLOW, GREEN, PURPLE = "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7"  # told apart by all eyes

HASH = r"(?<=[\"#])[a-z][0-9a-f]{10}(?=[\")])"  # an id in Matplotlib's SVG, where it is defined or used

STYLE: dict[str, Any] = {
    **{"font.family": "DejaVu Sans", "font.size": TEXT, "text.color": BLACK, "legend.fontsize": TEXT, "legend.frameon": False},
    **{"axes.titlesize": TITLE, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 8.0},
    **{"axes.labelsize": TEXT, "axes.labelcolor": BLACK, "axes.edgecolor": GREY, "axes.axisbelow": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "grid.color": "#E4E4E4", "grid.linewidth": 0.8},
    **{"xtick.labelsize": TEXT, "ytick.labelsize": TEXT, "xtick.color": GREY, "ytick.color": GREY},
    **{"xtick.labelcolor": BLACK, "ytick.labelcolor": BLACK, "xtick.minor.size": 0, "ytick.minor.size": 0},
    **{"lines.linewidth": 1.8, "figure.facecolor": "white", "svg.fonttype": "path", "svg.hashsalt": "jpipe"},
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
    svg = buffer.getvalue()
    while (shorter := _shortened(svg)) != svg:  # a group may become empty, and then the group around it
        svg = shorter
    files.write_atomically(path, svg)


def _shortened(svg: str) -> str:
    """Return a picture in less text: hundredths of a point, no comments, short rectangles, equal neighbours as one path.

    Its ids are numbers, because Matplotlib's are hashes of all digits of a coordinate, and the last ones may differ from run to run.
    """
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"scale\([^)]*\)|(\.\d\d)\d+", lambda match: match[1] or match[0], svg)
    svg = re.sub(r" *\n\s*", "\n", svg)
    for along in (r"L (\S+) (\S+)\n(?:L \S+ \2\n)+(?=L \S+ \2\n)", r"L (\S+) (\S+)\n(?:L \1 \S+\n)+(?=L \1 \S+\n)"):
        svg = re.sub(along, r"L \1 \2\n", svg)  # of points on a line along an axis the ends are enough
    svg = re.sub(r'<g id="\w+">\n(<path [^>]*/>\n)</g>\n', r"\1", svg)
    svg = re.sub(r'<g id="\w+">\n(<g (?:style|transform)=[^>]*>\n(?:<use [^>]*/>\n)+</g>\n)</g>\n', r"\1", svg)
    svg = re.sub(r'<g ([^>]*)>\n(<use xlink:href="[^"]*")/>\n</g>\n', r"\2 \1/>\n", svg)
    svg = re.sub(r'<g id="\w+"/>\n', "", svg)
    svg = re.sub(r"M (\S+) (\S+)\nL \1 (\S+)\nL (\S+) \3\nL \4 \2\nz\n", r"M\1 \2V\3H\4V\2z", svg)
    svg = re.sub(r"M (\S+) (\S+)\nL (\S+) \2\nL \3 (\S+)\nL \1 \4\nz\n", r"M\1 \2H\3V\4H\1z", svg)
    ids = {name: f"{name[0]}{n}" for n, name in enumerate(dict.fromkeys(re.findall(HASH, svg)))}
    svg = re.sub(HASH, lambda match: ids[match[0]], svg)
    same = re.compile(r'(<path d="[^"]*)("[^>]*/>)\n((?:<path d="[^"]*\2\n)+)')
    return same.sub(lambda match: match[1] + "".join(re.findall(r'<path d="([^"]*)"', match[3])) + match[2] + "\n", svg)


def stack(picture: Figure, height: float, ratios: Sequence[float] | None = None) -> None:
    """Put the panels of a picture below each other, and give their text and legends the sizes of this style.

    Args:
        picture: a figure with a constrained layout, and panels with titles at their left.
        height: in inches.
        ratios: of the heights of the panels.
    """
    picture.set_size_inches(WIDTH, height)
    for axes, place in zip(picture.axes, picture.add_gridspec(len(picture.axes), 1, height_ratios=ratios), strict=True):
        axes.set_subplotspec(place)
        text = axes.get_title(loc="left")
        axes.set_title("", loc="left")
        title(axes, text)
        axes.set_xlabel(textwrap.fill(axes.get_xlabel(), 34))
        legend_below(axes, 2, 0.2, -0.4)
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


def legend_below(axes: Any, columns: int = 1, below: float = 0.2, left: float = 0.0) -> None:
    """Put the legend of a panel below it, where it hides nothing.

    Args:
        axes: the panel.
        columns: of the legend.
        below: the distance, as a share of the height of the panel.
        left: where it begins, as a share of the width of the panel.
    """
    spaces = {"borderaxespad": 0, "handlelength": 1.4, "columnspacing": 1.2, "labelspacing": 0.3}
    axes.legend(loc="upper left", bbox_to_anchor=(left, -below), ncols=columns, **spaces)


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
