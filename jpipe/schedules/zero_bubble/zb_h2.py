"""ZB-H2: ZB-H1 with more microbatches in flight, so that ranks compute without a gap from their first forward to their last backward.

3 stages, 5 microbatches per batch, 1 batch (`F3.1`: forward of microbatch 3 at weight version 1; `I`, `W`: the halves of a backward,
for inputs and for weights; `FI`: a forward and the first half; `*`: an update follows):

    tick   |    0    1     2    3     4    5     6    7     8    9    10   11   12    13   14    15    16
    rank 0 | F0.0 F1.0  F2.0 F3.0  F4.0 B0.0     - B1.0     - B2.0     - B3.0    - B4.0*    -     .     .
    rank 1 |    . F0.0  F1.0 F2.0  I0.0 F3.0  I1.0 F4.0  I2.0 W0.0  I3.0 W1.0 I4.0  W2.0 W3.0 W4.0*     .
    rank 2 |    .    . FI0.0    - FI1.0    - FI2.0    - FI3.0    - FI4.0    - W0.0  W1.0 W2.0  W3.0 W4.0*

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. In flight: with n_s = d - s, up to 2 n_s - 1 microbatches wait for
their backward for inputs, and up to 2 d - 1 for their backward for weights, at every stage. Stage s delays the backward for weights by 2 s
microbatches. Bubble of a batch, from a rank's own first start to its own last end: (d - 1) (F + I - 2 W) for equal stages with F >= I >= W
and m >= 2 d - 1, so 0 for F = I = W. If ranks wait for each other at updates (for the global norm), they start together and lose this
advantage. Reference: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.3.
"""

from jpipe.schedules._schedule import counted, pipeline_in_flight
from jpipe.schedules.zero_bubble._delayed import delayed_weights

ZB_H2 = counted(
    name="zb_h2",
    order=lambda plan, p, microbatches: delayed_weights(plan, p, microbatches, 2 * pipeline_in_flight(plan, p) - plan.row_slices, 2 * p),
    takes_slices=True,
)
