"""Looped BFS: GPipe with several stages on a rank. All forwards chunk by chunk, then all backwards in reverse, then a flush.

4 stages on 2 ranks, 3 microbatches per batch, 1 batch (`F3.1`: forward of microbatch 3 at weight version 1; `F3.1/1`: of the rank's
second stage; `*`: an update follows):

    tick   |    0    1    2      3      4      5      6      7 8      9 10      11 12      13 14   15 16    17 18    19 20
    rank 0 | F0.0 F1.0 F2.0 F0.0/1 F1.0/1 F2.0/1      .      . . B0.0/1  -  B1.0/1  - B2.0/1*  - B0.0  -  B1.0  - B2.0*  -
    rank 1 |    . F0.0 F1.0   F2.0 F0.0/1 F1.0/1 F2.0/1 B0.0/1 - B1.0/1  - B2.0/1*  -    B0.0  - B1.0  - B2.0*  -     .  .

Version read at any stage: floor(k / m); staleness 0. Versions alive: 1. In flight: m at every stage. Bubble of a batch: (d - 1) (F + B) / v
on d ranks of v chunks, if each chunk takes F / v and B / v, m >= d and transfers are free. A stage finishes its batch before the rank
begins the backwards of its next stage, so that the sum over replicas has more time. Reference: Lamy-Poirier 2022, "Breadth-First Pipeline
Parallelism", section 4.
"""

from collections.abc import Sequence

from jpipe.schedules._schedule import Action, Schedule, Shape, backward_order, fused


def _order(plan: Shape, p: int, microbatches: Sequence[int]) -> list[Action]:
    stages = plan.pipeline_ranks[p]
    forwards = [Action("F", s, k) for s in stages for k in microbatches]
    backwards = [Action("B", s, k) for s in reversed(stages) for k in backward_order(plan, microbatches)]
    return fused(plan, [*forwards, *backwards])


LOOPED_BFS = Schedule(
    name="looped_bfs",
    flushes=True,
    order=_order,
    in_flight=lambda plan, s: plan.microbatches // plan.replicas[s],
    layout="looped",
    takes_slices=True,
)
