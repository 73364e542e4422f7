"""Pictures of plans: predicted throughput against memory, and the balance of the chosen plan's stages."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import jpipe
from jpipe.plan import repeats_forward
from jpipe_planner.cost.devices import slowed
from jpipe_planner.ranking.choose import Choice, Ranked
from jpipe_planner.ranking.table import name, rows_of, size

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

# Each schedule, in the order of the registry, has its own colour and marker. Colour-blind readers can distinguish the first eight.
_COLOURS = (
    *("#8C8C8C", "#F0A830", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#56B4E9", "#1A1A1A"),
    *("#7A3E9D", "#8B5A2B", "#A8B400", "#E6007E", "#4B7F00", "#FF8A80", "#2F3E9E", "#00B8B0"),
)
_MARKERS: tuple["str | tuple[int, Literal[0, 1, 2], int]", ...] = (
    *("v", "s", "^", "D", "o", "P", "X", "*"),
    *("<", "p", ">", (4, 1, 0), "h", "d", (6, 1, 0), (3, 1, 0)),
)
_FORWARD, _BACKWARD, _AGAIN = "#0072B2", "#F0A830", "#CC79A7"


def draw_choice(choice: Choice, plans: Iterable[Ranked], chosen: Ranked) -> "matplotlib.figure.Figure":
    """Draw throughput against memory of plans, with a ring around the chosen plan, and the time of each stage of the chosen plan.

    Example:
        ```python
        draw_choice(plans.choice, plans.tried.values(), plans.choice.ranked[0]).savefig("plans.png")
        ```

    Args:
        choice: the ranking; its limit of memory is drawn as a line.
        plans: the simulated plans; plans that do not fit are pale.
        chosen: the chosen plan.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    scatter, bars = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_plans(scatter, choice, list(plans), chosen)
    _draw_stages(bars, choice, chosen)
    figure.suptitle(f"{choice.topology.name or 'plan'}: {name(chosen.candidate)}", fontsize=11)
    return figure


def _draw_plans(axes: "matplotlib.axes.Axes", choice: Choice, plans: Sequence[Ranked], chosen: Ranked) -> None:
    from matplotlib import ticker

    limit = choice.topology.device.limit
    points: dict[tuple[str, bool], list[tuple[int, float]]] = {}
    for one in plans:
        points.setdefault((one.candidate.schedule, one.candidate.over is None), []).append((max(one.memory), one.samples_per_second))
    for number, kind in enumerate(jpipe.schedules.SCHEDULES):
        colour, mark = look(number)
        for fits in (False, True):
            if drawn := points.get((kind, fits)):
                axes.scatter(
                    [memory for memory, _ in drawn],
                    [speed for _, speed in drawn],
                    s=38 if fits else 18,
                    c=colour,
                    marker=mark,
                    alpha=0.85 if fits else 0.25,
                    linewidths=0,
                    zorder=2 if fits else 1,
                    label=kind if fits else None,
                )
    memory, speed = max(chosen.memory), chosen.samples_per_second
    axes.scatter([memory], [speed], s=180, facecolors="none", edgecolors="#1A1A1A", linewidths=1.5, label="chosen", zorder=3)
    if limit is not None:
        of = f"a {choice.topology.device.name}" if choice.topology.differing else "a device"
        axes.axvline(limit, color="#1A1A1A", linewidth=1, linestyle="--", label=f"memory of {of}")
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if high / low < 1e3 else (1,)))
    axes.xaxis.set_major_formatter(lambda value, _: size(value))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.tick_params(labelsize=8)
    axes.set_ylim(0, 1.15 * max(one.samples_per_second for one in (chosen, *plans)))  # space for the ring
    axes.set_xlabel("most memory of a device", fontsize=9)
    axes.set_ylabel("samples per second", fontsize=9)
    axes.set_title(f"{len(plans):,} simulated plans; those that do not fit are pale", loc="left", fontsize=9)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=3, frameon=False)
    axes.grid(alpha=0.3)


def look(number: int) -> tuple[str, "str | tuple[int, Literal[0, 1, 2], int]"]:
    """Return the colour and the marker of a schedule from its number in the registry. Up to 256 schedules have different pairs."""
    cycle = number // len(_COLOURS)
    return _COLOURS[number % len(_COLOURS)], _MARKERS[(number + cycle) % len(_MARKERS)]


def _draw_stages(axes: "matplotlib.axes.Axes", choice: Choice, chosen: Ranked) -> None:
    plan = choice.plan(chosen)
    profile, topology = choice.meshes.of(chosen.candidate.degrees)
    costs = slowed(plan, profile.stage_costs(plan, chosen.candidate.rows), topology)
    names = [_stage_name(s, stage) for s, stage in enumerate(plan.stages)]
    scale, unit = (1e3, "ms") if max(cost.forward + cost.backward for cost in costs) < 1 else (1.0, "s")
    shares = [scale / stage.replicas for stage in plan.stages]
    recomputed = [cost.forward if repeats_forward(stage.recompute) else 0.0 for cost, stage in zip(costs, plan.stages, strict=True)]
    parts = {
        "forward": (_FORWARD, [cost.forward for cost in costs]),
        "backward": (_BACKWARD, [cost.backward - repeated for cost, repeated in zip(costs, recomputed, strict=True)]),
        "forward again (recomputation)": (_AGAIN, recomputed),
    }
    left = [0.0] * len(names)
    for label, (colour, seconds) in parts.items():
        if any(seconds):
            widths = [value * share for value, share in zip(seconds, shares, strict=True)]
            axes.barh(range(len(names)), widths, left=left, color=colour, label=label, height=0.7)
            left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(names)), names if len(names) <= 24 else [str(s) for s in range(len(names))], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} per microbatch of {rows_of(chosen.candidate.rows)}, shared by the replicas", fontsize=9)
    axes.set_title("balance of the stages", loc="left", fontsize=9)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=3, frameon=False)


def _stage_name(s: int, stage: jpipe.Stage) -> str:
    layers = stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]} … {stage.layers[-1]}"
    return f"{s}: {layers}" + (f" × {stage.replicas}" if stage.replicas > 1 else "")
