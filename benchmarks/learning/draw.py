"""Draw the pictures of the study: curves of the best recipes, and the last losses of all of them."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.grid import Row
from benchmarks.learning.report import Recipe, best, best_flush, best_recipes
from docs import style

COLOURS = {
    "flush": style.BLACK,
    "2BW": style.BLUE,
    "PipeDream m = d": style.GREEN,
    "PipeDream m = 1": style.ORANGE,
}
AGREEMENTS = {
    "data parallelism": (style.BLACK, "-"),
    "every 10": (style.BLUE, "-"),
    "every 50": (style.GREEN, "-"),
    "every 200": (style.ORANGE, "-"),
    "every 10, means": (style.BLUE, "--"),
    "every 50, means": (style.GREEN, "--"),
    "every 50, means, 25 late": (style.GREEN, ":"),
    "every 200, means": (style.ORANGE, "--"),
}
OPTIMIZERS = ("Adam", "Muon")


@style.styled()
def draw_all(rows: Sequence[Row], folder: Path) -> None:
    """Write learning-loss.svg, curves of the best recipes, and learning-remedies.svg, the last losses of all recipes.

    Args:
        rows: of the study.
        folder: of the pictures.
    """
    parts = [part for part in dict.fromkeys((row.task, row.d, row.optimizer) for row in rows) if part[2] in OPTIMIZERS]
    shown = [(f"{task}, {d} stages, {optimizer}", best_recipes(rows, task, d, optimizer)) for task, d, optimizer in parts]
    if shown:
        style.write(_curves(shown), folder / "learning-loss.svg")
        style.write(_remedies([part for part in shown if " 4 " in part[0]] or shown), folder / "learning-remedies.svg")


def _curves(parts: Sequence[tuple[str, list[Recipe]]]) -> Any:
    figure = style.figure(1.3 + 2.5 * len(parts))
    panels = figure.subplots(len(parts), 1, squeeze=False)[:, 0]
    lines: dict[str, Any] = {}
    for axes, (title, recipes) in zip(panels, parts, strict=True):
        for schedule, colour in COLOURS.items():
            of_schedule = [recipe for recipe in recipes if recipe.schedule == schedule]
            if not of_schedule:
                continue
            for recipe in of_schedule:
                if recipe.remedy == "none":
                    draw_curve(axes, recipe, colour, "--")
            lines[schedule] = draw_curve(axes, best(of_schedule), colour, "-")
        axes.set_title(title)
        top = best_flush(recipes).mean_curve
        axes.set_ylim(top[-1] - 0.05, top[len(top) // 6] + 0.35)
        axes.set_ylabel("held-out loss")
        axes.grid()
    panels[-1].set_xlabel("updates")
    for label, dashes in (("without a remedy", "--"), ("with the best remedy", "-")):
        (lines[label],) = panels[0].plot([], [], dashes, color=style.GREY)
    style.share_legend(figure, lines, 2)
    return figure


def draw_curve(axes: Any, recipe: Recipe, colour: str, dashes: str) -> Any:
    """Draw the mean loss of a recipe over the updates, and the range of its seeds.

    Args:
        axes: the panel.
        recipe: with its losses.
        colour: of the line.
        dashes: of the line, as in `plot`.

    Returns:
        The line.
    """
    positions = [recipe.every * (i + 1) for i in range(len(recipe.mean_curve))]
    (line,) = axes.plot(positions, recipe.mean_curve, dashes, color=colour)
    values = list(zip(*recipe.curves, strict=True))
    axes.fill_between(positions, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.12, linewidth=0)
    return line


def _remedies(parts: Sequence[tuple[str, list[Recipe]]]) -> Any:
    parts = [(title, [one for one in recipes if not one.is_control and "0.99" not in one.remedy]) for title, recipes in parts]
    rows = [len(recipes) + len({recipe.schedule for recipe in recipes}) for _, recipes in parts]
    figure = style.figure(0.9 * len(parts) + 0.21 * sum(rows))
    panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=rows)[:, 0]
    for axes, (title, recipes) in zip(panels, parts, strict=True):
        labels: list[str] = []
        for schedule in dict.fromkeys(recipe.schedule for recipe in recipes):
            labels.append(schedule)
            colour = COLOURS.get(schedule, style.GREY)
            for recipe in recipes:
                if recipe.schedule == schedule:
                    axes.plot(recipe.losses, [len(labels)] * len(recipe.losses), "o", color=colour, alpha=0.5, markersize=5, linewidth=0)
                    axes.plot([recipe.loss], [len(labels)], "|", color=colour, markersize=12, markeredgewidth=2.5)
                    labels.append("no remedy" if recipe.remedy == "none" else recipe.remedy)
        axes.axvline(best_flush(recipes).loss, color=COLOURS["flush"], linewidth=1, linestyle=":")
        style.label_rows(axes, labels)
        for label in axes.get_yticklabels():
            label.set_fontweight("bold" if label.get_text() in COLOURS else "normal")
        style.title(axes, title)
        axes.set_xlabel("last held-out loss (nats per byte)")
    return figure


@style.styled()
def draw_agreements(rows: Sequence[Row], folder: Path) -> None:
    """Write learning-agree.svg: curves of data parallelism and of pipelines that agree rarely, a panel for each number of updates.

    Args:
        rows: of the study of agreement.
        folder: of the pictures.
    """
    tasks = list(dict.fromkeys((row.task, row.d) for row in rows if row.remedy == "every 50, means"))
    if not tasks:
        return
    figure = style.figure(1.6 + 2.5 * len(tasks))
    panels = figure.subplots(len(tasks), 1, squeeze=False)[:, 0]
    lines: dict[str, Any] = {}
    for axes, (task, d) in zip(panels, tasks, strict=True):
        recipes = {
            recipe.remedy: recipe for recipe in best_recipes(rows, task, d, "Adam") if recipe.schedule in ("exact sums", "agreement")
        }
        for name, (colour, dashes) in AGREEMENTS.items():
            if name in recipes:
                lines[name] = draw_curve(axes, recipes[name], colour, dashes)
        top = next(iter(recipes.values())).mean_curve
        axes.set_ylim(top[-1] - 0.05, top[len(top) // 6] + 0.35)
        axes.set_title(textwrap.fill(task, 40))
        axes.set_ylabel("held-out loss")
        axes.grid()
    panels[-1].set_xlabel("updates")
    style.share_legend(figure, lines, 2)
    style.write(figure, folder / "learning-agree.svg")
