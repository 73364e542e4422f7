"""PipeDream-Flush: one forward and one backward in turn, with a flush after each batch. It has GPipe's bubble, but fewer activations.

3 stages, 4 microbatches per batch, 1 batch (`F3.1`: forward of microbatch 3 at weight version 1; `*`: an update follows):

    tick   |    0    1     2 3 4     5 6    7     8    9   10     11 12   13    14 15    16 17
    rank 0 | F0.0 F1.0  F2.0 . .     . . B0.0     - F3.0 B1.0      -  . B2.0     -  . B3.0*  -
    rank 1 |    . F0.0  F1.0 . .  B0.0 - F2.0  B1.0    - F3.0   B2.0  -    . B3.0*  -     .  .
    rank 2 |    .    . FB0.0 - - FB1.0 -    - FB2.0    -    - FB3.0*  -    -     .  .     .  .

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. In flight: min(n_s, m) with n_s = d - s.
Bubble with equal stages: (d - 1) / (m + d - 1). Reference: PipeDream-2BW (ICML 2021), section 3.2, figure 3.
"""

from jpipe.schedules._schedule import Schedule, pipeline_in_flight, pipeline_order

PIPEDREAM_FLUSH = Schedule(
    name="pipedream_flush",
    flushes=True,
    order=pipeline_order,
    in_flight=lambda plan, s: min(pipeline_in_flight(plan, s), plan.microbatches // plan.replicas[s]),
    options=("extra_in_flight", "max_in_flight", "split_backward"),
    closed_form="1F1B",
    data_parallel=True,
    takes_slices=True,
)
