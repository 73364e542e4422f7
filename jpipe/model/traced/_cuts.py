"""The positions where a model is cut: the narrowest places of its chain, with one layer for each block."""

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax.extend.core as jex

from jpipe.errors import InputError, nearest
from jpipe.model.traced._blocks import LARGEST_SHARE, Path, module_of, one_per_block, params_of
from jpipe.model.traced._chain import Chain

Granularity = Literal["block", "finest"]

_TOLERANCE = 1.3  # a place is narrow if it passes at most this multiple of the bytes of the narrowest place


def choose_cuts(chain: Chain, paths: Sequence[Path], granularity: Granularity, prefixes: Sequence[str]) -> tuple[int, ...]:
    """Return the positions at which a model is cut.

    If the model has marks (`jpipe.cut`), or if there are `prefixes` of parameter names, only these decide: a layer begins before the first
    parameter with a prefix. Otherwise the model is cut where the fewest bytes pass; a piece with more than a quarter of its operations is
    cut again at its own narrowest places. Then `one_per_block` joins the pieces of one block. With granularity "finest" it is cut at every
    place between two parameters that is narrower than the places around it.

    Raise InputError if no parameter has a prefix, or a cut is between the places that read and write one array of layer state.
    """
    if chain.marks and not prefixes:
        positions = [position for position in chain.marks if 0 < position < len(chain.equations)]
        return _without_forbidden(chain, positions, "jpipe.cut")
    if prefixes:
        return _without_forbidden(chain, [position_before(chain, paths, prefix) for prefix in prefixes], "cuts")
    if granularity == "finest":
        return tuple(_local_minima(chain, _candidates(chain, paths, of_one_module=True)))
    chosen = sorted(_narrowest(chain, _candidates(chain, paths), 0, len(chain.equations)))
    return one_per_block(chain, paths, chosen)


def readers(chain: Chain) -> list[int]:
    """Return the equations that read parameters."""
    return [number for number, reads in enumerate(chain.reads) if any(leaf is not None and leaf < chain.num_params for leaf in reads)]


def _candidates(chain: Chain, paths: Sequence[Path], *, of_one_module: bool = False) -> list[int]:
    """Return the narrowest position between each two modules that are read in succession; of equally narrow ones, the last.

    A module that is read a second time counts as another module. With `of_one_module` a module may be cut where another is read with it,
    such as the scale that normalizes its kernel.
    """
    forbidden, widths = forbidden_positions(chain), chain.widths
    candidates: list[int] = []
    since: set[int] = set()  # the parameters that were read since the last candidate
    for first, second in itertools.pairwise(readers(chain)):
        before, after = (params_of(chain, chain.reads[number]) for number in (first, second))
        since.update(before)
        modules = [{module_of(paths[leaf]) for leaf in leaves} for leaves in (before, after)]
        allowed = [position for position in range(first + 1, second + 1) if not forbidden[position]]
        is_another = modules[0] != modules[1] if of_one_module else modules[0].isdisjoint(modules[1])
        if allowed and (is_another or not since.isdisjoint(after)):
            candidates.append(min(allowed, key=lambda position: (widths[position], -position)))
            since = set()
    return candidates


def forbidden_positions(chain: Chain) -> list[bool]:
    """Return for each position whether it is between reading and writing one leaf of the layer state."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, reads in enumerate(chain.reads):
        for leaf in reads:
            if leaf is not None and leaf >= chain.num_params:
                first.setdefault(leaf, number)
                last[leaf] = number
    forbidden = [False] * (len(chain.equations) + 1)
    for leaf, value in chain.new_state.items():
        written = chain.made.get(value) if not hasattr(value, "val") else None
        if written is None:
            continue
        begin, end = min(first.get(leaf, written), written), max(last.get(leaf, written), written)
        forbidden[begin + 1 : end + 1] = [True] * (end - begin)
    return forbidden


def _narrowest(chain: Chain, candidates: Sequence[int], begin: int, end: int) -> list[int]:
    inside = candidates[bisect.bisect_right(candidates, begin) : bisect.bisect_left(candidates, end)]
    if not inside:
        return []
    limit = _TOLERANCE * min(chain.widths[position] for position in inside)
    narrow = [position for position in inside if chain.widths[position] <= limit]
    chosen = list(narrow)
    for first, second in itertools.pairwise((begin, *narrow, end)):
        if chain.work[second] - chain.work[first] > LARGEST_SHARE * chain.work[-1]:
            chosen += _narrowest(chain, candidates, first, second)
    return chosen


def _local_minima(chain: Chain, candidates: Sequence[int]) -> list[int]:
    """Return the candidates that are not wider than their neighbours."""
    padded = [float("inf"), *(float(chain.widths[position]) for position in candidates), float("inf")]
    return [
        position
        for position, before, here, after in zip(candidates, padded, padded[1:], padded[2:], strict=False)
        if here <= min(before, after)
    ]


def position_before(chain: Chain, paths: Sequence[Path], prefix: str) -> int:
    """Return the narrowest position between the first reader of parameters with this prefix and the reader before it."""
    parts = tuple(prefix.replace(".", "/").split("/"))
    leaves = {leaf for leaf, path in enumerate(paths) if path[: len(parts)] == parts}
    reading = readers(chain)
    index = next((i for i, number in enumerate(reading) if leaves & chain.reads[number]), None)
    if not leaves or index is None:
        known = sorted({".".join(path[:length]) for path in paths for length in range(1, len(path) + 1)})
        raise InputError(f"cuts: no parameter that the model reads begins with '{prefix}'; {nearest(prefix, known)}")
    if index == 0:
        raise InputError(f"cuts: the first layer begins with '{prefix}', so there is nothing before it; remove '{prefix}' from cuts")
    positions = range(reading[index - 1] + 1, reading[index] + 1)
    return min(positions, key=lambda position: (chain.widths[position], -position))


def _without_forbidden(chain: Chain, positions: Sequence[int], where: str) -> tuple[int, ...]:
    forbidden = forbidden_positions(chain)
    for position in positions:
        if forbidden[position]:
            raise InputError(
                "a cut is between the places that read and write one array of layer state, such as batch statistics, which "
                "belongs to one layer",
                where=where,
                change="move the cut, or remove it",
            )
    return tuple(sorted(set(positions)))


# The same cuts in another trace: in evaluation, or for inputs of other shapes -----------------------------------------


def same_cuts(chain: Chain, like: Chain, positions: Sequence[int], ids: Callable[[], Sequence[str]], names: Sequence[str]) -> list[int]:
    """Return the positions where each layer reads the same parameters as in another trace of the model."""
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
                f"between the layers '{ids()[k]}' and '{ids()[k + 1]}' the model reads {where} in another order in "
                "evaluation, or for other shapes, than in training",
                where="from_model",
                change="name other cuts (cuts=…, jpipe.cut), or read the parameters in one order",
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
    """Return the first and last position that divide the reads of each leaf in the same way, and the last leaf that bounds them."""
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
