"""Tables of the study: losses at equal updates, and how many more updates a recipe needs for the loss of a flush."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.learning.grid import Row
from benchmarks.papers.document import Table

SHARES = (0.6, 0.8, 1.0)  # of the run of a flush
FLUSH = "flush"
CONTROLS = ("prediction by", "global clipping", "momentum 0")  # recipes that no pipeline has, or that are there to hurt


class Recipe(NamedTuple):
    """A schedule and a remedy at one learning rate.

    Attributes:
        schedule: how old the weights are.
        remedy: what is done about it, or "none".
        rate: the learning rate.
        every: updates between two evaluations.
        curves: the held-out losses of each seed.
    """

    schedule: str
    remedy: str
    rate: float
    every: int
    curves: tuple[tuple[float, ...], ...]

    @property
    def mean_curve(self) -> list[float]:
        """The mean over the seeds at each evaluation."""
        return [sum(values) / len(values) for values in zip(*self.curves, strict=True)]

    @property
    def losses(self) -> list[float]:
        """The last loss of each seed."""
        return [curve[-1] for curve in self.curves]

    @property
    def loss(self) -> float:
        """The mean of the last losses; infinite if a run diverged."""
        mean = sum(self.losses) / len(self.losses)
        return mean if math.isfinite(mean) else math.inf

    @property
    def is_control(self) -> bool:
        """Whether it is a comparison that nobody would train with."""
        return any(part.startswith(control) and part != "momentum 0.99" for part in self.remedy.split(", ") for control in CONTROLS)


def best_recipes(rows: Iterable[Row], task: str, d: int, optimizer: str) -> list[Recipe]:
    """Return each schedule and remedy of one optimizer at its best learning rate, in the sequence of the rows."""
    runs: dict[tuple[str, str], dict[float, dict[int, Row]]] = {}
    for row in rows:
        if (row.task, row.d, row.optimizer) == (task, d, optimizer):
            runs.setdefault((row.schedule, row.remedy), {}).setdefault(row.rate, {})[row.seed] = row
    recipes = []
    for (schedule, remedy), rates in runs.items():
        candidates = [
            Recipe(schedule, remedy, rate, next(iter(seeds.values())).every, tuple(tuple(seeds[seed].losses) for seed in sorted(seeds)))
            for rate, seeds in rates.items()
        ]
        recipes.append(min(candidates, key=lambda recipe: recipe.loss))
    return recipes


def best(recipes: Iterable[Recipe]) -> Recipe:
    """Return the recipe with the lowest loss, without controls."""
    return min((recipe for recipe in recipes if not recipe.is_control), key=lambda recipe: recipe.loss)


def best_flush(recipes: Iterable[Recipe]) -> Recipe:
    """Return the flush with the lowest loss."""
    return best(recipe for recipe in recipes if recipe.schedule == FLUSH)


def updates_until(curve: Sequence[float], every: int, target: float) -> float | None:
    """Return after how many updates a curve first is at a loss or below, interpolated between evaluations; None if it never is."""
    for i, loss in enumerate(curve):
        if loss <= target:
            share = (curve[i - 1] - target) / (curve[i - 1] - loss) if i else 1.0
            return every * (i + share) if i else float(every)
    return None


def token_overheads(recipe: Recipe, flush: Recipe) -> list[float | None]:
    """Return the updates of a recipe over those of the flush, until its losses at `SHARES` of its run; None if they are not reached."""
    overheads = []
    for share in SHARES:
        target = flush.mean_curve[round(share * len(flush.mean_curve)) - 1]
        needed, base = (updates_until(one.mean_curve, one.every, target) for one in (recipe, flush))
        overheads.append(needed / base if needed and base else None)
    return overheads


def whole_run_overhead(recipe: Recipe, flush: Recipe) -> float | None:
    """Return the updates of the recipe's run over those after which the flush has its last loss; None if the flush never has it."""
    reached = updates_until(flush.mean_curve, flush.every, recipe.mean_curve[-1])
    return recipe.every * len(recipe.mean_curve) / reached if reached else None


def table(rows: Iterable[Row], task: str, d: int, optimizer: str) -> Table:
    """Return the table of one optimizer: each recipe at its best rate, beside the best flush."""
    recipes = best_recipes(rows, task, d, optimizer)
    flush = best_flush(recipes)
    head = ["schedule", "remedy", "rate", "loss", "more than the best flush", *(f"overhead, {share:.0%}" for share in SHARES), "at its end"]
    lines = [_line(recipe, flush) for recipe in recipes]
    return Table(f"{task}, {d} stages, {optimizer}", head, lines)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the tables of all parts that have a flush."""
    parts = dict.fromkeys((row.task, row.d, row.optimizer) for row in rows if row.schedule == FLUSH)
    return [table(rows, *part) for part in parts]


def _line(recipe: Recipe, flush: Recipe) -> list[str]:
    if not math.isfinite(recipe.loss):
        return [recipe.schedule, recipe.remedy, f"{recipe.rate:g}", "diverged", *["–"] * (len(SHARES) + 2)]
    differences = [a - b for a, b in zip(recipe.losses, flush.losses, strict=True)]
    more = "–" if recipe is flush else f"{sum(differences) / len(differences):+.3f} ({min(differences):+.3f} to {max(differences):+.3f})"
    overheads = [f"{value:.2f}" if value else "not reached" for value in token_overheads(recipe, flush)]
    end = None if recipe is flush else whole_run_overhead(recipe, flush)
    last = "1.00" if recipe is flush else f"{end:.2f}" if end else "< 1"
    return [recipe.schedule, recipe.remedy, f"{recipe.rate:g}", f"{recipe.loss:.3f}", more, *overheads, last]
