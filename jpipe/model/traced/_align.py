"""The same cuts in another trace of a model: in evaluation, or for inputs of other shapes."""

import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.extend.core as jex

from jpipe.errors import InputError
from jpipe.model.traced._chain import Chain
from jpipe.model.traced._cuts import forbidden_positions


def same_cuts(chain: Chain, like: Chain, positions: Sequence[int], ids: Callable[[], Sequence[str]], names: Sequence[str]) -> list[int]:
    """Return the positions in a chain where each layer reads the same parameters as in another trace of the model.

    Args:
        chain: the trace to cut.
        like: the trace that is cut at `positions`.
        positions: of the cuts.
        ids: returns those of the layers, for messages.
        names: of the parameters and layer state, for messages.

    Raises:
        InputError: the traces read the parameters in another order.
    """
    theirs, ours = _positions_of(like), _positions_of(chain)
    same_params = all(theirs.get(leaf) == ours.get(leaf) for leaf in range(chain.num_params))
    if same_params and [equation.primitive for equation in chain.equations] == [equation.primitive for equation in like.equations]:
        return list(positions)
    marked = {name: position for position, name in chain.marks.items()}
    forbidden = forbidden_positions(chain)
    result: list[int] = []
    for k, position in enumerate(positions):
        if like.marks.get(position) in marked:
            result.append(marked[like.marks[position]])
            continue
        lower, upper, reason = _interval(theirs, ours, position, len(chain.equations))
        lower = max(lower, result[-1] if result else 0)
        allowed = [i for i in range(lower, upper + 1) if not forbidden[i]]
        if not allowed:
            where = f"'{names[reason]}'" if reason is not None else "its parameters"
            raise InputError(
                f"from_model: between the layers '{ids()[k]}' and '{ids()[k + 1]}' the model reads {where} in another order in evaluation, "
                "or for other shapes, than in training; name other cuts (cuts=…, jpipe.cut), or read the parameters in one order"
            )
        wanted = _alive(like, position)
        result.append(min(allowed, key=lambda i: (_alive(chain, i) != wanted, chain.widths[i], i)))
    return result


def _positions_of(chain: Chain) -> dict[int, list[int]]:
    positions: dict[int, list[int]] = {}
    for number, reads in enumerate(chain.reads):
        for leaf in reads:
            if leaf is not None and (leaf < chain.num_params or chain.new_state.get(leaf) is not chain.leaves[leaf]):
                positions.setdefault(leaf, []).append(number)
    return positions


def _interval(theirs: Mapping[int, list[int]], ours: Mapping[int, list[int]], position: int, end: int) -> tuple[int, int, int | None]:
    """Return the first and the last position with as many reads of each leaf before it, and the leaf that bounds it last."""
    lower, upper, reason = 0, end, None
    for leaf, reads in theirs.items():
        here = ours.get(leaf)
        if not here:
            continue
        before = bisect.bisect_left(reads, position)
        if before not in (0, len(reads)) and len(here) != len(reads):
            continue
        before = before if len(here) == len(reads) else (len(here) if before else 0)
        least = here[before - 1] + 1 if before else 0
        most = here[before] if before < len(here) else end
        if least > lower or most < upper:
            reason = leaf
        lower, upper = max(lower, least), min(upper, most)
    return lower, upper, reason


def _alive(chain: Chain, position: int) -> Counter[Any]:
    """Return the shapes and dtypes of the variables that pass a position."""
    alive = (var for var, made in chain.made.items() if made < position <= chain.last.get(var, -1) and not isinstance(var, jex.DropVar))
    return Counter((var.aval.shape, str(var.aval.dtype)) for var in alive)
