"""Orders of ranks in a V, written without the numbers of the microbatches."""

from collections import Counter
from collections.abc import Iterable, Sequence

from jpipe.ops import OPS
from jpipe.schedules._schedule import Action, Shape, fused

Slot = tuple[str, int]
"""An op, and the number of the chunk for which a rank computes it."""


def in_turn(pattern: str, times: int) -> list[Slot]:
    """Read a pattern of slots, op and chunk, such as "F0 I1 W1", and repeat it `times` times."""
    return [(name[0], int(name[1:])) for name in pattern.split()] * max(times, 0)


def numbered(plan: Shape, p: int, microbatches: Sequence[int], slots: Iterable[Slot]) -> list[Action]:
    """Return the order of a rank: each slot's op takes its next microbatch at the slot's chunk. Slots without a microbatch are skipped.

    Args:
        plan: the plan.
        p: the pipeline rank.
        microbatches: the microbatches of one replica of the rank, in order.
        slots: the slots, for at least as many microbatches.
    """
    done, order = Counter[tuple[str, int]](), list[Action]()
    for op, chunk in slots:
        parts = OPS[op].parts
        n = done[parts[0], chunk]
        done.update((part, chunk) for part in parts)
        if n < len(microbatches):
            order.append(Action(op, plan.pipeline_ranks[p][chunk], microbatches[n]))
    return fused(plan, order)
