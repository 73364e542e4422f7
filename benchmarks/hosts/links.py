"""Throughput against the speed of the links between hosts: what a simulation says, and a table and a picture beside what was measured.

`python -m benchmarks.hosts.links RESULTS [--document FILE] [--pictures FOLDER]` makes both from what `python -m benchmarks.hosts` wrote.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from matplotlib.figure import Figure

import jpipe
from benchmarks.hosts.models import KINDS, MICROBATCHES, OF_MESSAGES, WORKLOADS, Workload, loss, make_plan
from benchmarks.papers.document import Table, write
from docs import style
from jpipe.programs import StageCost
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import layers
from jpipe_planner import Profile, Topology, analyze

RESULTS = Path(__file__).parent / "links.json"
TOPOLOGY = Path(__file__).parents[2] / "configs" / "topologies" / "dgx-h100-4.yaml"
PLACE, PICTURE, MEASURED = "tokens per second over slow links", "links.svg", "GPT"
RATES = tuple(float(rate) for rate in np.geomspace(1e8, 1e11, 13))  # bits per second
LATENCY = 0.5e-3  # seconds of a message between two hosts
HOSTS, ROWS, LENGTH = 4, 2, 1024  # of the simulated model: rows of a microbatch, tokens of a row
LOOKS = {
    "data parallel": ("data parallelism", style.BLACK, "-", "o"),
    "flush": ("flush", style.BLUE, "-", "s"),
    "PipeDream-2BW": ("2BW", style.ORANGE, "-", "x"),
    "2BW, int8 messages": ("2BW, int8 messages", style.ORANGE, "--", "D"),
    "replicas that agree every 50": ("replicas that agree every 50 updates", style.GREEN, "-", "o"),
    "replicas that agree every 50, 25 late": ("the same, applied 25 updates late", style.GREEN, "--", "D"),
}
"""By plan: its name in the picture, its colour, its line and the mark of what was measured."""


class Curves(NamedTuple):
    """What a panel shows.

    Attributes:
        title: of the panel.
        simulated: for each name of `KINDS`, (bits per second, tokens per second).
        measured: likewise.
    """

    title: str
    simulated: Mapping[str, Sequence[tuple[float, float]]]
    measured: Mapping[str, Sequence[tuple[float, float]]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, write it into a page, and draw the picture.

    Args:
        arguments: of the command line, by default those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts.links", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path, help="what python -m benchmarks.hosts wrote")
    parser.add_argument("--document", type=Path, metavar="FILE", help="put the table into this document, in place of its own")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help=f"write {PICTURE} there; by default nothing is drawn")
    options = parser.parse_args(arguments)
    try:
        runs = read(options.results)
        of_runs = table(runs)
        print(of_runs.text, end="")
        if options.document:
            write(options.document, {of_runs.name: of_runs.text})
        if options.pictures:
            style.write(draw(panels(runs)), options.pictures / PICTURE)
    except jpipe.InputError as error:
        sys.exit(f"bench-hosts: {error}")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the runs of the GPT that `python -m benchmarks.hosts` has written.

    Args:
        path: of the JSON file.

    Raises:
        jpipe.InputError: it cannot be read, or has no such run.
    """
    try:
        runs = [run for run in json.loads(path.read_text(encoding="utf-8"))["runs"] if run["workload"] == MEASURED]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise jpipe.InputError(f"'{path}': expected results of python -m benchmarks.hosts, found {error!r}") from None
    if not runs:
        raise jpipe.InputError(f"'{path}': expected runs of the workload {MEASURED}, found none; run it with --workloads {MEASURED}")
    return runs


def table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Return the measured tokens per second of each plan at each rate, and the bytes that all hosts send for an update.

    Args:
        runs: as `read` returns them.
    """
    rates = sorted({row["rate"] for run in runs for row in run["rows"] if row.get("rate")})
    lines = []
    for run in runs:
        for kind in dict.fromkeys(row["plan"] for row in run["rows"]):
            rows = {row["rate"]: row for row in run["rows"] if row["plan"] == kind and "failed" not in row}
            speeds = [f"{rows[rate]['labels_per_second']:,.0f}" if rate in rows else "not measured" for rate in rates]
            sent = [row["bytes_per_update"] for rate, row in rows.items() if rate]
            lines.append([run["hosts"], kind, *speeds, f"{sum(sent) / len(sent) / 1e3:,.0f}" if sent else ""])
    return Table(PLACE, ["hosts", "plan", *(f"tokens/s at {_speed(rate)}" for rate in rates), "kB per update"], lines)


def panels(runs: Sequence[Mapping[str, Any]]) -> list[Curves]:
    """Return the panels of the picture: the simulated one, and the measured one where two hosts were measured.

    Args:
        runs: as `read` returns them.
    """
    return [simulated_curves(), *(measured_curves(run) for run in runs if run["hosts"] == 2)]


def simulated_curves() -> Curves:
    """Return the tokens per second of a GPT of 1.2 billion parameters on four hosts with a GPU each, from an analytic profile."""
    config = ModelConfig(depth=24, width=2048, heads=16, seq_len=LENGTH, compute_dtype="bfloat16")
    large = Workload(lambda: layers.layers(config), _texts, {HOSTS: (7, 13, 19)}, {}, OF_MESSAGES)
    device = Topology.from_yaml(TOPOLOGY.read_text(encoding="utf-8"), str(TOPOLOGY), TOPOLOGY.parent).device
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32)
    profile = analyze(large.stack(), lambda rows: (tokens, tokens), loss, optax.adamw(1e-3), (ROWS,), device, policies=("none",))
    return Curves("Simulated: 1.2 B parameters, 4 hosts", _curves(large, profile, ROWS, HOSTS, 2), {})


def measured_curves(run: Mapping[str, Any]) -> Curves:
    """Return the measured and the simulated tokens per second of the small GPT on two hosts.

    Args:
        run: on two hosts.
    """
    workload, measured = WORKLOADS[MEASURED], dict[str, list[tuple[float, float]]]()
    for row in run["rows"]:
        if row["plan"] in LOOKS and row.get("rate"):
            measured.setdefault(row["plan"], []).append((row["rate"], row["labels_per_second"]))
    curves = _curves(workload, Profile.from_json(run["profile"]), 1, 2, 4)
    return Curves("Measured: 3.2 M parameters, 2 hosts", curves, measured)


def _curves(workload: Workload, profile: Profile, rows: int, hosts: int, itemsize: int) -> dict[str, list[tuple[float, float]]]:
    tokens = MICROBATCHES * rows * workload.batch()[1].shape[1]
    curves = {}
    for kind in LOOKS:
        plan = make_plan(workload, kind, hosts)
        costs = stage_costs(plan, profile, rows, itemsize)
        curves[kind] = [(rate, tokens / seconds_per_update(plan, costs, rate, KINDS[kind].every)) for rate in RATES]
    return curves


def stage_costs(plan: jpipe.Plan, profile: Profile, rows: int, itemsize: int) -> tuple[StageCost, ...]:
    """Return the costs of the stages of a plan, with the bytes of its messages as `plan.links` compresses them.

    Args:
        plan: the plan.
        profile: of its layers.
        rows: of a microbatch.
        itemsize: the bytes of an activation. `Profile.stage_costs` counts compressed ones as if they had four.
    """
    costs = profile.stage_costs(plan.model_copy(update={"links": None}), rows)
    if plan.links is None:
        return costs
    sent = partial(_compressed, plan.links, itemsize)
    return tuple(
        dataclasses.replace(
            cost,
            inputs=sent("activations", cost.inputs) if s else cost.inputs,
            outputs=sent("activations", cost.outputs),
            message=sent("gradients", cost.message),
            gradient=sent("gradients", cost.gradient),
        )
        for s, cost in enumerate(costs)
    )


def seconds_per_update(plan: jpipe.Plan, costs: Sequence[StageCost], rate: float, every: int = 1) -> float:
    """Return the seconds of an update in steady state.

    Args:
        plan: the plan, with a worker on each host.
        costs: of its stages.
        rate: of each host's link in each direction, bits per second.
        every: updates from one agreement of replicas to the next.
    """

    def link(source: int, target: int) -> jpipe.Link:
        return jpipe.Link(rate / 8, LATENCY, (("out", source), ("in", target)))

    count = max(every, 8)
    once, twice = (jpipe.simulate(jpipe.lower(plan, n), costs, link, brief=True).seconds for n in (count, 2 * count))
    return (twice - once) / count


def _compressed(links: jpipe.plan.Links, itemsize: int, message: Literal["activations", "gradients"], size: int) -> int:
    return links.compressed_bytes(message, size * 4 // itemsize)


@style.styled()
def draw(panels: Sequence[Curves]) -> Figure:
    """Draw tokens per second against the speed of the links, a panel for each of the models.

    Args:
        panels: from top to bottom.
    """
    figure = style.figure(2.2 + 3.0 * len(panels))
    lines: dict[str, Any] = {}
    for axes, curves in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels, strict=True):
        for kind, (label, colour, dashes, mark) in LOOKS.items():
            look = {"color": colour, "markersize": 7, "fillstyle": "none", "markeredgewidth": 1.6}
            if kind in curves.simulated:
                axes.plot(*_gigabits(curves.simulated[kind]), dashes, color=colour)
                (lines[label],) = axes.plot([], [], dashes, marker=mark, **look)
            if kind in curves.measured:
                axes.plot(*_gigabits(curves.measured[kind]), mark, zorder=3, **look)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
        axes.set_xticks([], minor=True)
        axes.set_ylabel("tokens per second")
        axes.set_xlabel("speed of each link (Gbit/s)")
        axes.grid()
        style.title(axes, curves.title)
    note = "Lines are simulated, marks were measured. Marks below\ntheir line: computations took longer than in the profile."
    figure.supxlabel(note, x=0.01, ha="left", fontsize=style.TEXT)
    style.share_legend(figure, lines, 1)
    return figure


def _gigabits(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [rate / 1e9 for rate, _ in points], [tokens for _, tokens in points]


def _texts() -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros((ROWS * MICROBATCHES, LENGTH), np.int32)
    return tokens, tokens


def _speed(rate: float) -> str:
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


if __name__ == "__main__":
    main()
