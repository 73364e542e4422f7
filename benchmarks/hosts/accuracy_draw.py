"""Draw time to accuracy: validation loss over the seconds of training, a panel for each model and number of hosts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOOKS = {"data parallelism": ("#D55E00", "--"), "pipeline": ("#0072B2", "-")}  # distinguishable for colour-blind readers


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the picture.

    Args:
        runs: as `benchmarks.hosts.accuracy` writes them to JSON.
        path: of the picture, PNG.
    """
    from matplotlib.figure import Figure

    tasks, counts = list(dict.fromkeys(run["task"] for run in runs)), sorted({run["hosts"] for run in runs})
    figure = Figure(figsize=(4.2 * len(tasks), 3.2 * len(counts) + 0.5), layout="constrained")
    panels = figure.subplots(len(counts), len(tasks), squeeze=False)
    for row, hosts in zip(panels, counts, strict=True):
        for axes, task in zip(row, tasks, strict=True):
            if panel := [run for run in runs if (run["task"], run["hosts"]) == (task, hosts)]:
                _panel(axes, panel)
            else:
                axes.set_visible(False)
    named = {label: line for axes in panels.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    labels = [*LOOKS, "target"]
    figure.legend([named[label] for label in labels], labels, loc="outside upper left", ncols=len(labels), frameon=False, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _panel(axes: Any, runs: Sequence[Mapping[str, Any]]) -> None:
    for run in runs:
        colour, dashes = LOOKS[run["kind"]]
        curve = run["curve"]
        axes.plot([at["seconds"] for at in curve], [at["loss"] for at in curve], dashes, color=colour, label=run["kind"], linewidth=1.8)
        axes.plot(curve[-1]["seconds"], curve[-1]["loss"], "o", color=colour, markersize=5)
    axes.axhline(runs[0]["target"], color="#1A1A1A", linewidth=0.9, linestyle=":", label="target")
    axes.set_title(f"{runs[0]['task']}, {runs[0]['hosts']} hosts, {runs[0]['rate'] / 1e6:g} Mbit/s", loc="left", fontsize=10)
    axes.set_xlabel("seconds of training", fontsize=9)
    axes.set_ylabel("validation loss (nats)", fontsize=9)
    axes.set_xlim(left=0)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
