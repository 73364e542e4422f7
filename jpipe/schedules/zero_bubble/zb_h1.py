"""ZB-H1: 1F1B with the backward for weights of stage s delayed by s microbatches, so that it fills idle time.

3 stages, 4 microbatches per batch, 1 batch (`F3.1`: forward of microbatch 3 at weight version 1; `I`, `W`: the halves of a backward,
for inputs and for weights; `FI`: a forward and the first half; `*`: an update follows):

    tick   |    0    1     2 3     4    5     6    7    8     9   10   11    12    13
    rank 0 | F0.0 F1.0  F2.0 .     . B0.0     - F3.0 B1.0     - B2.0    - B3.0*     -
    rank 1 |    . F0.0  F1.0 .  I0.0 F2.0  I1.0 W0.0 F3.0  I2.0 W1.0 I3.0  W2.0 W3.0*
    rank 2 |    .    . FI0.0 - FI1.0    - FI2.0    - W0.0 FI3.0    - W1.0  W2.0 W3.0*

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. In flight: up to n_s = d - s microbatches wait for their backward
for inputs, as under 1F1B, and up to d for their backward for weights, at every stage. Bubble of a batch: (d - 1) (F + I - W) for equal
stages with W <= min(F, I) and m >= d. For F = I = W this is a third of 1F1B's bubble; for longer W the bubble is larger. Reference: Qi et
al. 2023, "Zero Bubble Pipeline Parallelism", section 2.2.
"""

from jpipe.schedules._schedule import counted, pipeline_in_flight
from jpipe.schedules.zero_bubble._delayed import delayed_weights

ZB_H1 = counted(
    name="zb_h1",
    order=lambda plan, p, microbatches: delayed_weights(plan, p, microbatches, pipeline_in_flight(plan, p), p),
    takes_slices=True,
)
