"""ZB-V: two stages on each rank, in a V, and split backwards. No bubble; every rank holds the activations of 1F1B's first stage.

4 stages on 2 ranks, 3 microbatches per batch, 1 batch (`F3.1`: forward of microbatch 3 at weight version 1; `F3.1/1`: of the rank's
second stage; `I`, `W`: the halves of a backward, for inputs and for weights; `FI`: a forward and the first half; `*`: an update
follows):

    tick   |    0    1      2       3      4      5       6    7      8    9     10      11     12      13     14   15    16      17    18
    rank 0 | F0.0 F1.0   F2.0 FI0.0/1      - W0.0/1 FI1.0/1    - W1.0/1 B0.0      - FI2.0/1      - W2.0/1*   B1.0    - B2.0*       -     .
    rank 1 |    . F0.0 F0.0/1    F1.0 F1.0/1 I0.0/1  W0.0/1 F2.0   I0.0 W0.0 F2.0/1  I1.0/1 W1.0/1    I1.0 I2.0/1 I2.0  W1.0 W2.0/1* W2.0*

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. In flight: at most 2 d over both stages of each of d ranks. Bubble
of a batch for equal stages with F = I = W and m >= 2 d, where a stage takes F / 2: 0 from a rank's own first start to its own last end, and
(d - 1) F / 2 from the first start on any rank to the last end on any rank. The second one applies if ranks wait for each other at updates
(for the global norm). For other times see `auto_zero_bubble`. For fewer than 2 d - 1 microbatches the order is made for 2 d - 1, and the
missing microbatches are removed. Reference: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", section 4.
"""

from collections.abc import Sequence

from jpipe.schedules._interleaved import unequal_replicas
from jpipe.schedules._schedule import Action, Shape, counted
from jpipe.schedules._slots import in_turn, numbered


def _order(plan: Shape, p: int, microbatches: Sequence[int]) -> list[Action]:
    """Return the order of a rank. Chunk 0 is the rank's stage on the way down the V, chunk 1 its stage on the way back."""
    ranks = len(plan.pipeline_ranks)
    count = max(len(microbatches), 2 * ranks - 1)
    slots = [
        *in_turn("F0", 2 * (ranks - p) - 1),
        *in_turn("F1 F0", p),
        *in_turn("F1 I1 W1", ranks - p),
        *in_turn("F0 I0 W0 F1 I1 W1", count - ranks),  # towards the end no forward of chunk 0 is left
        *in_turn("I0 I1", p),
        *in_turn("I0 W0", ranks - p),
        *in_turn("W1", p),
        *in_turn("W0", p),
    ]
    return numbered(plan, p, microbatches, slots)


ZB_V = counted(
    name="zb_v",
    order=_order,
    layout="v",
    refusal=unequal_replicas,
)
