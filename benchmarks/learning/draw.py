"""Draw the pictures of docs/learning.md: the mean over the seeds as a line, their range as an area."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

LOOKS = {  # distinguishable for colour-blind readers
    "plain": ("#1A1A1A", "-"),
    "2BW": ("#0072B2", "--"),
    "PipeDream": ("#009E73", "-"),
    "PipeDream without stashing": ("#D55E00", "--"),
    "PipeDream, vertical sync": ("#CC79A7", "-."),
}
TASKS = {"gpt": "byte GPT", "digits": "digits"}
AXES = {
    "loss": "loss on held-out data (nats)",
    "accuracy": "accuracy on held-out images",
    "steps": "step (updates)",
    "time": "predicted time (1: one stage's forward and backward of a batch)",
}


def draw_all(settings: Sequence[Mapping[str, Any]], folder: pathlib.Path) -> None:
    """Write learning-loss.png, learning-time.png and learning-accuracy.png.

    Args:
        settings: results as `benchmarks.learning` writes them to JSON.
        folder: of the pictures.
    """
    folder.mkdir(exist_ok=True)
    digits = [setting for setting in settings if setting["task"] == "digits"]
    pictures = {"loss": (settings, "steps", "loss"), "time": (settings, "time", "loss"), "accuracy": (digits, "steps", "accuracy")}
    for name, (shown, across, up) in pictures.items():
        if shown:
            _figure(shown, across, up).savefig(folder / f"learning-{name}.png", dpi=110)


def _figure(settings: Sequence[Mapping[str, Any]], across: str, up: str) -> Any:
    from matplotlib.figure import Figure

    rows = (len(settings) + 1) // 2
    figure = Figure(figsize=(11, 3.5 * rows + 0.6), layout="constrained")
    panels = list(figure.subplots(rows, 2, squeeze=False).flat)
    for axes, setting in zip(panels, settings, strict=False):
        _draw(axes, setting, across, up)
    for axes in panels[len(settings) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def _draw(axes: Any, setting: Mapping[str, Any], across: str, up: str) -> None:
    for name, variant in setting["variants"].items():
        curves, (colour, dashes) = variant["runs"], LOOKS[name]
        positions = [step * (variant["step_time"] if across == "time" else 1) for step in curves[0]["steps"]]
        values = list(zip(*(curve[up] for curve in curves), strict=True))
        axes.plot(positions, [sum(v) / len(v) for v in values], dashes, color=colour, label=name, linewidth=1.6)
        axes.fill_between(positions, [min(v) for v in values], [max(v) for v in values], color=colour, alpha=0.15, linewidth=0)
    title = f"{TASKS[setting['task']]}, {setting['stages']} stages, learning rate {setting['learning_rate']:g}"
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(AXES[across], fontsize=9)
    axes.set_ylabel(AXES[up], fontsize=9)
    axes.set_xlim(left=0)
    if up == "loss" and setting["task"] == "digits":
        axes.set_ylim(0, 2.6)  # a run that diverges leaves the panel
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
