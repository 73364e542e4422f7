"""PipeDream-2BW: 1F1B without a flush, with two weight versions and one update every m microbatches.

3 stages, 3 microbatches per batch, 2 batches (`F3.1`: forward of microbatch 3 at weight version 1; `*`: an update follows):

    tick   |    0    1     2 3 4     5 6    7      8    9   10    11   12    13    14   15   16     17 18   19    20 21    22 23
    rank 0 | F0.0 F1.0  F2.0 . .     . . B0.0      - F3.0 B1.0     - F4.0 B2.0*     - F5.0 B3.0      -  . B4.0     -  . B5.0*  -
    rank 1 |    . F0.0  F1.0 . .  B0.0 - F2.0   B1.0    - F3.0 B2.0*    -  F4.0  B3.0    - F5.0   B4.0  -    . B5.0*  -     .  .
    rank 2 |    .    . FB0.0 - - FB1.0 -    - FB2.0*    -    - FB3.0    -     - FB4.0    -    - FB5.0*  -    -     .  .     .  .

Version read at any stage: max(floor(k / m) - 1, 0): W(t + 1) = W(t) - lr * grad f(W(t - 1)), staleness 1. Versions alive: 2. Legal if m >=
d and at every stage m >= r_s (n_s - 1), or m >= r_s n_s for r_s > 1. With w replicas of every stage this is m / w >= d, as the paper
requires. With extra_in_flight e it is m >= (1 + e) (d - 1) without replicas, and m / w >= (1 + e) (d - 1) + 1 with replicas: the additional
microbatch hides their sum. p ranks of several stages have the order of `interleaved_1f1b` without a flush. They need m >= 2 (p - 1), one
more for odd p, and m / r >= 2 p with r > 1 replicas. Reference: PipeDream-2BW (ICML 2021), sections 3.1 and 3.3, figure 2.
"""

import math

from jpipe.schedules._interleaved import (
    endless_done,
    endless_in_flight,
    endless_order,
    endless_period,
    unequal_replicas,
)
from jpipe.schedules._schedule import Schedule, Shape, pipeline_in_flight


def _refusal(plan: Shape) -> str:
    ranks, replicated = len(plan.pipeline_ranks), max(plan.replicas) > 1
    if plan.depth == ranks:
        # A stage reads W(t) after all but the last n_s - 1 microbatches of batch t; a sum over replicas delays this by one microbatch.
        needs = [r * (pipeline_in_flight(plan, s) - 1 + (r > 1)) for s, r in enumerate(plan.replicas)]
        common, several = math.lcm(*plan.replicas), ""
        least = -(-max(plan.depth, *needs) // common) * common
    elif reason := unequal_replicas(plan):
        return reason
    else:  # the same condition, counted in the order: 2 (p - 1) on p ranks, one more for odd p; 2 p per replica with several replicas
        least, several = 2 * ranks * plan.replicas[0] if replicated else 2 * (ranks - 1) + ranks % 2, f" on {ranks} ranks"
        least *= plan.row_slices
    if plan.microbatches >= least:
        return ""
    extra = f" with extra_in_flight {plan.options.extra_in_flight}" if plan.options.extra_in_flight else ""
    replicas = f" with replicas {list(plan.replicas)}" if replicated else ""
    if plan.row_slices > 1:
        common = math.lcm(*plan.replicas)
        extra, least = f"{extra} and {plan.row_slices} slices", -(-least // (plan.row_slices * common)) * common
    found = plan.microbatches // plan.row_slices
    return (
        f"the schedule 'pipedream_2bw' needs at least {least} microbatches for {plan.depth} stages{several}{replicas}{extra}, found "
        f"microbatches {found}; raise microbatches or use fewer stages{' or replicas' if replicated else ''}"
    )


PIPEDREAM_2BW = Schedule(
    name="pipedream_2bw",
    flushes=False,
    order=endless_order,
    in_flight=endless_in_flight,
    done=endless_done,
    period=endless_period,
    layout="looped",
    formula=lambda plan, s, k: max(k // plan.microbatches - 1, 0),
    versions_alive=lambda plan, s: 2,
    refusal=_refusal,
    options=("extra_in_flight", "max_in_flight", "flush_first", "split_backward"),
    closed_form="1F1B",
    takes_slices=True,
)
