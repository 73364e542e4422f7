"""Draw the losses of several runs in one picture, over steps, tokens and time."""

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64

from jpipe_train.report import loss_curve
from jpipe_train.runs.reading import Row

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

CREATOR = "jpipe compare"
"""The creator in the metadata of the picture. `jpipe compare` recognizes an earlier comparison by it."""
MOST_DRAWN = 12
"""The largest number of runs in a picture; more could not be distinguished."""

# On a phone, 390 pixels wide, a page leaves 335 pixels for the picture. There a point is a pixel, so no text is smaller than 11 pixels.
_WIDTH, _PANEL, _LINE = 4.65, 2.5, 0.19  # inches: width of the picture, height of a panel, height of a line of the legend
_TEXT = 11.0  # points
_WIDE, _WIDE_PANEL = 13.5, 4.2  # inches: width of the picture for wide windows, and height of its panels
_LABEL = 36  # characters in a line of the legend
_MOST_POINTS, _MOST_VALIDATIONS = 500, 30  # the most points of a line, and the most validation losses of a run
# Colour-blind people can distinguish these colours. For print in grey, neighbours also differ in dashes and markers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#1A1A1A", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 2)))
_MARKERS = "osD^vP"


@dataclass(frozen=True)
class Curve:
    """The losses of a run."""

    label: str  # the printable name of the run
    rows: Sequence[Row]  # the rows of the run, in ascending order of steps
    tokens: int | None  # the number of tokens in a step; None if the data are not text
    examples: int | None  # the number of examples in a step; None if it is unknown
    # (first step, end, examples in a step) for parts of the run that may have had another batch size
    earlier: Sequence[tuple[int, int, int]] = ()


def draw(curves: Sequence[Curve], unit: str, *, wide: bool = False) -> "matplotlib.figure.Figure":
    """Draw the training losses as lines, smoothed if there are many, and the validation losses as points, in three panels.

    The x axes of the panels are steps, tokens (or examples, if a run has no tokens) and time. The `unit` of the losses may be empty. In
    wide windows the panels are beside each other, otherwise below each other.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    labels, columns = [_wrapped(curve.label) for curve in curves], 3 if wide else 1
    lines = max(sum(label.count("\n") + 1 for label in column) for column in np.array_split(labels, columns))
    height = 3 // columns * (_WIDE_PANEL if wide else _PANEL) + _LINE * (lines + 2)
    figure = Figure(figsize=(_WIDE if wide else _WIDTH, height), layout="constrained")
    panels = figure.subplots(3 // columns, columns)
    has_tokens = all(curve.tokens is not None for curve in curves)
    for axes, (name, place) in zip(panels, _axes(curves, has_tokens), strict=True):
        losses = [_draw_run(axes, curve, number, place) for number, curve in enumerate(curves)]
        loss_curve.scale(axes, np.concatenate([np.zeros(0), *losses]))
        axes.margins(y=0.1)
        loss_curve.dress(axes, f"loss ({unit})" if unit else "loss", name, _TEXT + 0.5)
    handles = [Line2D([], [], **_look(number), markersize=6) for number in range(len(curves))]
    style: dict[str, Any] = {"frameon": False, "fontsize": _TEXT, "handlelength": 3.6, "labelspacing": 0.25, "ncols": columns}
    title = f"lines: training{_smoothed(curves)}; points: validation"
    legend = figure.legend(
        handles, ["·"] * len(curves), loc="outside upper left", title=title, title_fontsize=_TEXT, alignment="left", **style
    )
    for text, label in zip(legend.get_texts(), labels, strict=True):  # set later, so that names may begin with _
        text.set_parse_math(False)
        text.set_text(label)
    return figure


def _smoothed(curves: Sequence[Curve]) -> str:
    """Return what the legend says about smoothing: all lines, some lines or none are running means."""
    are_smoothed = [is_smoothed(curve.rows) for curve in curves]
    return " (smoothed)" if all(are_smoothed) else " (in part smoothed)" if any(are_smoothed) else ""


def is_smoothed(rows: Sequence[Row]) -> bool:
    """Return whether a run has so many losses that its line is a running mean."""
    return len(loss_curve.finite(rows, "loss")[1]) >= loss_curve.SMOOTHED_FROM


def to_svg(figure: "matplotlib.figure.Figure") -> str:
    """Return a picture as SVG. Its text is drawn as paths, so that it looks the same everywhere."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": CREATOR}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # in the names of runs
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": CREATOR}, facecolor="white")
    return re.sub(r"\n *<!--.*?-->", "", file.getvalue(), flags=re.DOTALL)


def _axes(curves: Sequence[Curve], has_tokens: bool) -> list[tuple[str, Callable[[Curve], dict[int, float]]]]:
    """Return the label of each panel, and a function that maps a run's steps to positions on its axis."""

    def steps(curve: Curve) -> dict[int, float]:
        return {int(row["step"]): float(row["step"]) for row in curve.rows}

    def amounts(curve: Curve) -> dict[int, float]:
        size = curve.examples or 0
        scale = (curve.tokens or 0) / size if has_tokens and size else 1.0
        return {step: scale * _examples_before(step, size, curve.earlier) for step in steps(curve)} if size else {}

    def seconds(curve: Curve) -> dict[int, float]:
        times = {int(row["step"]): float(row["seconds"]) for row in curve.rows if "seconds" in row}
        first = min(times.values(), default=0.0)  # before the first row the run starts and compiles
        return {step: time - first for step, time in times.items()}

    def largest(places: Callable[[Curve], dict[int, float]]) -> float:
        return max((max(places(curve).values(), default=0.0) for curve in curves), default=0.0)

    amount, words = _unit(largest(amounts), ((1e9, 1e9, "billions"), (1e6, 1e6, "millions"), (1e4, 1e3, "thousands"), (0.0, 1.0, "")))
    time, time_unit = _unit(largest(seconds), ((7200.0, 3600.0, "hours"), (120.0, 60.0, "minutes"), (0.0, 1.0, "seconds")))
    what = "tokens" if has_tokens else "examples"
    return [
        ("step", steps),
        (f"{what} ({words})" if words else what, lambda curve: {step: value / amount for step, value in amounts(curve).items()}),
        (f"time since the first step ({time_unit})", lambda curve: {step: value / time for step, value in seconds(curve).items()}),
    ]


def _examples_before(step: int, size: int, earlier: Sequence[tuple[int, int, int]]) -> int:
    """Return the number of examples in all steps before `step`; steps outside the `earlier` parts have `size` examples."""
    return step * size + sum((max(min(step, end), first) - first) * (other - size) for first, end, other in earlier)


def _unit(largest: float, units: Sequence[tuple[float, float, str]]) -> tuple[float, str]:
    """Return the size and the name of the first unit in `units` with a smallest number of at most `largest`.

    A unit is (smallest number, size, name).
    """
    return next((size, name) for smallest, size, name in units if largest >= smallest)


def _draw_run(
    axes: "matplotlib.axes.Axes", curve: Curve, number: int, places: Callable[[Curve], dict[int, float]]
) -> Float64[np.ndarray, " n"]:
    """Draw the losses of a run, and return the drawn losses."""
    look, at, drawn = _look(number), places(curve), [np.zeros(0)]
    steps, losses = loss_curve.finite(curve.rows, "loss")
    if is_smoothed(curve.rows):
        losses = loss_curve.running_mean(losses, len(losses) // 40)
    steps, losses = _known(steps, losses, at)
    if len(losses):
        shown = loss_curve.extremes(losses, _MOST_POINTS // 2)
        marker = "" if len(losses) > 1 else look["marker"]
        axes.plot([at[int(step)] for step in steps[shown]], losses[shown], **look | {"marker": marker})
        drawn.append(losses)
    steps, losses = _known(*loss_curve.finite(curve.rows, "val_loss"), at)
    if len(losses):
        shown = loss_curve.extremes(losses, _MOST_VALIDATIONS // 2)
        points = {"color": look["color"], "marker": look["marker"], "linestyle": "", "markersize": 6, "mec": "white"}
        axes.plot([at[int(step)] for step in steps[shown]], losses[shown], **points)
        drawn.append(losses)
    return np.concatenate(drawn)


def _wrapped(label: str) -> str:
    """Return a label in at most two lines, broken after spaces, commas and slashes."""
    wrapper = textwrap.TextWrapper(_LABEL, break_on_hyphens=False, max_lines=2, placeholder="…")
    wrapper.wordsep_simple_re = re.compile(r"(\s+)|(?<=[,/])")
    return wrapper.fill(label)


def _known(
    steps: Int64[np.ndarray, " n"], values: Float64[np.ndarray, " n"], at: dict[int, float]
) -> tuple[Int64[np.ndarray, " m"], Float64[np.ndarray, " m"]]:
    """Return the steps with a known position, and their values."""
    chosen = np.array([int(step) in at for step in steps], bool)
    return steps[chosen], values[chosen]


def _look(number: int) -> dict[str, Any]:
    """Return the colour, dashes and marker of run `number` as keyword arguments of Matplotlib."""
    return {
        **{"color": _COLOURS[number % len(_COLOURS)], "linestyle": _DASHES[number % len(_DASHES)]},
        **{"marker": _MARKERS[number % len(_MARKERS)], "linewidth": 1.8},
    }
