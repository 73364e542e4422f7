"""PipeDream's own recurrence (SOSP 2019, section 3.1), for comparison. It goes over the levels and replicates whole components of each.

    T(i, j, m) = 1/m · max(inner A(i, j, all), 2 (m - 1) · weights of i .. j / bandwidth)
    A(i, j, m) = min(T(i, j, m), min over s, m' of max(A(i, s, m - m'), 2 · outputs at s / bandwidth, T(s, j, m')))

Unlike `benchmarks.papers.partition.search_pipedream` it cannot place a stage on a part of a component, uses all devices, and ignores
updates.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from benchmarks.papers.partition import Partition, Placed, Problem, evaluate_partition
from jpipe_planner import Level


@dataclass(frozen=True)
class _Solved:
    """One level: A and T by number of components, each an array over first layer and one past the last; infinite for an empty range."""

    best: list[Any]
    alone: list[Any]
    cuts: Any


def search_paper(problem: Problem, price: Literal["text", "code"] = "text") -> Partition:
    """Return the stages of the recurrence.

    If it replicates a pipeline inside a component, each of its stages gets all replicas.

    Args:
        problem: the costs and the devices; dispatch, updates, memory and M are ignored.
        price: "text": the cost in the paper. "code": the cost in the released program, compute plus 4 (m - 1) / m of the weights, with
            free cuts.

    Returns:
        The stages, with the seconds of the recurrence, and everything else as in `evaluate_partition`.
    """
    layers, count = problem.layers, len(problem.layers)
    compute = np.concatenate([[0.0], np.cumsum([layer.forward + layer.backward for layer in layers])])
    weights = np.concatenate([[0.0], np.cumsum([layer.weights for layer in layers])])
    outputs = np.array([0, *(layer.outputs for layer in layers)])
    some = np.arange(count + 1)[:, None] < np.arange(count + 1)
    inside = np.where(some, compute - compute[:, None], np.inf)
    sizes = np.where(some, weights - weights[:, None], 0.0)
    solved = list[_Solved]()
    for k, level in enumerate(problem.topology.levels):
        cuts = 2 * outputs / level.bandwidth if price == "text" else np.zeros(count + 1)
        starts = 1 if k == len(problem.topology.levels) - 1 else count + 1  # at the outermost level only stages from the first layer on
        alone = [inside] + [_alone(inside, sizes, m, level, price) for m in range(1, level.count + 1)]
        solved.append(_Solved(_best(alone, cuts, starts), alone, cuts))
        inside = solved[-1].best[-1]
    pieces = _pieces(solved, len(solved) - 1, 0, count, problem.topology.levels[-1].count)
    stages, first = list[Placed](), 0
    for start, stop, replicas in pieces:
        stages.append(Placed(start, stop, first, replicas))
        first += replicas
    return replace(evaluate_partition(problem, stages), seconds=float(inside[0, count]))


def _alone(inside: Any, sizes: Any, m: int, level: Level, price: str) -> Any:
    """Return T for m components."""
    if price == "text":
        return np.maximum(inside, 2 * (m - 1) * sizes / level.bandwidth) / m
    return (inside + 4 * (m - 1) / m * sizes / level.bandwidth) / m


def _best(alone: list[Any], cuts: Any, starts: int) -> list[Any]:
    """Return A for each number of components, from the first `starts` layers on."""
    best = [alone[0]]
    for m in range(1, len(alone)):
        least = alone[m][:starts].copy()
        for last in range(1, m):
            before, after = np.maximum(best[m - last], cuts), alone[last]
            for s in range(1, len(cuts) - 1):
                least[:s, s + 1 :] = np.minimum(least[:s, s + 1 :], np.maximum(before[:s, s, None], after[s, s + 1 :]))
        best.append(least)
    return best


def _pieces(solved: list[_Solved], k: int, i: int, j: int, m: int) -> list[tuple[int, int, int]]:
    """Return the stages that give A(i, j, m) of level k, with their replicas; ties go to fewer, then earlier cuts."""
    if k < 0:
        return [(i, j, 1)]
    level, everything = solved[k], len(solved[k - 1].best) - 1 if k else 1
    if level.best[m][i, j] == level.alone[m][i, j]:
        return [(start, stop, m * replicas) for start, stop, replicas in _pieces(solved, k - 1, i, j, everything)]
    for s in range(i + 1, j):
        for last in range(1, m):
            if max(level.best[m - last][i, s], level.cuts[s], level.alone[last][s, j]) == level.best[m][i, j]:
                behind = _pieces(solved, k - 1, s, j, everything)
                return _pieces(solved, k, i, s, m - last) + [(start, stop, last * replicas) for start, stop, replicas in behind]
    raise AssertionError("expected a cut where one stage is not best")
