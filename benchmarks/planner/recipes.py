"""Predict the memory and the throughput of the recipes in configs/recipes on cards that are not here."""

import argparse
import re
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal

import jpipe
from benchmarks.planner.markdown import print_table
from jpipe.context import tracing_for
from jpipe_planner import Device, Level, Topology, analyze
from jpipe_planner.cost.simulated import simulate_plan
from jpipe_planner.machine.compiling import compiling_for
from jpipe_train.assemble.build import make_plan
from jpipe_train.config import config_file
from jpipe_train.config.config import Config
from jpipe_train.console.progress import Reporter
from jpipe_train.plan.longest_rows import compiled_peak
from jpipe_train.plan.profiling import Parts

FOLDER = Path(__file__).parents[2] / "configs" / "recipes"
TOKENS = 10e6  # hours are for these
PCIE = {"name": "PCIe", "bandwidth": "8 GB/s", "latency": "20 us"}  # through the memory of the host, as consumer cards need it
NVLINK = {"name": "NVLink", "bandwidth": "300 GB/s", "latency": "5 us"}
HEAD = ("recipe", "cards", "memory", "tokens/s", "hours")


def machines(target: str, cards: int, link: dict[str, str] = PCIE, ethernet: str = "") -> Topology:
    """Return `cards` cards in one host, or in each of two hosts that Ethernet of this bandwidth joins."""
    hosts = [Level(name="Ethernet", count=2, bandwidth=ethernet, latency="50 us")] if ethernet else []
    return Topology(levels=[Level(count=cards, **link), *hosts], device=Device(target=target))


RECIPES: dict[str, dict[str, Topology]] = {
    "qwen3-0.6b-lora-24gb": {"RTX 4090": machines("rtx-4090", 1)},
    "qwen3-0.6b-lora-2x24gb": {"2 × RTX 4090": machines("rtx-4090", 2)},
    "qwen3-8b-lora-24gb": {"RTX 4090": machines("rtx-4090", 1)},
    "qwen3-8b-lora-2x24gb": {"2 × RTX 4090": machines("rtx-4090", 2)},
    "qwen3-8b-qlora-2x12gb": {"2 × RTX 3060": machines("rtx-3060", 2)},
    "qwen3-8b-full-4x80gb": {"4 × A100": machines("a100-80gb", 4, NVLINK)},
    "qwen3-30b-a3b-lora-2x2x24gb": {
        f"2 hosts with 2 × RTX 4090, {speed}": machines("rtx-4090", 2, ethernet=speed) for speed in ("1 Gbit/s", "10 Gbit/s")
    },
    "gemma-3-1b-full-2x24gb": {"2 × RTX 4090": machines("rtx-4090", 2)},
    "qwen3-8b-long-2x24gb": {"2 × RTX 4090": machines("rtx-4090", 2)},
}
"""The machines of each recipe, by the name of its file."""
OWN_ATTENTION = "gemma-3-1b-full-2x24gb", "qwen3-8b-long-2x24gb"
"""Recipes for which `model.attention: auto` takes XLA's attention or blocks on a GPU, because of heads of 256 or slices; others: cuDNN."""


def main(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Predict, print and return a row for each recipe and machine.

    Args:
        options: `recipes`: names of `RECIPES`; None: all. `whole`: compile the stages of the fullest rank, too.
    """
    rows = [row for name in options.recipes or RECIPES for row in predicted(name, options.whole)]
    print_table(HEAD, [cells(row) for row in rows])
    return rows


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a row, as the page shows them."""
    figures = f"{decimal(row['memory'])} of {decimal(row['limit'])}", f"{row['tokens_per_second']:,.0f}"
    return row["recipe"], row["cards"], *figures, f"{TOKENS / row['tokens_per_second'] / 3600:.1f}"


def changes(name: str, kind: str) -> list[str]:
    """Return the changes that the head of a recipe lists with --set after `Offline` (without a network) or `Tiny` (on a CPU)."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    listed = re.findall(rf"^# {kind}:(.*(?:\n#  .*)*)", text, re.MULTILINE)[0]
    return [word for word in listed.split() if "=" in word]


def planned(name: str, *sets: str) -> tuple[Config, Parts, jpipe.Plan]:
    """Return a recipe's config, model and plan for GPUs, with further changes of the config."""
    config = config_file.load(FOLDER / f"{name}.yaml", [*changes(name, "Offline"), *sets])
    with tracing_for("gpu"):
        parts = Parts.of(config, Reporter(1, 1, "samples", Console(quiet=True)))
    return config, parts, make_plan(config.plan, parts.stack.ids).resolved("gpu")


def held_bytes(name: str) -> int:
    """Return the most bytes that a rank of a recipe holds between its computations, which follow from shapes alone."""
    config, parts, plan = planned(name)
    costs = parts.pipeline(plan).costs(parts.rows(config.train.batch_size))
    batches = 2 * jpipe.programs.batches_until_full(plan) + 2
    return max(jpipe.simulate(jpipe.lower(plan, batches, **jpipe.programs.uses_by_costs(costs)), costs).held_bytes)


def predicted(name: str, whole: bool) -> list[dict[str, Any]]:
    """Return a row for each machine of a recipe: the bytes of the fullest rank, and tokens per second.

    Single layers are compiled for the card, as in `jpipe_planner.analyze`: seconds are their rooflines in a simulation of the plan, and the
    scratch memory of a stage follows from theirs; or, if `whole`, from the compiled forward and backward of the fullest rank's stages.
    """
    config, parts, plan = planned(name, *([] if name in OWN_ATTENTION else ["model.attention=cudnn"]))
    rows, (device, *_) = config.train.batch_size // plan.microbatches, [machine.device for machine in RECIPES[name].values()]
    compiling, policies = compiling_for(device, unlimited=True), tuple(dict.fromkeys(stage.recompute for stage in plan.stages))
    assert not compiling.missing, compiling.missing
    profile = analyze(*parts.for_profile, (rows,), device, policies=policies, **parts.profile_options)
    estimates = profile.stage_costs(plan, rows)
    found = {cards: simulate_plan(plan, estimates, machine, config.uses_global_norm) for cards, machine in RECIPES[name].items()}
    peaks = next(iter(found.values())).peak_bytes
    memory = max(peaks)
    if whole:
        with tracing_for(compiling.devices[0].platform):
            memory = compiled_peak(plan, parts, rows, max(range(len(peaks)), key=peaks.__getitem__), compiling)
    tokens = config.train.batch_size * config.model.seq_len
    return [
        {
            "recipe": name,
            "cards": cards,
            "memory": memory,
            "estimated": max(peaks),
            "held": held_bytes(name),
            "limit": int(device.limit),
            "tokens_per_second": tokens / simulated.batch_seconds,
            "bubble": simulated.bubble,
        }
        for cards, simulated in found.items()
    ]
