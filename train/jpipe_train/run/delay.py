"""How old the weights are with which a plan computes its gradients, in one sentence."""

from itertools import groupby

import jpipe
from jpipe_train.console.terminal import count

_MOST_READ = 4096  # microbatches of a batch that are looked at
_MOST_LISTED = 6  # groups of stages with the same delay that are listed


def delays(plan: jpipe.Plan) -> tuple[tuple[int, int], ...]:
    """For each stage the least and the largest delay of a gradient in steady state.

    The delay is the number of updates between the weights that a microbatch reads and those that its gradient changes, by the formula of
    the schedule.
    """
    rules, found = jpipe.schedules.SCHEDULES[plan.schedule], []
    first = (plan.flush_first + jpipe.programs.batches_until_full(plan) + 1) * plan.microbatches
    for s in range(plan.depth):
        every = plan.microbatches_per_update(s)
        read = range(first, first + min(plan.microbatches, _MOST_READ))
        behind = [k // every - rules.version(plan, s, k) for k in read]
        found.append((min(behind), max(behind)))
    return tuple(found)


def delay_words(plan: jpipe.Plan) -> str:
    """The delay of a plan as a sentence; "" where every gradient is computed with the weights that it changes."""
    own = delays(plan)
    most = max(high for _, high in own)
    if not most:
        return ""
    begins = f"After {count(plan.flush_first, 'batch', 'es')} that flush, each" if plan.flush_first else "Each"
    if len(set(own)) == 1:
        low = own[0][0]
        old = count(most, "update") if low == most else f"{low} to {count(most, 'update')}"
        return f"{begins} gradient is computed with weights {old} old ({plan.schedule})."
    groups = [(stages[0], stages[-1], delay) for delay, group in groupby(range(plan.depth), own.__getitem__) for stages in (list(group),)]
    listed = [f"{_range(delay)} at {_stages(first, last)}" for first, last, delay in groups]
    if len(listed) > _MOST_LISTED:
        listed[1:-1] = ["…"]
    return f"{begins} gradient is computed with weights up to {count(most, 'update')} old ({plan.schedule}): {', '.join(listed)}."


def _range(delay: tuple[int, int]) -> str:
    low, high = delay
    return str(high) if low == high else f"{low} to {high}"


def _stages(first: int, last: int) -> str:
    return f"stage {first}" if first == last else f"stages {first} to {last}"
