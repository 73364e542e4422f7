"""What overlaps computations on the devices at hand, from times of transfers and sums beside a computation."""

from collections.abc import Mapping

import jpipe
from jpipe.programs import Overlap

__all__ = ["assumed_words"]

ENOUGH = 0.5  # share of the shorter one of a computation and what is moved beside it that has to be hidden


def usual_overlap(platform: str) -> Overlap:
    """Return the assumed overlap where nothing is measured: on CPUs transfers and sums have threads of their own."""
    return "transfers and sums" if platform == "cpu" else "none"


def overlap_of(times: Mapping[jpipe.runtime.Moved, jpipe.runtime.OverlapTimes]) -> Overlap:
    """Return what overlaps according to these times. Sums without transfers count as nothing."""
    if times["transfer"].hidden <= ENOUGH:
        return "none"
    return "transfers and sums" if times["sum"].hidden > ENOUGH else "transfers"


def overlap_words(times: Mapping[jpipe.runtime.Moved, jpipe.runtime.OverlapTimes]) -> str:
    """Describe what was measured, in one line."""
    shares = " and ".join(f"{each.hidden:.0%} of a {name}" for name, each in times.items())
    return f"overlap: a computation hides {shares}, measured between devices; plans assume: {overlap_of(times)}"


def assumed_words(overlap: Overlap) -> str:
    """Describe what was not measured, in one line."""
    return f"overlap: not measured; plans assume: {overlap}"
