"""ZB-H1: 1F1B with the backward for weights of stage s delayed by s microbatches, so that it fills what was idle.

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. Residuals or stashes of n_0 microbatches on every rank.
Bubble of a batch: (d - 1) (F + I - W) for W <= min(F, I). Reference: Qi et al. 2023, section 2.2.
"""

from collections.abc import Iterator, Sequence

from jpipe.schedules._schedule import Compute, Schedule, Shape, fused, in_flight_of, one_forward_one_backward, pipeline_in_flight


def delayed_weights(plan: Shape, p: int, microbatches: Sequence[int], ahead: int, delay: int) -> Iterator[Compute]:
    """1F1B where the backward for weights of a microbatch comes `delay` microbatches after that for inputs.

    Args:
        plan: with one stage for each rank.
        p: the rank, and its stage.
        microbatches: those of one of its replicas, in order.
        ahead: n_s, at least 1.
        delay: in microbatches.
    """
    order, weights = list[Compute](), iter(microbatches)
    for entry in one_forward_one_backward(plan, p, microbatches, ahead):
        order += [Compute("F", p, entry.microbatch)] if entry.is_forward else []
        if entry.gives_gradient:
            order.append(Compute("I", p, entry.microbatch))
            delay -= 1
            order += [Compute("W", p, next(weights))] if delay < 0 else []
    return iter(fused(plan, [*order, *(Compute("W", p, k) for k in weights)]))


def _order(plan: Shape, p: int, microbatches: Sequence[int]) -> Iterator[Compute]:
    return delayed_weights(plan, p, microbatches, pipeline_in_flight(plan, p), p)


ZB_H1 = Schedule(
    name="zb_h1",
    flushes=True,
    order=_order,
    in_flight=in_flight_of(_order),
)
