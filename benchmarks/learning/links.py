"""`python -m benchmarks.learning.links`: train a GPT to one held-out loss over two hosts, with links of 100 Mbit/s and of 1 Gbit/s.

A host is a network namespace with a process pinned to one core. It needs root, and ten minutes of two quiet cores. The time of validation
is not counted.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import optax
from matplotlib.figure import Figure

import jpipe
from benchmarks.hosts.accuracy_program import Trainer
from benchmarks.hosts.network import Network, NoNetwork
from benchmarks.learning.emulation import warm_up_and_cosine
from benchmarks.learning.tasks import make_gpt
from benchmarks.machine import describe
from benchmarks.papers.document import Table
from benchmarks.programs import Program, ProgramFailed, python_module
from benchmarks.serve import serve
from docs import style

HOSTS, DEPTH, WIDTH, MICROBATCHES, EVERY, MOST, TARGET = 2, 4, 128, 4, 10, 300, 2.2
RESULTS, PICTURE = Path(__file__).parent / "links-cpu.json", "time-to-loss.svg"
RATES = (1e8, 1e9)  # bits per second
REPLICAS = {"num_stages": 1, "replicas": HOSTS}
INT8 = {"activations": "int8", "gradients": "int8"}
MEANS = {"learning_rate": 1.0, "momentum": 0.0}
RECIPES: dict[str, dict[str, Any]] = {
    "data parallelism": REPLICAS,
    "data parallelism, int8": {**REPLICAS, "links": {"sums": "int8"}},
    "agreement every 10, 4 bits": {**REPLICAS, "agree": {"every": 10, "bits": 4, "outer": MEANS}},
    "flush": {},
    "flush, int8": {"links": INT8},
    "PipeDream": {"schedule": "pipedream"},
    "PipeDream, int8": {"schedule": "pipedream", "links": INT8},
}
"""By name: arguments of `jpipe.Plan.even`."""
LOOKS = {"data parallelism": style.ORANGE, "agreement": style.PURPLE, "flush": style.BLACK, "PipeDream": style.GREEN}
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all recipes, or read results; print the table, and draw.

    Args:
        arguments: of the command line, by default of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning.links", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=RESULTS, help="default: %(default)s")
    names = {"nargs": "*", "default": [*RECIPES], "choices": [*RECIPES], "metavar": "NAME"}
    parser.add_argument("--recipes", **names, help="measure only these, beside what the file has; none: only read it")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help=f"write {PICTURE} there")
    options = parser.parse_args(arguments)
    earlier = json.loads(options.json.read_text(encoding="utf-8"))["runs"] if options.json.exists() else []
    runs: list[dict[str, Any]] = [run for run in earlier if run["recipe"] not in options.recipes]
    try:
        for run in measure(options.recipes) if options.recipes else ():
            runs = sorted([*runs, run], key=lambda run: [*RECIPES].index(run["recipe"]))
            options.json.write_text(json.dumps({"target": TARGET, "runs": runs, "machine": describe()}) + "\n", encoding="utf-8")
            print(f"… {run['recipe']}, {run['rate']:g} bit/s: {run['curve'][-1]}", file=sys.stderr, flush=True)
    except (NoNetwork, ProgramFailed) as error:
        print(f"bench-learning: {error}", file=sys.stderr)
        return 2
    print(table(runs).text, end="")
    if options.pictures:
        style.write(draw(runs), options.pictures / PICTURE)
    return 0


def measure(recipes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Train by each recipe at each rate to the target, and yield the runs.

    Raises:
        NoNetwork, ProgramFailed: it cannot continue.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the namespaces are removed, too
    cores = sorted(os.sched_getaffinity(0))
    with Network(HOSTS) as network:
        for recipe in recipes:
            network.limit(None)
            command = python_module("benchmarks.learning.links", recipe)
            commands = [network.command(host, [*command, str(host), f"{network.address(0)}:29500"]) for host in network.hosts]
            with Program(recipe, commands, [cores[host % len(cores)] for host in network.hosts], ENVIRONMENT) as program:
                program.facts()
                for rate in RATES:
                    network.limit(rate)
                    yield {"recipe": recipe, "rate": rate, **_train(program)}


def _train(program: Program) -> dict[str, Any]:
    """Train to the target, from fresh weights."""
    program.ask("0")
    seconds, sent, curve = 0.0, 0, list[tuple[int, float, float]]()
    while len(curve) * EVERY < MOST and not (curve and curve[-1][2] <= TARGET):
        answers = program.ask(str(EVERY))
        seconds += max(answer["seconds"] for answer in answers)
        sent += max(answer["sent_bytes"] for answer in answers)
        curve.append(((len(curve) + 1) * EVERY, round(seconds, 3), round(answers[0]["val_loss"], 5)))
    return {"sent_bytes": sent, "curve": curve}


def run_host(recipe: str, process: int, coordinator: str) -> None:
    """Train when standard input asks for it.

    Args:
        recipe: a key of `RECIPES`.
        process: number of this host.
        coordinator: address of the first one.
    """
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, HOSTS, process)
    trainer = make_trainer(recipe)
    trainer(EVERY)  # warm
    serve(lambda steps: trainer(steps) if steps else trainer.restart())


def make_trainer(recipe: str) -> Trainer:
    """Return a trainer of the study's GPT by Muon, with the recipe of the documentation if nothing flushes."""
    task, arguments = make_gpt(DEPTH, WIDTH), {"num_stages": HOSTS, "schedule": "pipedream_flush", **RECIPES[recipe]}
    plan = jpipe.Plan.even(task.stack.ids, microbatches=MICROBATCHES, **arguments)
    late: Mapping[str, Any] = {"clip_stage_norm": 1.0, "delay_correction": "predict"}
    factor = warm_up_and_cosine(MOST)
    rates = {"learning_rate": lambda t: 0.03 * factor(t), "adam_learning_rate": lambda t: 6e-3 * factor(t)}
    optimizer = optax.contrib.muon(**rates, weight_decay=0.01, adam_b2=0.95, adam_weight_decay=0.01)
    pipe = jpipe.Pipeline(task.stack, plan, task.loss, optimizer, **(late if plan.schedule == "pipedream" else {"clip_global_norm": 1.0}))
    source = task.batches(0)
    batches = [next(source) for _ in range(MOST + EVERY)]
    held_out = [jax.tree.map(lambda a, i=i: a[i : i + 16], task.held_out) for i in range(0, 64, 16)]
    return Trainer(pipe, batches, held_out, 0)


def table(runs: Sequence[Mapping[str, Any]]) -> Table:
    """Return a row for each recipe: updates, what a host sends for each of them, and the seconds at each rate."""
    by = {(run["recipe"], run["rate"]): run for run in runs}
    rows = []
    for recipe in dict.fromkeys(run["recipe"] for run in runs):
        first = by[recipe, RATES[0]]
        updates = first["curve"][-1][0]
        seconds = [f"{by[recipe, rate]['curve'][-1][1]:.1f}" if (recipe, rate) in by else "" for rate in RATES]
        reached = "" if first["curve"][-1][2] <= TARGET else " (not reached)"
        rows.append([recipe, f"{updates}{reached}", f"{first['sent_bytes'] / updates / 1e6:.2f}", *seconds])
    return Table("time to a loss", ["recipe", "updates", "MB for an update", *(f"seconds, {_named(rate)}" for rate in RATES)], rows)


@style.styled()
def draw(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw a panel for each rate: the seconds of each recipe until the target."""
    figure = style.figure(6.6)
    for axes, rate in zip(figure.subplots(len(RATES), 1), RATES, strict=True):
        seconds = {run["recipe"]: run["curve"][-1][1] for run in runs if run["rate"] == rate}
        colours = [next(colour for name, colour in LOOKS.items() if recipe.startswith(name)) for recipe in seconds]
        bars = axes.barh(range(len(seconds)), seconds.values(), 0.6, color=colours)
        axes.bar_label(bars, [f"{value:.0f}" for value in seconds.values()], padding=4)
        style.label_rows(axes, [*seconds])
        axes.set_xlim(0, 1.1 * max(seconds.values(), default=1))
        style.title(axes, f"Seconds to a loss of {TARGET} nats, links of {_named(rate)}")
    return figure


def _named(rate: float) -> str:
    return f"{rate / 1e6:g} Mbit/s" if rate < 1e9 else f"{rate / 1e9:g} Gbit/s"


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in RECIPES:
        run_host(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main())
