"""`python -m benchmarks.learning.changes`: what the gap between a flush and a delay of one update depends on, one change at a time.

A small byte GPT on one device. The results are written after each run, and runs that the file already has are not repeated.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.learning import results
from benchmarks.learning.emulation import Backward, Emulation, warm_up_and_cosine
from benchmarks.learning.grid import OPTIMIZERS, Row, Variant, batches_of_run, initial, stages_of
from benchmarks.learning.report import Recipe, recipes_by_rate, updates_until
from benchmarks.learning.tasks import make_gpt
from benchmarks.machine import describe
from benchmarks.papers.document import Table
from jpipe import keep_freed_memory

D, WIDTH, EVALUATIONS, SEEDS = 4, 64, 15, 2  # D: stages of PipeDream
FILE = Path(__file__).parent / "changes-cpu.json"
FLUSH, TWO_BW, PREDICTED = (Variant(name, nesterov=1.0, prediction=p) for name, p in (("flush", 0.0), ("2BW", 0.0), ("2BW", 1.0)))
PLAIN = (Variant("flush"), Variant("2BW"), Variant("2BW", prediction=1.0))
ALL = (FLUSH, TWO_BW, PREDICTED)


@dataclass(frozen=True)
class Setting:
    """How a GPT is trained.

    Attributes:
        name: what differs from the first setting.
        variants: the schedules and remedies, a flush first.
        optimizer: by name.
        rate: the largest learning rate.
        rows: of 96 bytes in each batch.
        updates: of a run.
        warm_up: the share of the updates in which the learning rate rises.
        end: the last learning rate, as a share of the largest.
        momentum: of the optimizer; None: its default.
        depth: blocks of the model.
        late: the layers with late gradients under 2BW.
        backward: the weights that backwards read under PipeDream.
        beside: the name of another setting with the same flush; "": its own.
    """

    name: str
    variants: tuple[Variant, ...] = ALL
    optimizer: str = "Muon"
    rate: float = 6e-3
    rows: int = 16
    updates: int = 600
    warm_up: float = 0.05
    end: float = 0.1
    momentum: float | None = None
    depth: int = 2
    late: Literal["all", "blocks", "ends"] = "all"
    backward: Backward = "stashed"
    beside: str = ""


BASE = Setting("as in the study")
LATE = (TWO_BW, PREDICTED)
SETTINGS = (
    BASE,
    replace(BASE, name="64 rows", rows=64),
    replace(BASE, name="300 updates", updates=300),
    replace(BASE, name="rate 0.002", rate=2e-3),
    replace(BASE, name="1,800 updates", updates=1800),
    replace(BASE, name="only blocks are late", late="blocks", variants=LATE, beside=BASE.name),
    replace(BASE, name="only embedding and output are late", late="ends", variants=LATE, beside=BASE.name),
    replace(BASE, name="Adam", optimizer="Adam", rate=4e-3),
    replace(BASE, name="momentum 0.98", momentum=0.98),
    replace(BASE, name="without Nesterov", variants=PLAIN),
    replace(BASE, name="rate falls to 0", end=0.0),
)
_UNDER = tuple(Variant(f"PipeDream m = {m}", nesterov=1.0, prediction=1.0) for m in ("d", "2d"))  # type: ignore[arg-type]
WITHOUT_STASH = tuple(
    Setting(name, (FLUSH, *_UNDER) if name == "stash" else _UNDER, optimizer, rate, depth=D, backward=backward, beside="stash")
    for optimizer, rate in (("Muon", 6e-3), ("Adam", 4e-3))
    for name, backward in (("stash", "stashed"), ("no stash", "newest"), ("no stash, recompute: full", "recomputed"))
)


def run(setting: Setting, seed: int, done: Set[tuple[object, ...]]) -> Iterator[Row]:
    """Train the runs of a setting that are not done, and yield their rows."""
    task, optimizer = make_gpt(setting.depth, WIDTH, setting.rows), OPTIMIZERS[setting.optimizer]
    ids, each = task.stack.ids, setting.updates // EVALUATIONS
    momentum = optimizer.momentum if setting.momentum is None else setting.momentum
    schedule = warm_up_and_cosine(setting.updates, setting.warm_up, setting.end)
    for variant in setting.variants:
        row = Row(setting.name, setting.depth, setting.optimizer, variant.schedule, variant.remedy, setting.rate, seed, each, [])
        if key(row) in done:
            continue
        stages, parts = stages_of(task, D), 2 * D
        if not variant.schedule.startswith("PipeDream"):  # all stages read equally old weights
            stages, parts = ((ids[0],), tuple(ids[1:-1]), (ids[-1],)), 1
        recipe = variant.recipe(seed, setting.rate, momentum, len(stages), parts)
        if parts == 1:
            late = {"all": (1, 1, 1), "blocks": (0, 1, 0), "ends": (1, 0, 1)}[setting.late]
            recipe = recipe._replace(delays=recipe.delays * np.array(late, np.int32)[:, None])
        emulation = Emulation(task.stack, stages, task.loss, optimizer.rule, schedule, 1, 2, task.clip, setting.backward)
        data = jax.tree.map(jnp.asarray, (batches_of_run(task, seed, EVALUATIONS, each), task.held_out))
        losses = np.asarray(jax.jit(emulation.train)(recipe, initial(task, seed), *data).losses)
        yield replace(row, losses=[round(float(loss), 5) for loss in losses])


def key(row: Row) -> tuple[object, ...]:
    """Return what identifies a run."""
    return row.task, row.optimizer, row.schedule, row.remedy, row.rate, row.seed


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables of the changes, and of PipeDream without a stash."""
    head = ["change", "flush", "2BW above it", "updates behind", "with prediction", "updates behind"]
    measured = [(setting, _recipes(rows, setting)) for setting in (*SETTINGS, *WITHOUT_STASH)]
    lines, stash = list[list[str]](), list[list[str]]()
    for setting, (flush, *others) in ((setting, recipes) for setting, recipes in measured if recipes[1:]):
        cells = [_behind(other, flush) for other in others]
        if setting in WITHOUT_STASH:
            stash.append([setting.optimizer, setting.name, f"{flush.loss:.3f}", *(above for above, _ in cells)])
        else:
            lines.append([setting.name, f"{flush.loss:.3f}", *(text for cell in cells for text in cell)])
    tables = [
        Table("2BW, one change at a time", head, lines),
        Table("PipeDream without a stash", ["optimizer", "backward", "flush", "m = d above it", "m = 2d above it"], stash),
    ]
    return [table for table in tables if table.rows]


def _recipes(rows: Sequence[Row], setting: Setting) -> list[Recipe]:
    """Return what was measured of a setting, a flush first."""
    of_flush = setting.beside or setting.name
    mine = [
        replace(row, task="")
        for row in rows
        if row.optimizer == setting.optimizer and row.task == (of_flush if row.schedule == "flush" else setting.name)
    ]
    recipes = {r.schedule + r.remedy: r for by_rate in recipes_by_rate(mine, "", setting.depth, setting.optimizer) for r in by_rate}
    return sorted(recipes.values(), key=lambda recipe: recipe.schedule != "flush")


def _behind(recipe: Recipe, flush: Recipe) -> tuple[str, str]:
    """Return by how much a loss is above a flush with equal seeds, and after how many fewer updates the flush has this loss."""
    differences = [a - b for a, b in zip(recipe.losses, flush.losses, strict=False)]
    total = recipe.every * len(recipe.mean_curve)
    reached = updates_until(flush.mean_curve, flush.every, recipe.loss)
    spread = f" ({min(differences):+.3f} to {max(differences):+.3f})" if len(differences) > 1 else ""
    return f"{sum(differences) / len(differences):+.3f}{spread}", "–" if reached is None else f"{total - reached:.0f} of {total}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is missing in the results, or only read them, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning.changes", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds-limit", type=float, default=1e9, help="start no further runs after this time")
    results.add_options(parser, str(FILE))
    options = parser.parse_args(arguments)
    path = options.from_json or options.json
    rows = results.read(path)[0] if path.exists() else []
    start = time.monotonic()
    parts = [] if options.from_json else [(setting, seed) for seed in range(SEEDS) for setting in (*SETTINGS, *WITHOUT_STASH)]
    for setting, seed in parts:
        for row in () if time.monotonic() - start > options.seconds_limit else run(setting, seed, {key(row) for row in rows}):
            rows.append(row)
            path.write_text(json.dumps({"rows": [asdict(row) for row in rows], "machine": describe()}) + "\n")
            print(row.task, row.optimizer, row.schedule, row.remedy, row.seed, row.losses[-1], file=sys.stderr, flush=True)
    results.show(tables(rows), options.documents)


if __name__ == "__main__":
    keep_freed_memory()
    jax.config.update("jax_default_matmul_precision", "highest")
    main()
