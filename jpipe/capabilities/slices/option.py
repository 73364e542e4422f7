"""Slices of rows: a plan may cut the rows of each microbatch along their positions, and send slice after slice through the stages.

The forwards of the slices of a microbatch are in order, and the backwards in reverse. A layer that mixes positions gets a carry, which it
returned for the slice before (`Layer.carried`). In programs each slice counts as a microbatch: number k S + j is slice j of microbatch k
(`Plan.counted`). The losses and gradients of slices add up, so the numbers of a run do not change, except for rounding.
"""

import contextlib
import math
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic

from jpipe._numbers import as_python, even_numbers
from jpipe.capabilities.protocol import Exclusion, Option
from jpipe.errors import InputError, short
from jpipe.schedules import SCHEDULES

if TYPE_CHECKING:
    import jpipe


class ByCost(pydantic.BaseModel):
    """Slices that take equally long.

    Attributes:
        count: the number of slices.
        by: "cost": the lengths follow from the matrix products of the model; later slices have more, because they attend to earlier ones.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    count: Annotated[int, pydantic.Field(ge=1)]
    by: Literal["cost"]


def _checked(value: Any) -> Any:
    """Return a number of slices, a tuple of their lengths, the way to find lengths, or None for a single slice."""
    if isinstance(value, Mapping):
        with contextlib.suppress(pydantic.ValidationError):
            value = ByCost.model_validate({key: as_python(each) for key, each in value.items()})
    if isinstance(value, ByCost):
        return None if value.count == 1 else value
    is_list = isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
    value = tuple(map(as_python, value)) if is_list else as_python(value)
    numbers = value if is_list else (value,)
    if value is None:
        return None
    if not numbers or not all(type(number) is int and number >= 1 for number in numbers):
        raise ValueError(f"expected a number of slices, a list of their lengths, or {{count: number, by: cost}}, found {short(value)}")
    return None if value == 1 or (is_list and len(numbers) == 1) else value


Slices = int | tuple[int, ...] | ByCost
"""The slices of rows in a plan: their number, their lengths in positions, or a number of slices that take equally long."""
Field = Annotated[Slices | None, pydantic.BeforeValidator(_checked)]


def check(plan: "jpipe.Plan") -> None:
    """Check that the schedule has an order for slices."""
    if not SCHEDULES[plan.schedule].takes_slices:
        known = ", ".join(name for name, schedule in SCHEDULES.items() if schedule.takes_slices)
        expected = f"one of the schedules with an order for slices, {known}"
        raise InputError(key="slices", expected=expected, found=f"'{plan.schedule}'", change="change the schedule, or remove slices")


def row_lengths(value: Any) -> tuple[int | None, ...]:
    """Return the length of each slice; None: it depends on the length of the rows."""
    if isinstance(value, ByCost):
        return (None,) * value.count
    return value if isinstance(value, tuple) else (None,) * value


def lengths_of(value: Any, length: int) -> tuple[int, ...]:
    """Return the length of each slice of rows with `length` positions.

    Args:
        value: the value of the option in a plan.
        length: the number of positions of the rows.

    Raises:
        InputError: the rows have fewer positions than slices, or other positions than the slices together.
    """
    count = len(row_lengths(value))
    if length < count:
        raise InputError(
            where="plan", key="slices", expected=f"rows of at least {count} positions", found=length, change="use fewer slices"
        )
    if not isinstance(value, tuple):
        return even_numbers(length, count)
    if sum(value) != length:
        change = f"use lengths that sum to {length}, or the number {count}"
        raise InputError(where="plan", key="slices", expected=f"rows of {sum(value)} positions", found=length, change=change)
    return value


def lengths_by_cost(count: int, length: int, first: float, second: float) -> tuple[int, ...]:
    """Return the lengths of slices that take equally long. All but the last are multiples of a power of two, up to 128.

    A position of a slice is assumed to cost as much as the end of the slice says: a constant for its own products, and as much for each
    position up to the end of the slice, to which it attends.

    Args:
        count: the number of slices.
        length: the number of positions of the rows.
        first: the cost of a position in the first half of the rows.
        second: the cost of a position in the second half, which attends to the first half, too.
    """
    half = length // 2
    pair = max(second - first, 0.0) / (length - half)
    alone = max(first - pair * half, 0.0)

    def ends(cost: float) -> list[float]:
        found = [0.0]
        for _ in range(count):
            linear = alone + pair * found[-1]
            found.append(found[-1] + 2 * cost / (linear + math.sqrt(linear**2 + 4 * pair * cost)))
        return found

    least, most = 0.0, (alone + pair * length) * length
    for _ in range(100):
        middle = (least + most) / 2
        least, most = (middle, most) if ends(middle)[-1] < length else (least, middle)
    step = min(2 ** max((length // (8 * count)).bit_length() - 1, 0), 128)
    rounded = [*(step * round(end / step) for end in ends(most)[:-1]), length]
    lengths = tuple(after - before for before, after in pairwise(rounded))
    return lengths if min(lengths) > 0 else even_numbers(length, count)


OPTION = Option(
    room="slices",
    field="slices",
    check=check,
    exclusions=(Exclusion("slices", "stages.sum_parts", "the parts of a backward have no order for slices"),),
    row_lengths=row_lengths,
)
