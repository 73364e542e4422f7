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


def table(rows: Iterable[Row], task: str, d: int, optimizers: Sequence[str]) -> Table:
    """Return the table of a task: each recipe at its best learning rate, with a column for each optimizer."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    rows = list(rows)
    for optimizer in optimizers:
        recipes = best_recipes(rows, task, d, optimizer)
        flush = best_flush(recipes)
        for recipe in recipes:
            cells.setdefault((recipe.schedule, recipe.remedy), {})[optimizer] = _cell(recipe, flush)
    lines = [[*names, *(by_optimizer.get(optimizer, "") for optimizer in optimizers)] for names, by_optimizer in cells.items()]
    return Table(f"{task}, {d} stages", ["schedule", "remedy", *optimizers], lines)


def table_by_rate(rows: Iterable[Row], task: str, d: int, optimizer: str) -> Table:
    """Return the table of one optimizer: each recipe at each of its rates, beside the flush that is best with the same seeds."""
    recipes = [recipe for candidates in recipes_by_rate(rows, task, d, optimizer) for recipe in candidates]
    lines = [_line(recipe, best_flush(recipes, recipe.seeds)) for recipe in recipes]
    return Table(
        f"{task}, {d} stages, {optimizer}", ["schedule", "remedy", "rate", "seeds", "loss", "above the best flush", "updates"], lines
    )


def tables(rows: Sequence[Row], where: str = "") -> list[Table]:
    """Return the tables of all tasks: one for the optimizers with the same seeds for all recipes, one for each other optimizer.

    Args:
        rows: of the study.
        where: is added to the names of the tables.
    """
    optimizers: dict[tuple[str, int], list[str]] = {}
    for task, d, optimizer in dict.fromkeys((row.task, row.d, row.optimizer) for row in rows if row.schedule == FLUSH):
        optimizers.setdefault((task, d), []).append(optimizer)
    found = []
    for (task, d), names in optimizers.items():
        seeds = {name: {recipe.seeds for one in recipes_by_rate(rows, task, d, name) for recipe in one} for name in names}
        found += [table_by_rate(rows, task, d, name) for name in names if len(seeds[name]) > 1]
        if same := [name for name in names if len(seeds[name]) == 1]:
            found.append(table(rows, task, d, same))
    return [one._replace(name=one.name + where) for one in found]


def _cell(recipe: Recipe, flush: Recipe) -> str:
    """Return the last loss of a recipe, and in brackets how far it is above the flush, and its token overhead."""
    if not math.isfinite(recipe.loss):
        return "diverged"
    if recipe == flush:
        return f"{recipe.loss:.3f}"
    return f"{recipe.loss:.3f} ({recipe.loss - flush.loss:+.3f}, {_overhead(recipe, flush)})"


def _line(recipe: Recipe, flush: Recipe) -> list[str]:
    names = [recipe.schedule, recipe.remedy, f"{recipe.rate:g}", str(len(recipe.seeds))]
    if not math.isfinite(recipe.loss):
        return [*names, "diverged", "–", "–"]
    if recipe == flush:
        return [*names, f"{recipe.loss:.3f}", "–", "1.00"]
    differences = [a - b for a, b in zip(recipe.losses, flush.losses, strict=True)]
    more = f"{sum(differences) / len(differences):+.3f}"
    if len(differences) > 1:
        more += f" ({min(differences):+.3f} to {max(differences):+.3f})"
    return [*names, f"{recipe.loss:.3f}", more, _overhead(recipe, flush)]


def _overhead(recipe: Recipe, flush: Recipe) -> str:
    overhead = token_overhead(recipe, flush)
    return f"{overhead:.2f}" if overhead else "< 1"
