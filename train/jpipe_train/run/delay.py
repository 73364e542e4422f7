"""The delay of a plan: the age of the weights that its gradients are computed with."""

from itertools import groupby

import jpipe
from jpipe_train.console.terminal import count

_MOST_READ = 4096  # microbatches of a batch that are examined
_MOST_LISTED = 6  # groups of stages with the same delay that are listed


def delays(plan: jpipe.Plan) -> tuple[tuple[int, int], ...]:
    """Return for each stage the smallest and the largest delay of a gradient in steady state.

    The delay is the number of updates between the weights that a microbatch reads and those that its gradient changes, by the formula of
    the schedule.
    """
    rules, ranges = jpipe.schedules.SCHEDULES[plan.schedule], []
    first = (plan.flush_first + jpipe.programs.batches_until_full(plan) + 1) * plan.microbatches
    for s in range(plan.depth):
        every = plan.microbatches_per_update(s)
        read = range(first, first + min(plan.microbatches, _MOST_READ))
        stage_delays = [k // every - rules.version(plan, s, k) for k in read]
        ranges.append((min(stage_delays), max(stage_delays)))
    return tuple(ranges)


def delay_words(plan: jpipe.Plan) -> str:
    """Describe the delay of a plan in a sentence, or return "" if every gradient is computed with the weights that it changes."""
    ranges = delays(plan)
    most = max(high for _, high in ranges)
    if not most:
        return ""
    subject = f"After {count(plan.flush_first, 'batch', 'es')} that flush, each" if plan.flush_first else "Each"
    if len(set(ranges)) == 1:
        low = ranges[0][0]
        age = count(most, "update") if low == most else f"{low} to {count(most, 'update')}"
        return f"{subject} gradient is computed with weights {age} old ({plan.schedule})."
    groups = [
        (stages[0], stages[-1], delay) for delay, group in groupby(range(plan.depth), ranges.__getitem__) for stages in (list(group),)
    ]
    listed = [f"{_range(delay)} at {_stages(first, last)}" for first, last, delay in groups]
    if len(listed) > _MOST_LISTED:
        listed[1:-1] = ["…"]
    return f"{subject} gradient is computed with weights up to {count(most, 'update')} old ({plan.schedule}): {', '.join(listed)}."


def _range(delay: tuple[int, int]) -> str:
    low, high = delay
    return str(high) if low == high else f"{low} to {high}"


def _stages(first: int, last: int) -> str:
    return f"stage {first}" if first == last else f"stages {first} to {last}"
