"""Draw the losses and the metrics of a run."""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float64, Int64

from jpipe_train.console.terminal import shortened

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

SMOOTHED_FROM = 80  # with fewer losses, a running mean has no effect

_BATCH, _MEAN, _VALIDATION = "#9CC3DF", "#0072B2", "#D55E00"  # colours that colour-blind readers can distinguish
_MOST_POINTS = 2000  # a picture cannot show more points
_MOST_VALIDATIONS = 30  # more points would hide the line
_LONGEST_NAME = 32  # the number of characters of a metric's name that fit into the title of a panel
MOST_CHANGES = 50
"""At most this many changes of the plan, the last ones of a run, are marked."""
_CHANGE = "#777777"
_BEHIND_TEXT = {"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 1}  # a line may run behind a text
_MOST_WORDS, _LONGEST_WORDS, _LONGEST_LINE = 8, 64, 30  # the most changes that are labelled, and the longest label and line in characters


def draw_losses(
    rows: Sequence[Mapping[str, int | float]], unit: str, changes: Sequence[tuple[int, str]] = ()
) -> "matplotlib.figure.Figure":
    """Draw the training losses in a light colour with their running mean, and the validation losses as points.

    Losses that are not finite are left out. If there are very many, only the highest and the lowest loss of each interval are drawn. The
    rows of `metrics.jsonl` have `step`, `loss`, and `val_loss` after a validation; `unit` may be empty. `changes` are pairs of a step at
    which the plan changed and a description; the last ones are marked by dashed lines.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.8, 3.5), dpi=220, layout="constrained")
    axes = figure.subplots()
    steps, losses = finite(rows, "loss")
    each = "each batch" if logs_every_batch(rows) else "batches logged"
    strong, name = losses, each
    if len(losses) >= SMOOTHED_FROM:
        shown = extremes(losses, _MOST_POINTS // 2)
        axes.plot(steps[shown], losses[shown], color=_BATCH, linewidth=0.9, label=each)
        strong, name = running_mean(losses, len(losses) // 40), "running mean"
    shown = extremes(strong, _MOST_POINTS // 2)
    if len(losses):
        axes.plot(steps[shown], strong[shown], color=_MEAN, linewidth=1.8, marker="o" if len(losses) == 1 else "", label=name)
    held_out, values = finite(rows, "val_loss")
    if len(values):
        shown = extremes(values, _MOST_VALIDATIONS // 2)
        axes.plot(
            held_out[shown], values[shown], color=_VALIDATION, linestyle="", marker="o", markersize=5, mec="white", label="validation"
        )
        point, text = (float(held_out[-1]), float(values[-1])), f"{values[-1]:.3f}"
        below = len(losses) > 0 and values[-1] < losses[-1]  # the text is below the point if the line is above it
        side: dict[str, Any] = {"xytext": (0, -5), "va": "top", "zorder": 1.5} if below else {"xytext": (0, 9)}
        side["bbox"] = _BEHIND_TEXT
        axes.annotate(text, point, textcoords="offset points", ha="right", color=_VALIDATION, fontsize=10, weight="bold", **side)
    scale(axes, np.concatenate([losses, values]))
    _show_steps(axes, steps, ticks=10)
    axes.margins(y=0.1)
    dress(axes, f"loss ({unit})" if unit else "loss")
    _mark(axes, changes)
    if axes.lines:
        axes.legend(frameon=False, fontsize=9.5)
    return figure


def _mark(axes: "matplotlib.axes.Axes", changes: Sequence[tuple[int, str]]) -> None:
    """Draw dashed lines where the plan changes. If there are few changes, label them at the top, because losses fall."""
    first, last = axes.get_xlim()
    for step, _ in changes[-MOST_CHANGES:]:
        axes.axvline(step, color=_CHANGE, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
    for step, words in changes if len(changes) <= _MOST_WORDS else ():
        parts = shortened(words, _LONGEST_WORDS).replace(" ", "\N{NO-BREAK SPACE}").replace(",\N{NO-BREAK SPACE}", ", ")
        text, point = textwrap.fill(parts, _LONGEST_LINE), (step, 0.98)  # lines end at commas
        side = (-3, "right") if step - first > last - step else (3, "left")
        style: dict[str, Any] = {"xytext": (side[0], 0), "ha": side[1], "va": "top", "rotation": 90, "parse_math": False}
        axes.annotate(text, point, xycoords=("data", "axes fraction"), textcoords="offset points", color=_CHANGE, fontsize=7.5, **style)


def scale(axes: "matplotlib.axes.Axes", losses: Float64[np.ndarray, " n"]) -> None:
    """Make the vertical axis logarithmic if a linear one would show these losses as a flat line."""
    from matplotlib.ticker import NullFormatter

    if len(losses) and losses.min() > 0 and losses.max() > 30 * losses.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda loss, _: f"{loss:,g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def metric_names(rows: Sequence[Mapping[str, int | float]]) -> list[str]:
    """Return the names of the validation metrics (`eval.metrics`), in the order of their columns `val_NAME`."""
    keys = dict.fromkeys(key for row in rows for key in row if key.startswith("val_") and key != "val_loss")
    return [key.removeprefix("val_") for key in keys]


def draw_metrics(rows: Sequence[Mapping[str, int | float]], names: Sequence[str]) -> "matplotlib.figure.Figure":
    """Draw each of at least one validation metric in a panel of its own, because their units differ, two panels side by side.

    Values that are not finite are left out. If there are very many, only the highest and the lowest value of each interval are drawn.
    """
    from matplotlib.figure import Figure

    columns = min(len(names), 2)
    lines = math.ceil(len(names) / columns)
    figure = Figure(figsize=(5.8, 0.2 + (2.9 if columns == 1 else 2.1) * lines), dpi=220, layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).reshape(-1)
    for axes, name in itertools.zip_longest(panels, names):
        if name is None:
            axes.remove()
            continue
        steps, values = finite(rows, f"val_{name}")
        shown = extremes(values, _MOST_POINTS // 2)
        marker = "o" if len(values) <= _MOST_VALIDATIONS else ""
        axes.plot(steps[shown], values[shown], color=_VALIDATION, linewidth=1.2, marker=marker, markersize=4, mec="white")
        if len(values):
            text, point = f"{values[-1]:.4g}", (float(steps[-1]), float(values[-1]))
            style: dict[str, Any] = {"bbox": _BEHIND_TEXT, "xytext": (0, 7)}
            axes.annotate(text, point, textcoords="offset points", ha="right", color=_VALIDATION, fontsize=9, weight="bold", **style)
        _show_steps(axes, steps, ticks=5)
        axes.margins(y=0.2)
        axes.set_title(shortened(name, _LONGEST_NAME), fontsize=10, loc="left", parse_math=False)
        dress(axes, "")
    return figure


def _show_steps(axes: "matplotlib.axes.Axes", steps: Int64[np.ndarray, " n"], ticks: int) -> None:
    """Make the horizontal axis of a panel show steps, also if there is only one."""
    from matplotlib.ticker import MaxNLocator

    if len(steps) == 1:
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=ticks, integer=True))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")


def dress(axes: "matplotlib.axes.Axes", label: str, along: str = "step", size: float = 10) -> None:
    """Set the labels and the style of a panel."""
    axes.set_xlabel(along, fontsize=size)
    axes.set_ylabel(label, fontsize=size, parse_math=False)
    axes.tick_params(labelsize=max(size - 0.5, 9.5), length=3, color="#888888")
    axes.grid(color="#EBEBEB", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#888888")


def logs_every_batch(rows: Sequence[Mapping[str, int | float]]) -> bool:
    """Return whether every step up to the last has a training loss."""
    steps = [row["step"] for row in rows if "loss" in row]
    return all(later == step + 1 for step, later in itertools.pairwise(steps))


def finite(rows: Sequence[Mapping[str, int | float]], name: str) -> tuple[Int64[np.ndarray, " n"], Float64[np.ndarray, " n"]]:
    """Return the steps that have a finite value of `name`, and the values."""
    pairs = [(row["step"], row[name]) for row in rows if name in row and np.isfinite(row[name])]
    return np.array([step for step, _ in pairs], np.int64), np.array([value for _, value in pairs], np.float64)


def running_mean(values: Float64[np.ndarray, " n"], width: int) -> Float64[np.ndarray, " n"]:
    """Return the running mean over about `width` values.

    At the beginning, where a loss falls fast, the mean covers fewer values. Towards the end each mean still covers the `width` // 2 values
    before its own value, but fewer values after it.
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    indices = np.arange(len(values))
    half = np.minimum(indices, width // 2)
    first, last = indices - half, np.minimum(indices + half + 1, len(values))
    return np.asarray((sums[last] - sums[first]) / (last - first))


def extremes(values: Float64[np.ndarray, " n"], intervals: int) -> Int64[np.ndarray, " m"]:
    """Return the indices of the values to draw: all values, or the lowest and the highest value of each interval and the last value."""
    indices = np.arange(len(values))
    if len(values) <= 2 * intervals:
        return indices
    chosen = {len(values) - 1}
    for interval in np.array_split(indices, intervals):
        chosen |= {int(interval[np.argmin(values[interval])]), int(interval[np.argmax(values[interval])])}
    return np.array(sorted(chosen), np.int64)
