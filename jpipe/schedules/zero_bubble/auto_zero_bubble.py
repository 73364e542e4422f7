"""A schedule with a flush in which the plan holds the order of each rank, made from measured times by `greedy_order`, or by hand.

3 stages, 4 microbatches per batch, 1 batch, from `greedy_order` for F = I = W and a limit of 4 microbatches (`F3.1`: forward of microbatch
3 at weight version 1; `I`, `W`: the halves of a backward, for inputs and for weights; `FI`: a forward and the first half; `*`: an update):

    tick   |    0    1     2    3     4    5     6    7     8    9   10    11    12    13
    rank 0 | F0.0 F1.0  F2.0 F3.0     . B0.0     - B1.0     - B2.0    - B3.0*     -     .
    rank 1 |    . F0.0  F1.0 F2.0  I0.0 F3.0  I1.0 W0.0  I2.0 W1.0 I3.0  W2.0 W3.0*     .
    rank 2 |    .    . FI0.0    - FI1.0    - FI2.0    - FI3.0    - W0.0  W1.0  W2.0 W3.0*

Here ranks compute without a gap from their first start to their last end.

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. The order determines the microbatches in flight and the bubble. A
plan raises an error if its order is not complete, if a computation comes before one that it needs on the same rank, or if a stage takes
microbatches out of order. If an order deadlocks, `jpipe.lower` and `jpipe.Pipeline` raise an error that shows the grid. Reference: Qi et
al. 2023, "Zero Bubble Pipeline Parallelism", section 3.1.
"""

from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import SupportsIndex

from jpipe.errors import InputError, short
from jpipe.ops import OPS
from jpipe.schedules._schedule import Action, Ranks, Shape, counted, fused, most_in_flight
from jpipe.schedules.zero_bubble._greedy import Order, Problem, StageTimes, list_schedules, seconds
from jpipe.schedules.zero_bubble._order_text import as_text, read_order
from jpipe.schedules.zero_bubble.interleaved_zero_bubble import INTERLEAVED_ZERO_BUBBLE
from jpipe.schedules.zero_bubble.zb_h1 import ZB_H1
from jpipe.schedules.zero_bubble.zb_h2 import ZB_H2
from jpipe.schedules.zero_bubble.zb_v import ZB_V


def greedy_order(
    plan: Shape, costs: Sequence[StageTimes], *, limits: SupportsIndex | Iterable[SupportsIndex], latency: float = 0.0
) -> tuple[str, ...]:
    """Make an `order` for a plan from the times of its stages, under a memory limit, with the greedy rule of the zero-bubble paper.

    Each rank computes what is ready: backwards for inputs before forwards, and forwards before backwards for weights. The function tries
    several variants of this rule and the static zero-bubble schedules that fit, and returns the shortest order. The same arguments always
    give the same order.

    Args:
        plan: a plan with the stages, ranks, replicas and microbatches of the order, under any schedule that allows these ranks.
        costs: the times of each stage, such as `jpipe.programs.StageCost`.
        limits: the largest number of microbatches that a rank holds from the forward to the end of the backward, summed over the rank's
            stages; at least the number of these stages. One number for all ranks, or one for each rank.
        latency: the time that a message between two ranks takes, in the unit of the costs.

    Returns:
        The text of each rank's order, for `Plan(schedule="auto_zero_bubble", order=…)`.

    Raises:
        InputError: stages have different numbers of replicas, there is not one cost for each stage, or a limit is too small.

    Example:
        >>> from jpipe import Plan
        >>> from jpipe.programs import StageCost
        >>> plan = Plan.even("abcd", num_stages=2, schedule="zb_h1", microbatches=2)
        >>> greedy_order(plan, [StageCost(), StageCost()], limits=2)
        ('F0.0 F0.1 B0.0 B0.1', 'F1.0 I1.0 F1.1 I1.1 W1.0 W1.1')
    """
    ranks = plan.pipeline_ranks
    if len(set(plan.replicas)) > 1:
        raise InputError(
            f"greedy_order: expected the same number of replicas for each stage, found {list(plan.replicas)}; use one number for all"
        )
    if len(costs) != plan.depth:
        raise InputError(where="greedy_order", expected=f"{plan.depth} costs, one for each stage", found=len(costs))
    problem = Problem(ranks, costs, plan.microbatches // plan.replicas[0], _limits(limits, ranks), latency)
    timed = [(time, order) for order in (*list_schedules(problem), *_static_orders(plan, problem)) if (time := seconds(problem, order))]
    _, best = min(timed, key=lambda pair: pair[0])
    return tuple(as_text(entries) for entries in best)


def _limits(limits: object, ranks: Ranks) -> list[int]:
    """Return the limit of each rank."""
    least = [len(stages) for stages in ranks]
    values = [limits] * len(ranks) if isinstance(limits, Integral) else list(limits) if isinstance(limits, Iterable) else []
    if len(values) != len(ranks) or not all(isinstance(limit, Integral) for limit in values):
        expected = f"an integer, or one for each of {len(ranks)} ranks"
        raise InputError(where="greedy_order", key="limits", expected=expected, found=short(limits), change=f"give at least {least}")
    each = [int(limit) for limit in values]
    if any(limit < fewest for limit, fewest in zip(each, least, strict=True)):
        raise InputError(f"greedy_order: limits: expected at least {least} for {len(ranks)} ranks, found {short(limits)}; raise them")
    return each


def _static_orders(plan: Shape, problem: Problem) -> Iterator[Order]:
    """Yield the orders of the static zero-bubble schedules that can run on the ranks and stay within the limits."""
    for schedule in (ZB_H1, ZB_H2, ZB_V, INTERLEAVED_ZERO_BUBBLE):
        if schedule.refuses(plan) == "":
            order = tuple(_unfused(schedule.order(plan, p, range(problem.microbatches))) for p in range(len(plan.pipeline_ranks)))
            if all(most_in_flight(entries) <= limit for entries, limit in zip(order, problem.limits, strict=True)):
                yield order


def _unfused(order: Iterable[Action]) -> tuple[Action, ...]:
    return tuple(Action(op, s, k) for fused_op, s, k in order for op in OPS[fused_op].pieces)


def _order(plan: Shape, p: int, microbatches: Sequence[int]) -> list[Action]:
    order = read_order(plan)
    assert not isinstance(order, str), order
    return fused(plan, (entry._replace(microbatch=microbatches[entry.microbatch]) for entry in order[p]))


def _refusal(plan: Shape) -> str:
    if plan.options.order is None:
        how = "make one with jpipe.schedules.greedy_order, or write what each rank computes, such as 'F0.0 F0.1 I0.0 W0.0'"
        return f"the schedule 'auto_zero_bubble' needs an order for each rank, found none; {how}"
    return order if isinstance(order := read_order(plan), str) else ""


AUTO_ZERO_BUBBLE = counted(
    name="auto_zero_bubble",
    order=_order,
    layout="any",
    refusal=_refusal,
    options=("order", "order_limit"),
)
