"""DualPipeV: two stages on each rank, in a V. In the steady state each forward is paired with a backward of an earlier microbatch.

4 stages on 2 ranks, 4 microbatches per batch, 1 batch (`F3.1`: forward of microbatch 3 at weight version 1; `F3.1/1`: of the rank's
second stage; `I`, `W`: the halves of a backward, for inputs and for weights; `*`: an update follows):

    tick   |    0    1      2      3      4      5      6    7      8    9     10   11     12     13     14     15 16     17 18      19 20     21   22      23    24
    rank 0 | F0.0 F1.0   F2.0 F0.0/1 I0.0/1 W0.0/1 F1.0/1 F3.0 B1.0/1    - F2.0/1 B0.0      - B2.0/1      - F3.0/1  .   B1.0  - B3.0/1*  -   B2.0    -   B3.0*     -
    rank 1 |    . F0.0 F0.0/1   F1.0 F1.0/1   F2.0 B0.0/1    - F2.0/1 B0.0      - F3.0 B1.0/1      - F3.0/1   B1.0  - B2.0/1  -    B2.0  - I3.0/1 I3.0 W3.0/1* W3.0*

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. In flight: at most 2 d + 1 over both stages of each of d ranks.
Only the last backwards of a rank are split. The forward and the backward of a pair run one after the other; DeepSeek's implementation
overlaps the transfers of one with the computation of the other. Let each stage take F / 2, I / 2 and W / 2. Bubble of a batch: (d - 1) F /
2 if F = I = W, and close to this otherwise. Needs m >= 2 d for each replica. Reference: DeepSeek 2025, github.com/deepseek-ai/DualPipe,
DualPipeV; Sea AI Lab 2025, "cut-in-half".
"""  # noqa: E501 - the timeline

from collections.abc import Sequence

from jpipe.schedules._interleaved import unequal_replicas
from jpipe.schedules._schedule import Action, Shape, counted
from jpipe.schedules._slots import Slot, in_turn, numbered


def _order(plan: Shape, p: int, microbatches: Sequence[int]) -> list[Action]:
    """Return the order of a rank. Chunk 0 is the rank's stage on the way down the V, chunk 1 its stage on the way back."""
    ranks = len(plan.pipeline_ranks)
    before_last = ranks - 1 - p
    split = [1 - n % 2 for n in range(p + 1, 2 * (p + 1))]  # the chunks of the last backwards, in turn
    split += [0] * before_last
    slots: list[Slot] = [
        *in_turn("F0", 2 * before_last),
        *in_turn("F0 F1", p + 1),
        *in_turn("I1 W1 F1", before_last),
        *in_turn("F0 B1 F1 B0", len(microbatches) - 2 * ranks + p + 1),
        *in_turn("B1 F1 B0", before_last),
        *(("B", 1 - n % 2) for n in range(p + 1)),
        *(("I", chunk) for chunk in split[: p + 1]),
        *(slot for n in range(before_last) for slot in in_turn(f"W{split[n]} I0", 1)),
        *(("W", chunk) for chunk in split[before_last:]),
    ]
    return numbered(plan, p, microbatches, slots)


def _refusal(plan: Shape) -> str:
    ranks, replicas = len(plan.pipeline_ranks), plan.replicas[0]
    if reason := unequal_replicas(plan):
        return reason
    if plan.microbatches < 2 * ranks * replicas:
        of = f" with {replicas} replicas" if replicas > 1 else ""
        return (
            f"the schedule 'dualpipe_v' needs at least {2 * ranks * replicas} microbatches for {plan.depth} stages on {ranks} ranks{of}, "
            f"found microbatches {plan.microbatches}; raise microbatches or use fewer stages"
        )
    return ""


DUALPIPE_V = counted(
    name="dualpipe_v",
    order=_order,
    layout="v",
    refusal=_refusal,
)
