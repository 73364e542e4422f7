"""PipeDream's partitioning (SOSP 2019, section 3.1), exact for the cost and memory defined in `jpipe_planner.search.pipedream.partition`.

A bound on the seconds per microbatch determines which stages and cuts are fast enough. `fast_ranges`, or `fitting_placement` with limited
memory, tests quickly whether they make a pipeline. Bisection finds the smallest bound under which they do.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from jpipe.plan import repeats_forward
from jpipe_planner.search.pipedream.fast_ranges import FastPlacement, FastRanges
from jpipe_planner.search.pipedream.fitting_placement import FittingPlacement
from jpipe_planner.search.pipedream.fitting_ranges import FittingRanges
from jpipe_planner.search.pipedream.partition import Partition, Placed, Problem, evaluate_partition, placed_seconds
from jpipe_planner.search.pipedream.ranges import Ranges

TIE = 1e-9
"""Relative difference below which times count as equal: neither profiles nor floating-point sums are more exact."""

_ENOUGH = 1e-2  # relative precision of the least memory, for a problem in which nothing fits
_SLOWER = (1 + TIE, 1.02, 1.1, 1.5, 3.0, 10.0)  # bounds to try first with limited memory, before none: loose bounds take long


def search_pipedream(problem: Problem) -> Partition:
    """Return the stages and devices that train fastest and fit.

    Ties go to fewer stages, then fewer devices, then, from the front, earlier cuts and fewer replicas.

    Args:
        problem: the costs, the devices and the limits.

    Returns:
        The best partition or, if none fits, one that needs about the least memory; its `over` says how much is lacking.
    """
    fast = FastRanges(problem, Ranges(problem))
    fastest = _fastest(problem, fast)
    if fastest.over is None:
        return fastest
    assert problem.memory is not None
    fitting = _Fitting(problem, fast)
    low = fastest.seconds
    for bound in (*(fastest.seconds * slower for slower in _SLOWER), math.inf):
        fitting_partition = fitting.any_stages(bound)
        if fitting_partition:
            break
        low = bound
    else:
        return _smallest(problem, fast, fastest)
    best = _squeeze(low, fitting_partition, fitting.any_stages, lambda partition: partition.seconds, TIE)
    return fitting.first(best)


def _fastest(problem: Problem, fast: FastRanges) -> Partition:
    """Return the solution without a memory limit, with recomputation if it then fits and is not slower."""
    recompute = all(map(repeats_forward, problem.policies))

    def within(bound: float) -> Partition | None:
        placement = FastPlacement(fast, bound, recompute)
        return _recompute(problem, placement.any_stages(), bound) if placement.feasible else None

    single_stage = _recompute(problem, [fast.single_stage(recompute)], math.inf)
    best = _squeeze(fast.lower_bound(recompute), single_stage, within, lambda partition: partition.seconds, TIE)
    bound = best.seconds * (1 + TIE)
    return _recompute(problem, FastPlacement(fast, bound, recompute).first(), bound)


def _smallest(problem: Problem, fast: FastRanges, fastest: Partition) -> Partition:
    """Return a partition that needs about the least memory, at any speed."""
    assert problem.memory is not None

    def within(memory: float) -> Partition | None:
        return _Fitting(replace(problem, memory=memory), fast).any_stages(math.inf)

    low, smaller = problem.memory, None

    def needed(partition: Partition) -> float:
        return max(size / problem.kind(stage).share for size, stage in zip(partition.memory, partition.stages, strict=True))

    while not smaller and 2 * low < needed(fastest):
        smaller = within(2 * low)
        low = low if smaller else 2 * low
    least = _squeeze(low, smaller or fastest, within, needed, _ENOUGH)
    return evaluate_partition(problem, least.stages)


class _Fitting:
    """The search with limited memory: by the relaxed rules, and if their solution does not fit, by the true ones."""

    def __init__(self, problem: Problem, fast: FastRanges) -> None:
        self._problem, self._fast = problem, fast
        self._fitting = FittingRanges(problem, fast)

    def any_stages(self, bound: float) -> Partition | None:
        """Return stages that are fast enough and fit, or None."""
        return self._search(bound, None)

    def first(self, best: Partition) -> Partition:
        """Return the stages that win ties among equally fast ones."""
        partition = self._search(best.seconds * (1 + TIE), (len(best.stages), best.devices))
        assert partition is not None
        return partition

    def _search(self, bound: float, at_most: tuple[int, int] | None) -> Partition | None:
        for relaxed in (True, False):
            fit = FittingPlacement(self._fast, self._fitting, bound, relaxed, at_most)
            if not fit.feasible:
                return None
            stages = fit.stages()
            partition = _recompute(self._problem, stages, bound) if stages else None
            if partition and partition.over is None:
                return partition
        raise AssertionError("expected stages that fit")


def _squeeze(
    low: float, best: Partition, within: Callable[[float], Partition | None], size: Callable[[Partition], float], share: float
) -> Partition:
    """Return the solution of least size, up to a relative difference.

    Args:
        low: lower bound on the size.
        best: a solution to begin with.
        within: returns a solution whose size is within a bound, or None.
        size: the size of a solution, to be minimized.
        share: relative difference that does not matter.
    """
    above, just_below = 1e-3, False
    while low < size(best) * (1 - share):
        high = size(best)
        # Low bounds come first: often one has a solution, and if not this shows soon. Near the end, every other one is just below the best.
        just_below = not just_below and high - low <= 0.01 * high
        bound = high * (1 - share) if just_below else min((low + high) / 2, low * (1 + above))
        solution = within(bound)
        if solution:
            best, above = solution, math.inf
        else:
            low, above = bound, 8 * above
    return best


def _recompute(problem: Problem, stages: Sequence[Placed], bound: float) -> Partition:
    """Give each stage the cheapest policy that fits and is fast enough, or the cheapest of all if none fits."""
    policies = sorted(problem.policies, key=repeats_forward)
    options = [evaluate_partition(problem, [stage._replace(recompute=policy) for stage in stages]) for policy in policies]
    chosen = []
    for s in range(len(stages)):
        fitting = (option.stages[s] for option in options if option.memory[s] <= problem.limit(option.stages[s]))
        chosen.append(next((stage for stage in fitting if placed_seconds(problem, stage) <= bound), options[0].stages[s]))
    return evaluate_partition(problem, chosen)
