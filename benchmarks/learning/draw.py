"""Draw the pictures of the pages about learning in docs/explanation/."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning.grid import Row
from benchmarks.learning.report import Recipe, best, best_flush, best_recipes

COLOURS = {  # distinguishable for colour-blind readers
    "flush": "#1A1A1A",
    "2BW": "#0072B2",
    "PipeDream m = d": "#009E73",
    "PipeDream m = 1": "#D55E00",
}
OPTIMIZERS = ("Adam", "Muon")


def draw_all(rows: Sequence[Row], folder: Path) -> None:
    """Write learning-loss.png, curves of the best recipes, and learning-remedies.png, the last losses of all recipes.

    Args:
        rows: of the study.
        folder: of the pictures.
    """
    folder.mkdir(exist_ok=True)
    parts = [part for part in dict.fromkeys((row.task, row.d, row.optimizer) for row in rows) if part[2] in OPTIMIZERS]
    shown = [(f"{task}, {d} stages, {optimizer}", best_recipes(rows, task, d, optimizer)) for task, d, optimizer in parts]
    if shown:
        _curves(shown).savefig(folder / "learning-loss.png", dpi=110)
        _remedies([part for part in shown if " 4 " in part[0]] or shown).savefig(folder / "learning-remedies.png", dpi=110)


def _curves(parts: Sequence[tuple[str, list[Recipe]]]) -> Any:
    from matplotlib.figure import Figure

    count = (len(parts) + 1) // 2
    figure = Figure(figsize=(11, 3.9 * count + 0.7), layout="constrained")
    panels = list(figure.subplots(count, 2, squeeze=False).flat)
    labels: dict[str, Any] = {}
    for axes, (title, recipes) in zip(panels, parts, strict=False):
        for schedule, colour in COLOURS.items():
            of_schedule = [recipe for recipe in recipes if recipe.schedule == schedule]
            if not of_schedule:
                continue
            plain = [("--", "none", recipe) for recipe in of_schedule if recipe.remedy == "none"]
            for dashes, kind, recipe in (*plain, ("-", "best remedy", best(of_schedule))):
                labels[f"{schedule}, {kind}"] = _curve(axes, recipe, colour, dashes)
        axes.set_title(title, loc="left", fontsize=10)
        top = best_flush(recipes).mean_curve
        axes.set_ylim(top[-1] - 0.05, top[len(top) // 6] + 0.35)
        _label(axes, "updates", "held-out loss (nats per byte)")
    for axes in panels[len(parts) :]:
        axes.set_visible(False)
    figure.legend(labels.values(), labels.keys(), loc="outside upper left", ncols=4, frameon=False, fontsize=9)
    return figure


def _curve(axes: Any, recipe: Recipe, colour: str, dashes: str) -> Any:
    positions = [recipe.every * (i + 1) for i in range(len(recipe.mean_curve))]
    (line,) = axes.plot(positions, recipe.mean_curve, dashes, color=colour, linewidth=1.5)
    values = list(zip(*recipe.curves, strict=True))
    axes.fill_between(positions, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.12, linewidth=0)
    return line


def _remedies(parts: Sequence[tuple[str, list[Recipe]]]) -> Any:
    from matplotlib.figure import Figure

    count = max(len(recipes) for _, recipes in parts)
    figure = Figure(figsize=(11, 0.26 * count + 1.2), layout="constrained")
    panels = list(figure.subplots(1, len(parts), squeeze=False).flat)
    for axes, (title, recipes) in zip(panels, parts, strict=True):
        recipes = [recipe for recipe in recipes if not recipe.is_control and "0.99" not in recipe.remedy]
        for i, recipe in enumerate(recipes):
            colour = COLOURS.get(recipe.schedule, "#777777")
            axes.plot(recipe.losses, [i] * len(recipe.losses), ".", color=colour, alpha=0.5)
            axes.plot([recipe.loss], [i], "|", color=colour, markersize=12, markeredgewidth=2)
        axes.axvline(best_flush(recipes).loss, color=COLOURS["flush"], linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(recipes)), [f"{recipe.schedule}: {recipe.remedy}" for recipe in recipes])
        axes.invert_yaxis()
        axes.set_title(title, loc="left", fontsize=10)
        _label(axes, "last held-out loss (nats per byte)", "")
    return figure


def _label(axes: Any, across: str, up: str) -> None:
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(up, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
