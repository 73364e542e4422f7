"""Slices of rows: a plan may cut the rows of each microbatch along their positions, and send slice after slice through the stages.

The forwards of the slices of a microbatch are in order, and the backwards in reverse. A layer that mixes positions gets a carry, which it
returned for the slice before (`Layer.carried`). In programs each slice counts as a microbatch: number k S + j is slice j of microbatch k
(`Plan.counted`). The losses and gradients of slices add up, so the numbers of a run do not change, except for rounding.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import pydantic

from jpipe._numbers import as_python, even_numbers
from jpipe.capabilities.protocol import Option
from jpipe.errors import InputError, short
from jpipe.schedules import SCHEDULES

if TYPE_CHECKING:
    import jpipe


def _checked(value: Any) -> Any:
    """Return a number of slices, a tuple of their lengths, or None for a single slice."""
    if isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping):
        value = tuple(map(as_python, value))
    else:
        value = as_python(value)
    numbers = value if isinstance(value, tuple) else (value,)
    if value is None:
        return None
    if not numbers or not all(type(number) is int and number >= 1 for number in numbers):
        raise ValueError(f"expected a number of slices, or a list of their lengths, found {short(value)}")
    return None if value == 1 or (len(numbers) == 1 and isinstance(value, tuple)) else value


Slices = Annotated[int | tuple[int, ...] | None, pydantic.BeforeValidator(_checked)]


def check(plan: "jpipe.Plan") -> None:
    """Check that the schedule has an order for slices, and that the other options can be combined with slices.

    Raises:
        InputError: they cannot.
    """
    if not SCHEDULES[plan.schedule].takes_slices:
        known = ", ".join(name for name, schedule in SCHEDULES.items() if schedule.takes_slices)
        raise _refused(f"one of the schedules with an order for slices, {known}", f"'{plan.schedule}'", "change the schedule")
    for name, alone, why in _ALONE:
        if (value := getattr(plan, name)) != alone:
            raise _refused(f"no {name}", short(value), f"remove {name}", why)
    for s, stage in enumerate(plan.stages):
        if stage.replicas > 1 or stage.shape:
            found = f"{stage.replicas} replicas" if stage.replicas > 1 else f"mesh {dict(stage.mesh)}"
            raise _refused("stages on one device, without replicas", f"stage {s} with {found}", "change the stage")


_ALONE = (
    ("offload", None, "carries between slices stay on the device"),
    ("links", None, "compressed messages draw random numbers for whole rows"),
    ("max_in_flight", None, "a stage holds all slices of a row before its first backward"),
    ("update_every", "batch", "an update needs all slices of its rows"),
    ("split_backward", "joint", "the halves of a backward have no order for slices"),
)
"""Options that cannot be combined with slices, each with its default and the reason."""


def _refused(expected: str, found: str, change: str, why: str = "") -> InputError:
    reason = f": {why}" if why else ""
    return InputError(key="slices", expected=expected, found=f"{found}{reason}", change=f"{change}, or remove slices")


def row_lengths(value: Any) -> tuple[int | None, ...]:
    """Return the length of each slice; None: it depends on the length of the rows."""
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


OPTION = Option(room="slices", field="slices", check=check, row_lengths=row_lengths)
