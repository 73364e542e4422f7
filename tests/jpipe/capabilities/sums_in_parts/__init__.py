"""Tests of sums in parts."""

from jpipe.programs._instructions import Instruction


def part_summed(plan, i: Instruction) -> int | None:
    """Return the part of a stage that a sum is of; None: it is of the whole stage."""
    parts = len(plan.stages[plan.workers[i.worker][0]].sum_parts)
    return parts - 1 - i.following if parts else None
