"""Describe the slices into which a plan cuts the rows."""

from typing import Any

import jpipe


def slices_words(pipe: jpipe.Pipeline, batch: Any) -> str:
    """Return a description such as `rows of 4096 positions in slices of 2432 + 1664`; "" for whole rows. Only the specs count."""
    if pipe.plan.counted.row_slices == 1:
        return ""
    positions = pipe.positions(batch)
    lengths = " + ".join(str(each.stop - each.start) for each in positions)
    return f"rows of {positions[-1].length} positions in slices of {lengths}"


def numbers_words(plan: jpipe.Plan) -> str:
    """Return a sentence, after a space, that says what the numbers in a timeline count if rows are cut; "" for whole rows."""
    count = plan.counted.row_slices
    return f" With {count} slices, numbers count slices: number n is slice n mod {count} of microbatch ⌊n / {count}⌋." if count > 1 else ""
