"""Cut a function in several parts that run one after the other, each of which makes some of its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jpipe.model.jaxprs._split import Halves, NotSplittable, split, undivided

_Flat = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class Part:
    """One of the parts of a function. It reads *free* arguments, which all parts can read, and arrays that are held for it.

    Attributes:
        run: (free arguments, held arrays) -> (results of this part, stash).
        held: shapes and dtypes of the held arrays; those of the first part are the other arguments of the function.
        kept: positions of the held arrays that are held for the next part, too, which reads them, and after them the stash.
    """

    run: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
    held: tuple[Any, ...]
    kept: tuple[int, ...] = ()


def cut(
    function: _Flat, free: Sequence[Any], held: Sequence[Any], part_of: Sequence[int], parts: int
) -> tuple[list[Part], NotSplittable | None]:
    """Cut a function in parts, with few bytes held from one to the next (see `split`).

    Args:
        function: a pure function of flat arguments, first the free ones, that returns flat results.
        free, held: shapes and dtypes of its arguments.
        part_of: for each result the number of the part that makes it.
        parts: how many there are.

    Returns:
        The parts. If the function has side effects and cannot be cut, the first part computes everything, and the error says why.
    """
    result, error = list[Part](), None
    for n in range(parts - 1):
        specs, in_first = [*free, *held], [number == n for number in part_of]
        try:
            halves = split(function, specs, in_first, [True] * len(free) + [False] * len(held))
        except NotSplittable as reason:
            halves, error = undivided(function, specs, in_first), reason
        kept = tuple(i - len(free) for i in halves.arguments if i >= len(free))
        result.append(Part(_first(halves), tuple(held), kept))
        function = _remaining(halves, len(free), kept)
        held = [*(held[i] for i in kept), *halves.stash]
        part_of = [number for number in part_of if number != n]
    return [*result, Part(_last(function), tuple(held))], error


def _first(halves: Halves) -> Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]:
    return lambda free, held: halves.first([*free, *held])


def _last(function: _Flat) -> Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]:
    return lambda free, held: (list(function(*free, *held)), [])


def _remaining(halves: Halves, free: int, kept: Sequence[int]) -> _Flat:
    """Return the second half as a function of the free arguments, those that are kept, and the stash."""
    place = {free + position: free + number for number, position in enumerate(kept)} | {i: i for i in range(free)}

    def second(*arguments: Any) -> list[Any]:
        return halves.second([arguments[place[i]] for i in halves.arguments], arguments[free + len(kept) :])

    return second
