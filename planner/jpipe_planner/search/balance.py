"""Cuts of layers into stages that compute for about the same time."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

__all__ = ["balance"]

_TICKS = 1e15  # per second, so that sums and ties are exact


def balance(seconds: Sequence[float], stages: int, slowness: Sequence[float] | None = None) -> tuple[int, ...]:
    """Return the first layers of stages that minimize the longest one, evenly; a stage takes `slowness` times as long."""
    if slowness is not None and len(set(slowness)) > 1:
        return _by_speed(seconds, slowness)
    ticks = [round(value * _TICKS) for value in seconds]
    sums = [0, *accumulate(ticks)]
    low, high = max(max(ticks), -(-sums[-1] // stages)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        ends, longest, longer = _fill(sums, stages, middle)
        if ends[-1] == len(ticks):
            high = longest
        else:
            low = longer  # no smaller limit changes the cut
    return _spread(sums, stages, high)


def _fill(sums: list[int], stages: int, limit: int) -> tuple[list[int], int, int]:
    """Fill stages up to a limit. Return ends, longest stage, and the smallest limit with which a stage would take more."""
    ends, longest, longer = [0], 0, sums[-1]
    for s in range(stages):
        begin = ends[-1]
        most = len(sums) - stages + s  # each later stage needs a layer, too
        end = min(bisect_right(sums, sums[begin] + limit) - 1, most)
        longest = max(longest, sums[end] - sums[begin])
        if end < most:
            longer = min(longer, sums[end + 1] - sums[begin])
        ends.append(end)
    return ends, longest, longer


def _spread(sums: list[int], stages: int, limit: int) -> tuple[int, ...]:
    """Give each stage an equal share of the remaining layers within the limit, from the last stage to the first."""
    reach = _fill(sums, stages, limit)[0]  # the farthest ends of the earlier stages
    starts, end = [0] * stages, len(sums) - 1
    for s in range(stages - 1, 0, -1):
        first, last = max(bisect_left(sums, sums[end] - limit), s), min(reach[s], end - 1)
        share = sums[end] * s / (s + 1)
        start = bisect_left(sums, share, first, last)
        if start > first and share - sums[start - 1] < sums[start] - share:
            start -= 1
        starts[s] = end = start
    return tuple(starts)


def _by_speed(seconds: Sequence[float], slowness: Sequence[float]) -> tuple[int, ...]:
    """Return the earliest cut that minimizes the longest stage, by dynamic programming over the stages and their ends."""
    sums = np.concatenate([[0.0], np.cumsum(seconds)])
    each = np.where(np.tri(len(sums), k=-1, dtype=bool), sums[:, None] - sums, np.inf)  # by end and first layer
    longest, froms = np.where(np.arange(len(sums)), np.inf, 0.0), []
    for factor in slowness:
        options = np.maximum(longest, factor * each)
        froms.append(options.argmin(1))
        longest = options.min(1)
    starts, end = list[int](), len(seconds)
    for origins in reversed(froms):
        end = int(origins[end])
        starts.append(end)
    return tuple(reversed(starts))
