"""Naive model parallelism: one microbatch at a time passes through all stages and back. One worker computes while the others wait.

3 stages, 2 microbatches per batch, 1 batch (`F3.1`: forward of microbatch 3 at weight version 1; `*`: an update follows):

    tick   |    0    1     2 3 4    5 6    7 8    9   10     11 12 13    14 15    16 17
    rank 0 | F0.0    .     . . .    . . B0.0 - F1.0    .      .  .  .     .  . B1.0*  -
    rank 1 |    . F0.0     . . . B0.0 -    . .    . F1.0      .  .  . B1.0*  -     .  .
    rank 2 |    .    . FB0.0 - -    . .    . .    .    . FB1.0*  -  -     .  .     .  .

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. In flight: 1.
Reference: the baseline of PipeDream (SOSP 2019), section 2.1, figure 2.
"""

from jpipe.schedules._schedule import Schedule, one_forward_one_backward

NAIVE = Schedule(
    name="naive",
    flushes=True,
    order=lambda plan, p, microbatches: one_forward_one_backward(plan, p, microbatches, 1),
    in_flight=lambda plan, s: 1,
    closed_form="serial",
)
