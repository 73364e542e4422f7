"""`python -m benchmarks.learning.agree`: four pipelines that sum their gradients, agree rarely, or send fewer bits, at equal updates.

The byte GPT with four stages and Adam. All runs of a part are one program, on one device; a part takes a minute or two on a large GPU.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from benchmarks.learning import results
from benchmarks.learning.emulation import Emulation, Recipe, warm_up_and_cosine
from benchmarks.learning.exchange import Exchange, Pipelines, format_of
from benchmarks.learning.grid import OPTIMIZERS, Row, Variant, batches_of_run, initial, stacked, stages_of
from benchmarks.learning.report import Recipe as Measured
from benchmarks.learning.report import recipes_by_rate
from benchmarks.learning.tasks import make_gpt
from benchmarks.machine import describe
from benchmarks.papers.document import Table
from jpipe import InputError, files, keep_freed_memory
from jpipe.plan import Agreement, OuterOptimizer

Tree = Any

W, OPTIMIZER, SEEDS, EVERY = 4, "Adam", 3, 50  # EVERY: updates between two evaluations
RESULTS = Path(__file__).parent / "agree-cpu.json"  # those of the documentation
AT_ONCE, SECONDS = 50, 190.0
SUMMED, AGREED, MESSAGES, SUMS, BOTH = "exact sums", "agreement", "rounded messages", "rounded sums", "rounded messages and sums"
PLAIN, NESTEROV, TWO_BW = Variant("flush"), Variant("flush", nesterov=1.0), Variant("2BW", nesterov=1.0)
FAMILIES = {PLAIN: "Adam", NESTEROV: "Adam, Nesterov", TWO_BW: "2BW, Adam, Nesterov"}


@dataclass(frozen=True)
class Setting:
    """What the pipelines of a run exchange.

    Attributes:
        group: which of the questions of the study it answers.
        name: in tables.
        variant: the schedule of each pipeline.
        agree: when they agree; None: gradients are summed for each update.
        messages: how activations and their gradients are rounded.
        sums: how the gradients of each pipeline are rounded before they are summed.
        stochastic: whether they are rounded up or down at random.
        feedback: whether what rounding a gradient has lost is added to the next one.
        rates: the learning rates that are tried; an outer optimizer with momentum needs smaller ones.
    """

    group: str
    name: str
    variant: Variant = PLAIN
    agree: Agreement | None = None
    messages: str | None = None
    sums: str | None = None
    stochastic: bool = False
    feedback: bool = True
    rates: tuple[float, ...] = (2e-3, 4e-3, 6e-3)

    @property
    def bits(self) -> Literal[4, 2] | None:
        """The bits for each value of an agreement."""
        return self.agree.bits if self.agree else None

    def recipe(self, seed: int, rate: float, d: int, optimizer: str) -> Recipe:
        """Return the run of each pipeline of d stages as arrays; without a flush each stage is clipped by its own norm."""
        recipe = self.variant.recipe(seed, rate, OPTIMIZERS[optimizer].momentum, d, 1)
        return recipe._replace(stage_clip=np.float32(self.variant.schedule != "flush"))

    def exchange(self, d: int) -> Exchange:
        """Return what pipelines of d stages exchange as arrays."""
        agree = self.agree or Agreement(every=1)
        first = [next(u for u in range(agree.every) if agree.last(s, d, u + agree.every) == u + agree.every) for s in range(d)]
        return Exchange(
            np.int32(agree.every if self.agree else 0),
            np.array(first, np.int32),
            np.float32(agree.outer.learning_rate),
            np.float32(agree.outer.momentum),
            np.int32(agree.delay),
            np.float32(agree.mixing if agree.delay else 0),
            format_of(self.messages, self.stochastic),
            format_of(self.messages, self.stochastic),
            format_of(self.sums, self.stochastic),
            np.float32(self.feedback),
        )


class Part(NamedTuple):
    """The runs of one program.

    Attributes:
        name: in tables.
        updates: of each run, a multiple of `EVERY`.
        settings: what is compared, data parallelism first.
        d: stages, and blocks of the GPT.
        width: of the GPT.
        pipelines: w.
        optimizer: of each pipeline, by name.
    """

    name: str
    updates: int
    settings: tuple[Setting, ...]
    d: int = 4
    width: int = 128
    pipelines: int = W
    optimizer: str = OPTIMIZER


def _agreeing(every: int, name: str, **fields: Any) -> Setting:
    return Setting(AGREED, f"every {every}{name}", agree=Agreement(every=every, **fields), rates=(5e-4, 1e-3, 2e-3, 4e-3))


def _of_means(every: int, name: str = "", **fields: Any) -> Setting:
    outer = OuterOptimizer(learning_rate=1.0, momentum=0.0)
    return replace(_agreeing(every, f", means{name}", outer=outer, **fields), rates=(2e-3, 4e-3, 6e-3))


BASE = (Setting(SUMMED, "data parallelism"),)
RARELY = tuple(_agreeing(every, "") for every in (1, 10, 50, 200))
LESS_MOMENTUM = tuple(_agreeing(every, ", momentum 0.5", outer=OuterOptimizer(momentum=0.5)) for every in (50, 200))
OF_MEANS = tuple(_of_means(every) for every in (10, 50, 200))
LATE = (
    *(_of_means(50, f", {delay} late", delay=delay) for delay in (1, 5, 25)),
    _of_means(50, ", 5 late, mixing 0", delay=5, mixing=0.0),
)
BY_STAGES = (_agreeing(50, ", stage by stage", fragments="stages"),)
OF_MESSAGES = (
    Setting(MESSAGES, "bfloat16", messages="bfloat16"),
    Setting(MESSAGES, "int8", messages="int8"),
    Setting(MESSAGES, "int8, stochastic", messages="int8", stochastic=True),
    Setting(MESSAGES, "fp8", messages="fp8"),
    Setting(MESSAGES, "fp8, stochastic", messages="fp8", stochastic=True),
)
OF_SUMS = (
    Setting(SUMS, "bfloat16", sums="bfloat16"),
    Setting(SUMS, "int8", sums="int8"),
    Setting(SUMS, "int8, no feedback", sums="int8", feedback=False),
    Setting(SUMS, "int8, stochastic, no feedback", sums="int8", stochastic=True, feedback=False),
    Setting(SUMS, "fp8", sums="fp8"),
    Setting(SUMS, "fp8, no feedback", sums="fp8", feedback=False),
)
FEW_BITS = (
    *(_of_means(every, name, bits=bits) for every in (30, 100) for name, bits in (("", None), (", 4 bits", 4), (", 2 bits", 2))),
    _of_means(50, ", 4 bits", bits=4),
)
OF_BOTH = (Setting(BOTH, "int8", messages="int8", sums="int8"),)


def _with(settings: Sequence[Setting], **fields: Any) -> tuple[Setting, ...]:
    return tuple(replace(setting, **fields) for setting in settings)


PARTS = (
    Part(
        "600 updates",
        600,
        (
            *(*BASE, *RARELY, *LESS_MOMENTUM, *OF_MEANS, *LATE, *BY_STAGES, *OF_MESSAGES, *OF_SUMS, *OF_BOTH),
            *_with((*BASE, *RARELY[2:]), variant=NESTEROV),
            *_with((*BASE, RARELY[2], OF_MESSAGES[1], *OF_BOTH), variant=TWO_BW),
        ),
    ),
    Part("2400 updates", 2400, (*_with((*BASE, *OF_MEANS[1:]), rates=(2e-3, 4e-3)), *_with(RARELY[2:], rates=(1e-3, 2e-3)))),
    Part(
        "small",
        600,
        (
            *_with((*BASE, OF_MEANS[1], *LATE), rates=(2e-3, 4e-3)),
            *_with((RARELY[1], OF_MEANS[0], RARELY[2], RARELY[3], OF_MEANS[2]), rates=(4e-3,)),
            *_with((*OF_MESSAGES, *OF_SUMS[:5], *OF_BOTH), rates=(4e-3,)),
        ),
        d=2,
        width=64,
    ),
    *(
        Part(
            f"few bits, {optimizer}",
            600,
            _with((*BASE, *FEW_BITS), variant=NESTEROV, rates=(rate,)),
            d=2,
            width=64,
            pipelines=2,
            optimizer=optimizer,
        )
        for optimizer, rate in (("Muon", 6e-3), ("Adam", 4e-3))
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, or read results, and print the tables.

    Args:
        arguments: of the command line, by default those of this process.
    """
    options = _parser().parse_args(arguments)
    try:
        rows, platform = results.read(options.from_json) if options.from_json else _run(options)
        results.show(tables(rows, ", on a CPU" if platform == "cpu" else ""), options.documents)
    except InputError as error:
        sys.exit(f"bench-learning: {error}")
    if options.pictures is not None:
        from benchmarks.learning.draw import draw_agreements  # machines that only run the study need no Matplotlib

        draw_agreements(rows, options.pictures)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning.agree", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--parts", nargs="+", default=[part.name for part in PARTS], choices=[part.name for part in PARTS], help="default: all"
    )
    names = list(dict.fromkeys(setting.name for part in PARTS for setting in part.settings))
    parser.add_argument("--settings", nargs="+", default=names, choices=names, metavar="NAME", help=f"only these: {'; '.join(names)}")
    parser.add_argument("--rates", nargs="+", type=float, help="learning rates; default: two to four for each setting")
    parser.add_argument("--updates", type=int, help=f"of each run, in place of those of the part; a multiple of {EVERY}")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="default: %(default)s")
    parser.add_argument("--at-once", type=int, help=f"how many runs are vectorized; default: 1 on CPUs, otherwise {AT_ONCE}")
    parser.add_argument("--seconds-limit", type=float, default=SECONDS, help="start no further runs after this time; default: %(default)s")
    results.add_options(parser, "benchmarks/agree.json")
    return parser


def _run(options: argparse.Namespace) -> tuple[list[Row], str]:
    """Train all runs, and write the results after each group of them."""
    if options.updates is not None and (options.updates < EVERY or options.updates % EVERY):
        raise InputError(f"--updates: expected a multiple of {EVERY}, found {options.updates}")
    machine, began, rows = describe(), time.monotonic(), list[Row]()
    print(f"{machine['device']}, {machine['cores']} cores, jax {machine['jax']}", file=sys.stderr)
    at_once = options.at_once or (1 if machine["platform"] == "cpu" else AT_ONCE)
    for part in PARTS:
        if part.name not in options.parts:
            continue
        chosen = part._replace(
            settings=tuple(
                replace(setting, rates=tuple(options.rates or setting.rates))
                for setting in part.settings
                if setting.name in options.settings
            ),
            updates=options.updates or part.updates,
        )
        for done in run(chosen, options.seeds, at_once, began + options.seconds_limit):
            rows += done
            files.write_atomically(options.json, json.dumps({"rows": [asdict(row) for row in rows], "machine": machine}) + "\n")
            print(f"{part.name}: {len(rows)} runs in all after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    print(f"written to {options.json}", file=sys.stderr)
    return rows, machine["platform"]


def run(part: Part, seeds: int, at_once: int, deadline: float) -> Iterator[list[Row]]:
    """Train all runs of a part, seed by seed, and yield the rows of those that ran together.

    Args:
        part: what is run.
        seeds: how many, from 0.
        at_once: how many runs are vectorized.
        deadline: the time of `time.monotonic` after which no further runs start.
    """
    task = make_gpt(part.d, part.width)
    cells = [(setting, rate, seed) for seed in range(seeds) for setting in part.settings for rate in setting.rates]
    data = stacked([batches_of_run(task, seed, part.updates // EVERY, EVERY) for seed in range(seeds)])
    params = stacked([initial(task, seed) for seed in range(seeds)])
    versions = 1 + max(setting.variant.schedule != "flush" for setting in part.settings)
    rounds = any(setting.messages or setting.sums for setting in part.settings)
    draws = any(setting.stochastic for setting in part.settings)
    schedule, stages, rule = warm_up_and_cosine(part.updates), stages_of(task, part.d), OPTIMIZERS[part.optimizer].rule
    emulation = Emulation(task.stack, stages, task.loss, rule, schedule, part.updates // 4, versions, task.clip)

    def train(pipelines: Pipelines, recipe: Recipe, exchange: Exchange, params: Tree, data: Tree, held_out: Tree) -> jax.Array:
        start, batches = jax.tree.map(lambda a: a[recipe.seed], (params, data))
        return pipelines.train(recipe, exchange, start, batches, held_out)[0]

    inputs = jax.device_put((params, data, task.held_out))
    for bits in dict.fromkeys(setting.bits for setting in part.settings):
        pipelines = Pipelines(emulation, part.pipelines, rounds, draws, bits)
        program = jax.jit(jax.vmap(partial(train, pipelines), (0, 0, None, None, None)))
        chosen = [cell for cell in cells if cell[0].bits == bits]
        size = min(at_once, len(chosen))
        for chunk in (chosen[first : first + size] for first in range(0, len(chosen), size)):
            if time.monotonic() > deadline:
                return
            full = [*chunk, *[chunk[-1]] * (size - len(chunk))]
            runs = [(setting.recipe(seed, rate, part.d, part.optimizer), setting.exchange(part.d)) for setting, rate, seed in full]
            losses = np.asarray(program(*stacked(runs), *inputs))
            yield [_row(part, *cell, values) for cell, values in zip(chunk, losses, strict=False)]


def _row(part: Part, setting: Setting, rate: float, seed: int, losses: np.ndarray) -> Row:
    family = FAMILIES[setting.variant].replace(OPTIMIZER, part.optimizer)
    task = f"{part.pipelines} pipelines, {part.d} stages, width {part.width}, {family}, {part.updates} updates"
    return Row(task, part.d, part.optimizer, setting.group, setting.name, rate, seed, EVERY, [round(float(loss), 5) for loss in losses])


def tables(rows: Sequence[Row], where: str = "") -> list[Table]:
    """Return a table for each schedule and number of updates: the last loss at each rate, and beside data parallelism at its best rate.

    Args:
        rows: of the study.
        where: is added to their names.
    """
    made = []
    for task, d, optimizer in dict.fromkeys((row.task, row.d, row.optimizer) for row in rows):
        rates = sorted({row.rate for row in rows if row.task == task})
        settings = recipes_by_rate(rows, task, d, optimizer)
        best = [min(recipes, key=lambda recipe: recipe.loss) for recipes in settings]
        head = ["exchange", "setting", *(f"loss at {rate:g}" for rate in rates), "best, above data parallelism"]
        lines = []
        for recipes, own in zip(settings, best, strict=True):
            losses = {recipe.rate: f"{recipe.loss:.3f}" if math.isfinite(recipe.loss) else "diverged" for recipe in recipes}
            lines.append([own.schedule, own.remedy, *(losses.get(rate, "") for rate in rates), _difference(own, best[0])])
        made.append(Table(task + where, head, lines))
    return made


def _difference(own: Measured, base: Measured) -> str:
    """Return by how much a loss is above another one, with the smallest and the largest difference of equal seeds."""
    pairs = [(own.losses[own.seeds.index(seed)], base.losses[base.seeds.index(seed)]) for seed in own.seeds if seed in base.seeds]
    differences = [a - b for a, b in pairs]
    if own is base or not all(map(math.isfinite, differences)):
        return "–"
    mean = f"{sum(differences) / len(differences):+.3f}"
    return f"{mean} ({min(differences):+.3f} to {max(differences):+.3f})" if len(differences) > 1 else mean


if __name__ == "__main__":
    keep_freed_memory()
    jax.config.update("jax_default_matmul_precision", "highest")
    main()
