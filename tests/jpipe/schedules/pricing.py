"""Plans of equal stages, their times and their memory."""

from jpipe import Plan, lower, simulate
from jpipe.programs import StageCost
from jpipe.schedules import SCHEDULES


def names(count):
    """Return `count` names of layers."""
    return [f"layer{n}" for n in range(count)]


def plan_of(schedule, ranks, chunks, microbatches, **fields):
    """Return a plan with one layer per stage."""
    stages = ranks * chunks
    return Plan.even(names(stages), stages, schedule, microbatches, chunks_per_rank=chunks, **fields)


class Priced:
    """One batch where each stage takes f for a forward, i and w for the halves of a backward, and transfers are free.

    Attributes:
        idle: of each rank from the first start of all to the last end of all.
        idle_between: of each rank, from its first start to its last end.
        seconds: from the first start to the last end.
    """

    def __init__(self, plan, f, i, w):
        cost = StageCost(forward=float(f), backward=float(i + w), backward_input=float(i), backward_weight=float(w))
        prediction = simulate(lower(plan, 1), [cost] * plan.depth)
        busy = [sum(span.end - span.start for span in spans) for spans in prediction.timeline]
        self.seconds, self.bubble = prediction.seconds, prediction.bubble
        self.idle = [self.seconds - time for time in busy]
        self.idle_between = [spans[-1].end - spans[0].start - time for spans, time in zip(prediction.timeline, busy, strict=True)]


def order_of(plan, p, replica=0, batches=1):
    """Return the computations of a rank in order."""
    return list(SCHEDULES[plan.schedule].computations(plan, p, replica, 0, batches))


def most_in_flight(order, ends):
    """Return the maximum number of microbatches in flight on a rank, from their forward to the entry for which `ends` is true."""
    in_flight = most = 0
    for entry in order:
        in_flight += entry.is_forward
        most = max(most, in_flight)
        in_flight -= ends(entry)
    return most
