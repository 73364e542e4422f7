"""The costs of a layer for slices of the rows, from its costs for whole rows and for half rows.

A slice takes as long as rows that are as much shorter, except that it also attends to the positions before it. So the work for the slice
from position p to position q of n is (q - p)/n · (a + b · q/n); a and b follow from the work for half rows. So do the residuals. The part
of a time that does not grow with the rows, such as the time to read the weights, is the same for each slice.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

Bounds = tuple[float, float]
"""The beginning and the end of a slice, as shares of the positions of a row."""

SHORTEST = 256
"""The fewest positions of a slice, over all rows of a microbatch. Products of fewer are slow on accelerators."""

_OF_WORK = ("forward", "backward", "backward_weight", "forward_backward", "again")
_OF_SCRATCH = ("temporary", "temporary_more", "remaking", "remaking_next", "remaking_more")


def bounds_of(lengths: Sequence[int]) -> list[Bounds]:
    """Return where slices of these lengths begin and end."""
    return [*pairwise(end / sum(lengths) for end in accumulate(lengths, initial=0))]


def value_of(halves: tuple[float, float], bounds: Bounds) -> float:
    """Return the value of a slice if these are the values of the two halves of the positions."""
    begin, end = bounds
    pairs = max(4 * (halves[1] - halves[0]), 0.0)
    alone = max(sum(halves) - 3 / 4 * pairs, 0.0)
    return (end - begin) * (alone + pairs * end)


def residuals_of(halves: tuple[float, float], carry: float, bounds: Bounds) -> float:
    """Return the residuals of a slice. All but the last one also keep `carry`, which only later slices read."""
    begin, end = bounds
    return value_of((halves[0] - carry / 2, halves[1]), bounds) + (carry * (end - begin) if end < 1 else 0.0)


def layer_in_slices(layer: Any, sizes: Sequence[int], slices: Sequence[Bounds], number: int | None, saves: bool) -> Any:
    """Return a layer's cost for one of the slices of a row; for None the mean over all, with its carry among the residuals.

    If it `saves`, no slice attends to later ones.
    """
    halves, chosen = layer.halves, slices if number is None else [slices[number]]
    assert halves is not None, "rows can be cut"

    def mean(of: Callable[[Bounds], float]) -> float:
        return sum(map(of, chosen)) / len(chosen)

    def residuals(policy: str) -> float:
        later = (1 - halves.kept.get(policy, 1.0)) * halves.carry
        own = 0.0 if number is None or chosen[0][1] == 1 else share * halves.carry
        return max(mean(partial(residuals_of, halves.residuals[policy], later)) - own, 0.0)

    whole = 1.0 if saves else min(sum(value_of(halves.work, bounds) for bounds in slices), 1.0)
    share, work = sum(end - begin for begin, end in chosen) / len(chosen), mean(partial(value_of, halves.work)) / (whole or 1.0)

    def shrunk(name: str, n: int, factor: float) -> float | None:
        """Return a cost, with a factor for the part that grows with the rows."""
        value, first, last = (getattr(layer.at[k], name) for k in (n, 0, -1))
        if value is None:
            return None
        fixed = 0.0 if len(sizes) == 1 else first - (last - first) / (sizes[-1] - sizes[0]) * sizes[0]
        fixed = min(max(fixed, 0.0), value)
        return fixed + factor * (value - fixed)

    at = []
    for n, (rows, whole_rows) in enumerate(zip(sizes, layer.at, strict=True)):
        scratch = {name: size if (size := shrunk(name, n, share)) is None else math.ceil(size) for name in _OF_SCRATCH}
        kept = {
            policy: math.ceil(rows * residuals(policy) if policy in halves.residuals else share * size)
            for policy, size in whole_rows.residuals.items()
        }
        smaller = {
            name: {policy: math.ceil(share * size) for policy, size in getattr(whole_rows, name).items()} for name in ("shared", "stash")
        }
        outputs, flops = math.ceil(share * whole_rows.outputs), work * whole_rows.flops
        times = {name: shrunk(name, n, work) for name in _OF_WORK}
        at.append(whole_rows.model_copy(update={"outputs": outputs, "flops": flops, "residuals": kept, **times, **scratch, **smaller}))
    tensor = layer.tensor and layer.tensor.model_copy(
        update={"reduced": share * layer.tensor.reduced, "exchanged": share * layer.tensor.exchanged}
    )
    return layer.model_copy(update={"at": tuple(at), "tensor": tensor})
