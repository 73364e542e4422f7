"""Interleaved 1F1B with split backwards: rank p delays each backward for weights by p backwards for inputs, so that it fills idle time.

4 stages on 2 ranks, 2 microbatches per batch, 1 batch (`F3.1`: forward of microbatch 3 at weight version 1; `F3.1/1`: of the rank's
second stage; `I`, `W`: the halves of a backward, for inputs and for weights; `FI`: a forward and the first half; `*`: an update
follows):

    tick   |    0    1      2       3 4       5      6      7       8       9   10    11    12
    rank 0 | F0.0 F1.0 F0.0/1  F1.0/1 .  I0.0/1 W0.0/1 I1.0/1 W1.0/1*    B0.0    - B1.0*     -
    rank 1 |    . F0.0   F1.0 FI0.0/1 - FI1.0/1      - W0.0/1    I0.0 W1.0/1* I1.0  W0.0 W1.0*

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. Let each of v chunks take F / v, I / v and W / v. Bubble of a
batch: (d - 1) (F + I - W) / v on d ranks, if m is a multiple of d and W <= min(F, I). Rank p begins with d - 1 - p fewer forwards than
under `interleaved_1f1b`. Fewer microbatches are in flight, so slow transfers cost more. Reference: Qi et al. 2023 for the halves, Narayanan
et al. 2021 for the order; ScheduleInterleavedZeroBubble of PyTorch.
"""

from jpipe.schedules._interleaved import flushed_order, unequal_replicas
from jpipe.schedules._schedule import counted

INTERLEAVED_ZERO_BUBBLE = counted(
    name="interleaved_zero_bubble",
    order=lambda plan, p, microbatches: flushed_order(plan, p, microbatches, 1, delay=p),
    layout="looped",
    refusal=unequal_replicas,
    takes_slices=True,
)
