"""Orders of ranks in a V, written without the numbers of the microbatches."""

from collections import Counter
from collections.abc import Iterable, Sequence

from jpipe.ops import OPS
from jpipe.schedules._schedule import Action, Shape, fused

Slot = tuple[str, int]
"""What a rank computes next, and for which of its chunks."""


def in_turn(pattern: str, times: int) -> list[Slot]:
    """Return slots like "F0 I1 W1", op and chunk, repeated `times` times."""
    return [(name[0], int(name[1:])) for name in pattern.split()] * max(times, 0)


def numbered(plan: Shape, p: int, microbatches: Sequence[int], slots: Iterable[Slot]) -> list[Action]:
    """Return the order of a rank: each op takes the next microbatch at its chunk; slots without one are skipped.

    Args:
        plan: the plan.
        p: the pipeline rank.
        microbatches: the microbatches of one of its replicas, in order.
        slots: for as many microbatches, or for more.
    """
    done, order = Counter[tuple[str, int]](), list[Action]()
    for op, chunk in slots:
        parts = OPS[op].parts
        n = done[parts[0], chunk]
        done.update((part, chunk) for part in parts)
        if n < len(microbatches):
            order.append(Action(op, plan.pipeline_ranks[p][chunk], microbatches[n]))
    return fused(plan, order)
