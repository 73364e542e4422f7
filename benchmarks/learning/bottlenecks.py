"""`python -m benchmarks.learning.bottlenecks`: what narrow cuts cost, beside rounded messages, at equal updates and on links of 100 Mbit/s.

The byte GPT of four blocks, in four stages that flush. Every run is a program of its own, some minutes on one core.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np
import optax

import jpipe
from benchmarks.learning import results
from benchmarks.learning.agree import Setting
from benchmarks.learning.emulation import Emulation, warm_up_and_cosine
from benchmarks.learning.exchange import Pipelines
from benchmarks.learning.grid import OPTIMIZERS, Row, Variant, batches_of_run, initial, stages_of
from benchmarks.learning.tasks import Task, make_gpt
from benchmarks.machine import describe
from benchmarks.papers.document import Table
from jpipe import InputError, files, keep_freed_memory
from jpipe.model import with_added_layers

D, WIDTH, UPDATES, EVERY, MICROBATCHES = 4, 128, 600, 50, 8
RESULTS = Path(__file__).parent / "bottlenecks-cpu.json"  # for the documentation
RATES = {"Adam": 4e-3, "Muon": 6e-3}
LINK = jpipe.Link(100e6 / 8, 1e-3)


@dataclass(frozen=True)
class Cut:
    """What becomes of the messages: `kind` as in `jpipe.plan.Links`, and the features that are left of them; None: all."""

    name: str
    kind: str | None = None
    width: int | None = None

    def plan(self, task: Task, microbatches: int = MICROBATCHES) -> jpipe.Plan:
        """Return a plan of the task with such messages."""
        bottleneck = None if self.width is None else {"width": self.width}
        links = {"activations": self.kind, "gradients": self.kind, "bottleneck": bottleneck}
        stages = tuple(jpipe.Stage(layers=layers) for layers in stages_of(task, D))
        return jpipe.Plan(schedule="pipedream_flush", microbatches=microbatches, stages=stages, links=links)


CUTS = (
    Cut("float32"),
    Cut("int8", "int8"),
    Cut("fp8", "fp8"),
    Cut("bottleneck of 1/16", width=WIDTH // 16),
    Cut("bottleneck of 1/64", width=WIDTH // 64),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what the results lack, or read results, and print the tables.

    Args:
        arguments: of the command line, by default of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning.bottlenecks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--optimizers", nargs="+", default=[*RATES], choices=[*RATES], help="default: all")
    names = [cut.name for cut in CUTS]
    parser.add_argument("--cuts", nargs="+", default=names, choices=names, metavar="NAME", help=f"only these: {'; '.join(names)}")
    parser.add_argument("--seeds", type=int, default=1, help="default: %(default)s")
    results.add_options(parser, str(RESULTS))
    options = parser.parse_args(arguments)
    try:
        if options.from_json is None:
            _run(options)
        path = options.from_json or options.json
        rows, traffic = results.read(path)[0], json.loads(path.read_text(encoding="utf-8"))["traffic"]
    except InputError as error:
        sys.exit(f"bench-learning: {error}")
    results.show(tables(rows, traffic), options.documents)


def _run(options: argparse.Namespace) -> None:
    rows, task = results.read(options.json)[0] if options.json.exists() else list[Row](), make_gpt(D, WIDTH)
    facts = {"machine": describe(), "traffic": {cut.name: traffic_of(task, cut) for cut in CUTS}}
    for seed in range(options.seeds):
        for cut, optimizer in ((cut, optimizer) for optimizer in options.optimizers for cut in CUTS):
            if cut.name in options.cuts and not any((row.remedy, row.optimizer, row.seed) == (cut.name, optimizer, seed) for row in rows):
                began = time.monotonic()
                rows.append(run(cut, optimizer, seed))
                files.write_atomically(options.json, json.dumps({"rows": [asdict(row) for row in rows], **facts}) + "\n")
                print(f"{cut.name}, {optimizer}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def run(cut: Cut, optimizer: str, seed: int, updates: int = UPDATES, every: int = EVERY) -> Row:
    """Train once, and return the held-out losses."""
    task = make_gpt(D, WIDTH)
    stack, plan = with_added_layers(task.stack, cut.plan(task))
    task, stages, rule = dataclasses.replace(task, stack=stack), [stage.layers for stage in plan.stages], OPTIMIZERS[optimizer]
    emulation = Emulation(stack, stages, task.loss, rule.rule, warm_up_and_cosine(updates), updates // 4, 1, task.clip)
    recipe = Variant("flush").recipe(seed, RATES[optimizer], rule.momentum, D, 1)
    pipeline = Pipelines(emulation, 1, rounds=cut.kind is not None, draws=False)
    exchange, data = Setting("", "", messages=cut.kind).exchange(D), batches_of_run(task, seed, updates // every, every)
    losses = np.asarray(jax.jit(pipeline.train)(recipe, exchange, initial(task, seed), data, task.held_out)[0])
    return Row("GPT", D, optimizer, "messages", cut.name, RATES[optimizer], seed, every, [round(float(loss), 5) for loss in losses])


def tables(rows: Sequence[Row], traffic: Mapping[str, tuple[int, float]]) -> list[Table]:
    """Return a table for each optimizer: the last loss, and what an update sends as in `traffic_of`, by the name of the cut."""
    made = []
    for optimizer in dict.fromkeys(row.optimizer for row in rows):
        lasts = [[row.losses[-1] for row in rows if (row.remedy, row.optimizer) == (cut.name, optimizer)] for cut in CUTS]
        means, lines = [sum(losses) / max(len(losses), 1) for losses in lasts], []
        for cut, losses, mean in zip(CUTS, lasts, means, strict=True):
            if losses:
                (sent, seconds), above = traffic[cut.name], "–" if cut is CUTS[0] else f"{mean - means[0]:+.3f}"
                lines.append([cut.name, f"{mean:.3f}", above, f"{sent:,}", f"{seconds:.3f}"])
        head = ["messages", "loss", "above float32", "bytes of an update at a cut", "seconds of an update"]
        made.append(Table(f"GPT, {D} stages, {optimizer}, {UPDATES} updates", head, lines))
    return made


def traffic_of(task: Task, cut: Cut) -> tuple[int, float]:
    """Return the bytes that cross a cut in an update, and the seconds of an update on links of 100 Mbit/s if nothing else took time."""
    pipe = jpipe.Pipeline(task.stack, cut.plan(task), task.loss, optax.sgd(1.0))
    costs = pipe.costs(next(task.batches(0)))
    free = dict.fromkeys(("forward", "backward", "backward_input", "backward_weight", "update"), 0.0)
    program = jpipe.lower(pipe.plan, 1)
    costs = [dataclasses.replace(cost, **free) for cost in costs]
    return MICROBATCHES * (costs[0].outputs + costs[1].gradient), jpipe.simulate(program, costs, LINK).seconds


if __name__ == "__main__":
    keep_freed_memory()
    jax.config.update("jax_default_matmul_precision", "highest")
    main()
