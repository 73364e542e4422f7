"""Tables of the study: losses at equal updates, and how many more updates a recipe needs for the loss of a flush."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.learning.grid import Row
from benchmarks.papers.document import Table

FLUSH = "flush"
CONTROLS = ("prediction by", "global clipping", "momentum 0")  # recipes that no pipeline has, or that are there to hurt


class Recipe(NamedTuple):
    """A schedule and a remedy at one learning rate.

    Attributes:
        schedule: how old the weights are.
        remedy: what is done about it, or "none".
        rate: the learning rate.
        every: updates between two evaluations.
        seeds: of the runs, ascending.
        curves: the held-out losses of each seed.
    """

    schedule: str
    remedy: str
    rate: float
    every: int
    seeds: tuple[int, ...]
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


def of_seeds(recipe: Recipe, seeds: Sequence[int]) -> Recipe:
    """Return a recipe with the runs of some of its seeds."""
    return recipe._replace(seeds=tuple(seeds), curves=tuple(recipe.curves[recipe.seeds.index(seed)] for seed in seeds))


def best_recipes(rows: Iterable[Row], task: str, d: int, optimizer: str) -> list[Recipe]:
    """Return each schedule and remedy of one optimizer at its best learning rate, in the sequence of the rows."""
    return [min(candidates, key=lambda recipe: recipe.loss) for candidates in recipes_by_rate(rows, task, d, optimizer)]


def recipes_by_rate(rows: Iterable[Row], task: str, d: int, optimizer: str) -> list[list[Recipe]]:
    """Return each schedule and remedy of one optimizer at all its learning rates, in the sequence of the rows."""
    runs: dict[tuple[str, str], dict[float, dict[int, Row]]] = {}
    for row in rows:
        if (row.task, row.d, row.optimizer) == (task, d, optimizer):
            runs.setdefault((row.schedule, row.remedy), {}).setdefault(row.rate, {})[row.seed] = row
    recipes = []
    for (schedule, remedy), rates in runs.items():
        candidates = []
        for rate, seeds in rates.items():
            runs_of_rate = [seeds[seed] for seed in sorted(seeds)]
            curves = tuple(tuple(row.losses) for row in runs_of_rate)
            candidates.append(Recipe(schedule, remedy, rate, runs_of_rate[0].every, tuple(sorted(seeds)), curves))
        recipes.append(candidates)
    return recipes


def best(recipes: Iterable[Recipe]) -> Recipe:
    """Return the recipe with the lowest loss, without controls."""
    return min((recipe for recipe in recipes if not recipe.is_control), key=lambda recipe: recipe.loss)


def best_flush(recipes: Iterable[Recipe], seeds: Sequence[int] | None = None) -> Recipe:
    """Return the flush with the lowest loss, of those with all these seeds; its other seeds are left out."""
    flushes = [recipe for recipe in recipes if recipe.schedule == FLUSH]
    return best(flushes if seeds is None else [of_seeds(recipe, seeds) for recipe in flushes if set(seeds) <= set(recipe.seeds)])


def updates_until(curve: Sequence[float], every: int, target: float) -> float | None:
    """Return after how many updates a curve first is at a loss or below, interpolated between evaluations; None if it never is."""
    for i, loss in enumerate(curve):
        if loss <= target:
            share = (curve[i - 1] - target) / (curve[i - 1] - loss) if i else 1.0
            return every * (i + share) if i else float(every)
    return None


def token_overhead(recipe: Recipe, flush: Recipe) -> float | None:
    """Return the updates of the recipe's run over those after which the flush has its last loss; None if the flush never has it."""
    reached = updates_until(flush.mean_curve, flush.every, recipe.mean_curve[-1])
    return recipe.every * len(recipe.mean_curve) / reached if reached else None


def table(rows: Iterable[Row], task: str, d: int, optimizer: str) -> Table:
    """Return the table of one optimizer: each recipe at its best rate, beside the best flush.

    If not all recipes have the same seeds, each learning rate has a line, with the number of seeds, and the best flush is that of these
    seeds.
    """
    by_rate = recipes_by_rate(rows, task, d, optimizer)
    every_rate = len({recipe.seeds for candidates in by_rate for recipe in candidates}) > 1
    head = ["schedule", "remedy", "rate", *["seeds"] * every_rate, "loss", "above the best flush", "updates"]
    if every_rate:
        recipes = [recipe for candidates in by_rate for recipe in candidates]
        lines = [_line(recipe, best_flush(recipes, recipe.seeds), [str(len(recipe.seeds))]) for recipe in recipes]
    else:
        recipes = [min(candidates, key=lambda recipe: recipe.loss) for candidates in by_rate]
        lines = [_line(recipe, best_flush(recipes)) for recipe in recipes]
    return Table(f"{task}, {d} stages, {optimizer}", head, lines)


def tables(rows: Sequence[Row], where: str = "") -> list[Table]:
    """Return the tables of all parts that have a flush; `where` is added to their names."""
    parts = dict.fromkeys((row.task, row.d, row.optimizer) for row in rows if row.schedule == FLUSH)
    of_parts = [table(rows, *part) for part in parts]
    return [one._replace(name=one.name + where) for one in of_parts]


def _line(recipe: Recipe, flush: Recipe, seeds: Sequence[str] = ()) -> list[str]:
    names = [recipe.schedule, recipe.remedy, f"{recipe.rate:g}", *seeds]
    if not math.isfinite(recipe.loss):
        return [*names, "diverged", "–", "–"]
    differences = [a - b for a, b in zip(recipe.losses, flush.losses, strict=True)]
    more = f"{sum(differences) / len(differences):+.3f}"
    if len(differences) > 1:
        more += f" ({min(differences):+.3f} to {max(differences):+.3f})"
    if recipe == flush:
        return [*names, f"{recipe.loss:.3f}", "–", "1.00"]
    overhead = token_overhead(recipe, flush)
    return [*names, f"{recipe.loss:.3f}", more, f"{overhead:.2f}" if overhead else "< 1"]
