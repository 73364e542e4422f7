"""Cut a row of layers into stages that compute equally long."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

_TICKS = 1e15  # a second, so that sums and ties are exact


def balance(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """The cut into contiguous stages whose longest stage is as short as can be; among those an even one.

    Args:
        seconds: of each layer.
        stages: how many, at most as many as layers.

    Returns:
        The first layer of each stage.
    """
    ticks = [round(value * _TICKS) for value in seconds]
    sums = [0, *accumulate(ticks)]
    low, high = max(max(ticks), -(-sums[-1] // stages)), sums[-1]
    while low < high:
        middle = (low + high) // 2
        ends, longest, longer = _fill(sums, stages, middle)
        if ends[-1] == len(ticks):
            high = longest
        else:
            low = longer  # with less than this nothing changes
    return _spread(sums, stages, high)


def _fill(sums: list[int], stages: int, limit: int) -> tuple[list[int], int, int]:
    """Fill stage after stage up to a limit: where each ends, the longest, and the smallest limit that would fill one of them more."""
    ends, longest, longer = [0], 0, sums[-1]
    for s in range(stages):
        begin = ends[-1]
        most = len(sums) - stages + s  # every later stage gets a layer too
        end = min(bisect_right(sums, sums[begin] + limit) - 1, most)
        longest = max(longest, sums[end] - sums[begin])
        if end < most:
            longer = min(longer, sums[end + 1] - sums[begin])
        ends.append(end)
    return ends, longest, longer


def _spread(sums: list[int], stages: int, limit: int) -> tuple[int, ...]:
    """Within the limit, from the last stage on, give each stage its even share of what is left."""
    reach = _fill(sums, stages, limit)[0]  # how far the stages before can get
    starts, end = [0] * stages, len(sums) - 1
    for s in range(stages - 1, 0, -1):
        first, last = max(bisect_left(sums, sums[end] - limit), s), min(reach[s], end - 1)
        share = sums[end] * s / (s + 1)
        start = bisect_left(sums, share, first, last)
        if start > first and share - sums[start - 1] < sums[start] - share:
            start -= 1
        starts[s] = end = start
    return tuple(starts)
