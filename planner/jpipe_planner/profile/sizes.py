"""Numbers at all microbatch sizes. If they grow linearly with the rows, only a few sizes are counted."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import jax

Numbers = Any
"""A tree of numbers: bytes are integers, FLOPs floats."""

_ROUNDING = 1e-6  # relative error of FLOPs


def count_at(sizes: Sequence[int], count: Callable[[int], Numbers], *, is_linear: bool = False) -> tuple[dict[int, Numbers], bool]:
    """Count something, a tree of numbers, at all microbatch sizes (sorted). Also return whether it is linear in the rows.

    In almost all models, shapes are proportional to the rows or do not depend on them. So first the smallest size, the largest size and a
    size in the middle are counted. If the middle size lies on the line through the other two, or it is known that it `is_linear`, this line
    gives the remaining sizes; otherwise they are counted, too.
    """
    first, middle, last = sizes[0], sizes[len(sizes) // 2], sizes[-1]
    counted = {rows: count(rows) for rows in dict.fromkeys((first, last) if is_linear else (first, middle, last))}
    if not is_linear:
        agrees = jax.tree.map(_agree, _on_line(counted, first, last, middle), counted[middle])
        is_linear = all(jax.tree.leaves(agrees))
    for rows in sizes:
        if rows not in counted:
            counted[rows] = _on_line(counted, first, last, rows) if is_linear else count(rows)
    return {rows: counted[rows] for rows in sizes}, is_linear


def count_by_policy(
    sizes: Sequence[int], policies: Sequence[str], count: Callable[[int, str], Numbers], *, is_linear: bool = False
) -> tuple[dict[tuple[int, str], Numbers], bool]:
    """Count something at all microbatch sizes with each recomputation policy, "none" first, as `count_at`.

    A policy keeps some of the arrays that are kept without recomputation. So if all their bytes are linear in the rows, each policy's bytes
    are, too.
    """

    def counted(policy: str, is_linear: bool) -> tuple[dict[int, Numbers], bool]:
        return count_at(sizes, lambda rows: count(rows, policy), is_linear=is_linear)

    plain, is_linear = counted(policies[0], is_linear)
    by_policy = {policies[0]: plain, **{policy: counted(policy, is_linear)[0] for policy in policies[1:]}}
    return {(rows, policy): by_policy[policy][rows] for rows in sizes for policy in policies}, is_linear


def _on_line(counted: dict[int, Numbers], first: int, last: int, rows: int) -> Numbers:
    """Return the numbers of a size on the line through the numbers of two other sizes. Bytes are rounded up."""
    if rows == first:
        return counted[first]
    share = Fraction(rows - first, last - first)

    def between(low: float, high: float) -> float:
        if isinstance(low, int) and isinstance(high, int):
            return low + math.ceil((high - low) * share)
        return low + (high - low) * float(share)

    return jax.tree.map(between, counted[first], counted[last])


def _agree(expected: float, actual: float) -> bool:
    if isinstance(expected, int) and isinstance(actual, int):
        return expected == actual
    return math.isclose(expected, actual, rel_tol=_ROUNDING)
