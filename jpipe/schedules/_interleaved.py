"""Orders of ranks that run several chunks in turn, after Megatron's interleaved 1F1B.

Microbatches come in groups. A rank runs the forwards of a group at its first chunk, then at its second chunk, and so on; then the next
group follows. Backwards go from the last chunk to the first. After a warm-up of (v - 1) g + a (d - 1 - p) forwards, rank p does a forward
and a backward in turn. Here d is the number of ranks, v the chunks of each rank, g the microbatches of a group, and a the number of
microbatches by which a rank runs ahead of the next one. If rows are cut into S slices, a group has whole rows, and the warm-up is longer by
S - 1.

Reference: Narayanan et al. 2021, section 2.2.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from jpipe.schedules._schedule import Action, Shape, backward_order, fused, pipeline_in_flight, pipeline_order, split_early

_AHEAD = 2
"""The value of a without a flush. Chunks make transfers more frequent; 2 microbatches ahead for each link hide their latency."""


def flushed_order(plan: Shape, p: int, microbatches: Sequence[int], ahead: int, delay: int | None = None) -> list[Action]:
    """Return the order of one batch.

    Args:
        plan: a plan with looped ranks.
        p: the pipeline rank.
        microbatches: the microbatches of one replica of the rank, in order.
        ahead: a, as in the module's docstring.
        delay: the number of backwards for inputs by which a backward for weights is delayed; None: backwards are not split.
    """
    rounds, slices = max(len(microbatches) // len(plan.pipeline_ranks), 1), plan.row_slices
    group = -(-len(microbatches) // (rounds * slices)) * slices  # whole rows
    return fused(plan, _interleaved(plan, p, microbatches, group, 0, ahead, delay))


def endless_order(plan: Shape, p: int, microbatches: Sequence[int]) -> Iterable[Action]:
    """Return the order without a flush, with groups of microbatches that may span batches. With one chunk per rank it is 1F1B."""
    if plan.depth == len(plan.pipeline_ranks):
        return pipeline_order(plan, p, microbatches)
    replicas, group, slices = plan.replicas[0], len(plan.pipeline_ranks) * plan.row_slices, plan.row_slices
    rows = max(microbatches[0] - plan.options.flush_first * plan.microbatches, 0) // slices
    begun = rows // replicas * slices % group
    order = fused(plan, _interleaved(plan, p, microbatches, group, begun, _AHEAD, None))
    return split_early(order) if plan.options.split_backward == "early" else order


def _interleaved(
    plan: Shape, p: int, microbatches: Sequence[int], group: int, begun: int, ahead: int, delay: int | None
) -> Iterator[Action]:
    """Return the order of whole groups, leaving out missing microbatches.

    The first group lacks its first `begun` microbatches; the last group may lack some at its end.
    """
    stages, count = plan.pipeline_ranks[p], len(microbatches)
    groups = [range(first, first + group) for first in range(-begun, count, group)]
    forwards = [(s, n) for numbers in groups for s in stages for n in numbers]
    backwards = [(s, n) for numbers in groups for s in reversed(stages) for n in backward_order(plan, numbers)]
    warm_up = (len(stages) - 1) * group + ahead * (len(plan.pipeline_ranks) - 1 - p) + plan.row_slices - 1
    order = [("F", *visit) for visit in forwards[:warm_up]]
    for i, visit in enumerate(backwards):
        order += [("F", *forward) for forward in forwards[warm_up + i : warm_up + i + 1]]
        order.append(("B" if delay is None else "I", *visit))
        if delay is not None and i >= delay:
            order.append(("W", *backwards[i - delay]))
    if delay:
        order += [("W", *visit) for visit in backwards[-delay:]]
    return (Action(op, s, microbatches[n]) for op, s, n in order if 0 <= n < count)


def endless_done(plan: Shape, s: int, k: int) -> int:
    """Return `Schedule.done` of `endless_order`: the number of backwards that a replica of stage s has done before the forward of k.

    The forward of microbatch b of group a is the rank's forward number i, over all its chunks. Before it the rank has done its backwards up
    to number i - w - 1, where w is the warm-up. Among every v g backwards, g are of stage s.
    """
    rows, number = divmod(k, plan.row_slices)
    n = rows // plan.replicas[s] * plan.row_slices + number  # among the microbatches of the replica
    if plan.depth == len(plan.pipeline_ranks):
        return max(n - pipeline_in_flight(plan, s) + 1, 0)
    ranks = len(plan.pipeline_ranks)
    group, chunks = ranks * plan.row_slices, plan.depth // ranks
    c, p = divmod(s, ranks)
    a, b = divmod(n, group)
    warm_up = (chunks - 1) * group + _AHEAD * (ranks - 1 - p) + plan.row_slices - 1
    visits = group * (chunks * a + c) + b - warm_up  # backwards of all chunks that the rank has done
    whole, remainder = divmod(visits - group * (chunks - 1 - c), group * chunks)
    return max(whole * group + min(remainder, group), 0)


def endless_in_flight(plan: Shape, s: int) -> int:
    """Return `Schedule.in_flight` of `endless_order`."""
    if plan.depth == len(plan.pipeline_ranks):
        return pipeline_in_flight(plan, s)
    slices, replicas = plan.row_slices, plan.replicas[0]
    group = len(plan.pipeline_ranks) * slices
    late = range(100 * group, 101 * group)  # once the pipeline is full, all groups are the same
    return max(n - endless_done(plan, s, n // slices * slices * replicas + n % slices) for n in late) + 1


def endless_period(plan: Shape) -> int:
    """Return `Schedule.period` of `endless_order`: groups may begin in one batch and end in the next."""
    if plan.depth == len(plan.pipeline_ranks):
        return 1
    rows = plan.microbatches // plan.row_slices // plan.replicas[0]
    return math.lcm(rows, len(plan.pipeline_ranks)) // rows


def unequal_replicas(plan: Shape) -> str:
    """Return why a schedule that needs equally many replicas of each stage cannot run this plan, or ""."""
    if len(set(plan.replicas)) > 1:
        several = " with several stages on a rank" if plan.depth > len(plan.pipeline_ranks) else ""
        actual = f"found replicas {list(plan.replicas)}; give all stages the same number"
        return f"the schedule '{plan.schedule}'{several} needs equally many replicas of each stage, {actual}"
    return ""
