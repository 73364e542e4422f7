"""Determine whether transfers and sums overlap with computations on these devices, from their times beside a computation."""

from collections.abc import Mapping

import jpipe
from jpipe.programs import Overlap

__all__ = ["assumed_words"]

ENOUGH = 0.5  # a transfer or sum overlaps if more than this share of it, or of the computation if that is shorter, is hidden


def overlap_of(times: Mapping[jpipe.runtime.Moved, jpipe.runtime.OverlapTimes]) -> Overlap:
    """Return what overlaps with computations according to these times; "none" also if only sums overlap."""
    if times["transfer"].hidden <= ENOUGH:
        return "none"
    return "transfers and sums" if times["sum"].hidden > ENOUGH else "transfers"


def overlap_words(times: Mapping[jpipe.runtime.Moved, jpipe.runtime.OverlapTimes]) -> str:
    """Return one line that describes the measured overlap."""
    shares = " and ".join(f"{each.hidden:.0%} of a {name}" for name, each in times.items())
    return f"overlap: a computation hides {shares}, measured between devices; plans assume: {overlap_of(times)}"


def assumed_words(overlap: Overlap) -> str:
    """Return one line that describes an assumed overlap."""
    return f"overlap: not measured; plans assume: {overlap}"
