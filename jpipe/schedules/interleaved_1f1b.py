"""Interleaved 1F1B: each rank runs v chunks in turn, which divides the bubble of 1F1B by v.

4 stages on 2 ranks, 2 microbatches per batch, 1 batch (`F3.1`: forward of microbatch 3 at weight version 1; `F3.1/1`: of the rank's
second stage; `*`: an update follows):

    tick   |    0    1      2       3 4 5        6 7 8       9 10    11 12    13 14
    rank 0 | F0.0 F1.0 F0.0/1  F1.0/1 . .   B0.0/1 - . B1.0/1*  -  B0.0  - B1.0*  -
    rank 1 |    . F0.0   F1.0 FB0.0/1 - - FB1.0/1* - -    B0.0  - B1.0*  -     .  .

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. Let each chunk take F / v and B / v. Bubble of a batch: (d - 1) (F
+ B) / v on d ranks, if m is a multiple of d. In return there are v times as many transfers, and more microbatches in flight. Reference:
Narayanan et al. 2021, section 2.2.
"""

from jpipe.schedules._interleaved import flushed_order, unequal_replicas
from jpipe.schedules._schedule import counted

INTERLEAVED_1F1B = counted(
    name="interleaved_1f1b",
    order=lambda plan, p, microbatches: flushed_order(plan, p, microbatches, 2),
    layout="looped",
    refusal=unequal_replicas,
    takes_slices=True,
)
