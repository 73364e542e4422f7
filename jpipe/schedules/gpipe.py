"""GPipe: all forwards of a batch, then all backwards, then a flush.

3 stages, 3 microbatches per batch, 1 batch (`F3.1`: forward of microbatch 3 at weight version 1; `*`: an update follows):

    tick   |    0    1    2    3    4    5 6    7 8     9 10    11 12    13 14
    rank 0 | F0.0 F1.0 F2.0    .    .    . .    . .  B0.0  -  B1.0  - B2.0*  -
    rank 1 |    . F0.0 F1.0 F2.0    .    . . B0.0 -  B1.0  - B2.0*  -     .  .
    rank 2 |    .    . F0.0 F1.0 F2.0 B0.0 - B1.0 - B2.0*  -     .  .     .  .

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. In flight: m.
Bubble with equal stages: (d - 1) / (m + d - 1). Reference: PipeDream (SOSP 2019), section 2.2, figure 3; Huang et al. 2019.
"""

from jpipe.schedules._schedule import Schedule, one_forward_one_backward

GPIPE = Schedule(
    name="gpipe",
    flushes=True,
    order=lambda plan, p, microbatches: one_forward_one_backward(plan, p, microbatches, len(microbatches)),
    in_flight=lambda plan, s: plan.microbatches // plan.replicas[s],
    closed_form="fill and drain",
    takes_slices=True,
)
