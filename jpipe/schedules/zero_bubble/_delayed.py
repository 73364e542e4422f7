"""The 1F1B order with delayed backwards for weights."""

from collections.abc import Sequence

from jpipe.schedules._schedule import Action, Shape, backward_order, fused, one_forward_one_backward


def delayed_weights(plan: Shape, p: int, microbatches: Sequence[int], ahead: int, delay: int) -> list[Action]:
    """Return the 1F1B order in which each backward for weights comes `delay` microbatches after its backward for inputs.

    Args:
        plan: a plan with one stage for each rank.
        p: the number of the rank and of its stage.
        microbatches: the microbatches of one replica of the rank, in order.
        ahead: n_s, at least 1.
        delay: the delay in microbatches.
    """
    order, weights = list[Action](), iter(backward_order(plan, microbatches))
    for entry in one_forward_one_backward(plan, p, microbatches, ahead):
        order += [Action("F", p, entry.microbatch)] if entry.is_forward else []
        if entry.gives_gradient:
            order.append(Action("I", p, entry.microbatch))
            delay -= 1
            order += [Action("W", p, next(weights))] if delay < 0 else []
    return fused(plan, [*order, *(Action("W", p, k) for k in weights)])
