"""Improve the best plans of a ranking step by step, with simulations.

Estimates ignore that messages and sums wait for each other, so a plan with a slightly worse estimate may be faster.
"""

import dataclasses
from collections.abc import Iterator
from itertools import accumulate

import jpipe
from jpipe.schedules import PlanOptions
from jpipe_planner.profile.sharded import Degrees
from jpipe_planner.ranking.choose import Choice, Ranked, in_order
from jpipe_planner.ranking.sum_parts import with_sum_parts
from jpipe_planner.search.candidate import Candidate
from jpipe_planner.search.candidates import on_meshes
from jpipe_planner.search.estimate import Estimates

__all__ = ["improve"]

GAIN = 0.002  # the smallest relative gain of a step; smaller gains are not worth a simulation
WORTH = 0.01  # how much faster than its rival a plan must be without its bubble, so that it is improved
STARTS = 4  # the most plans with different stages that are improved
NEAR = 0.2  # a plan is improved only if it is slower than the fastest plan by at most this share
MOST_AT_ONCE = 8  # the most neighbours of a plan that are simulated
MOST_SLOWER = 0.06  # a neighbour's estimate may be slower than the plan's by at most this share
MOST_IN_ALL = 24_000  # forwards in the simulations of all steps, for some seconds
MOST_EXTRA = 4  # the most additional microbatches in flight


def improve(choice: Choice, tried: dict[Candidate, Ranked], max_delay: float | None = None) -> Choice:
    """Replace the best plans of a ranking by faster neighbours until no neighbour gains `GAIN`, or the simulations take too long.

    New simulations are added to `tried`. A plan of a new kind is added; another plan replaces the plan of its kind if it is better.
    """
    near, found, count, spent = dict[object, Ranked](), list[Ranked](), 0, 0
    for one in in_order([one for one in (*choice.ranked, *tried.values()) if _can_step(one)]):
        is_near = one.samples_per_second * (1 + NEAR) >= choice.ranked[0].samples_per_second
        # Would it be faster than its rival if all devices computed all the time?
        if is_near and one.samples_per_second > (1 - one.bubble) * (1 + WORTH) * choice.rival(one.candidate):
            near.setdefault((one.candidate.starts, one.candidate.replicas), one)
    for one in list(near.values())[:STARTS]:
        best, is_better = one, True
        while is_better and spent + choice.forwards(best.candidate) <= MOST_IN_ALL:  # neighbours take about as long
            now, others = _near(choice, best, max_delay)
            is_better, simulated, count = False, 0, count + len(others)
            for step in _steps(choice, best, now, others):
                if simulated == MOST_AT_ONCE or is_better:
                    break
                if step in tried or max(choice.computing(step)) >= best.seconds * (1 - GAIN):
                    continue
                if spent + (effort := choice.forwards(step)) <= MOST_IN_ALL:
                    simulated, spent = simulated + 1, spent + effort
                    tried[step] = choice.simulate(step)
                    is_better = tried[step].candidate.over is None and tried[step].seconds < best.seconds * (1 - GAIN)
                    best = tried[step] if is_better else best
        found.append(best)
    return choice.with_more(found, count)


def _can_step(one: Ranked) -> bool:
    """Return whether a plan fits and can have neighbours: one stage on each rank, whole backwards, and no options that save memory."""
    candidate = one.candidate
    saves = candidate.options.max_in_flight is not None or candidate.shard_optimizer or candidate.offload is not None
    is_plain = candidate.has_one_stage_each and candidate.options.split_backward == "joint" and not saves
    return is_plain and candidate.over is None and one.simulated is not None


def _near(choice: Choice, ranked: Ranked, max_delay: float | None) -> tuple[Candidate, list[Candidate]]:
    """Return a plan with its estimate and without sums in parts, and the neighbours that may be faster by their estimates."""
    candidate = ranked.candidate
    estimates = choice.estimates(candidate.degrees, candidate.placed_on, candidate.extras)

    def like(one: Candidate) -> Candidate:
        """Return a neighbour on the plan's meshes, with the plan's order of devices."""
        placed = dataclasses.replace(one, placed_on=candidate.placed_on)
        return on_meshes(placed, candidate.degrees) if candidate.degrees.size > 1 else placed

    whole = dataclasses.replace(candidate, sum_parts=(), degrees=Degrees())
    now = estimates.candidate(whole.shape, whole.rows, whole.starts, whole.keep_together)
    assert now is not None, "a ranked plan is legal"
    least = (1 + MOST_SLOWER) * now.seconds
    if not candidate.sum_parts and now.seconds <= ranked.seconds:  # simulations are not faster than estimates
        least = min(least, (1 - GAIN) * ranked.seconds)
    near = [one for one in neighbours(whole, estimates) if one.over is None and one.is_within(max_delay) and one.seconds <= least]
    return like(now), list(map(like, near))


def _steps(choice: Choice, best: Ranked, now: Candidate, others: list[Candidate]) -> Iterator[Candidate]:
    """Yield the neighbours, the best estimates first, with sums in parts if the plan has them, and the plan with the other kind of sums."""
    for one in sorted((now, *others), key=lambda one: one.seconds):
        has_parts = bool(best.candidate.sum_parts) != (one is now)
        in_parts = with_sum_parts(one, *choice.meshes.of(one.degrees)) if has_parts else one
        yield from () if in_parts is None else (in_parts,)


def neighbours(candidate: Candidate, estimates: Estimates) -> Iterator[Candidate]:
    """Yield the plans that differ from a plan in one cut, in the stage of one replica, or in the number of microbatches in flight.

    Cuts move by 1, 2, 4, ... layers. A replica moves to one of the two busiest stages. If this is a neighbouring stage, the plan is also
    tried with the cut between both stages moved so that they compute for about as long. Only schedules without a flush may have different
    numbers of replicas.
    """
    rules, options, layers = jpipe.schedules.SCHEDULES[candidate.schedule], candidate.options, estimates.layers
    starts, replicas = candidate.starts, candidate.replicas
    ends = (*starts[1:], layers.count)

    def changed(starts: tuple[int, ...], replicas: tuple[int, ...], options: PlanOptions = options) -> Iterator[Candidate]:
        shape = dataclasses.replace(candidate.shape, replicas=replicas, options=options)
        found = estimates.candidate(shape, candidate.rows, starts, candidate.keep_together)
        yield from () if found is None else (found,)

    if "extra_in_flight" in rules.options and candidate.depth > 1:
        for extra in (options.extra_in_flight + more for more in (1, 2, -1, -2)):
            if 0 <= extra <= MOST_EXTRA:
                yield from changed(starts, replicas, options.model_copy(update={"extra_in_flight": extra}))
    for s in range(1, candidate.depth):
        reach = max(starts[s] - starts[s - 1], ends[s] - starts[s])
        for start in (starts[s] + (sign << power) for power in range(reach.bit_length()) for sign in (1, -1)):
            if starts[s - 1] < start < ends[s]:
                yield from changed((*starts[:s], start, *starts[s + 1 :]), replicas)
    if rules.flushes or options.update_every != "batch" or candidate.keep_together != "replicas" or candidate.agree is not None:
        return
    work = [0.0, *accumulate(layers.work(candidate.rows, 0))]
    loads = [(work[end] - work[start]) / count for start, end, count in zip(starts, ends, replicas, strict=True)]
    for target in sorted(range(candidate.depth), key=loads.__getitem__)[-2:]:
        for source in range(candidate.depth):
            moved = tuple(count - (s == source) + (s == target) for s, count in enumerate(replicas))
            if source != target and moved[source] and not any(candidate.microbatches % count for count in moved):
                yield from changed(starts, moved)
                if abs(source - target) == 1:
                    yield from changed(_balanced(starts, moved, max(source, target), work), moved)


def _balanced(starts: tuple[int, ...], replicas: tuple[int, ...], s: int, work: list[float]) -> tuple[int, ...]:
    """Return the cuts with the cut before stage s moved so that both its stages have about the same work per replica."""
    first, end = starts[s - 1], (*starts, len(work) - 1)[s + 1]
    before, after = replicas[s - 1 : s + 1]
    cut = min(range(first + 1, end), key=lambda cut: max((work[cut] - work[first]) / before, (work[end] - work[cut]) / after))
    return (*starts[:s], cut, *starts[s + 1 :])
