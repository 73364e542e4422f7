"""Where a model is cut: at the narrowest places of its chain, one layer for each block."""

import bisect
import itertools
import re
from collections.abc import Sequence
from typing import Literal

from jpipe.errors import InputError, nearest
from jpipe.model.traced._chain import Chain

Path = tuple[str, ...]
Granularity = Literal["block", "finest"]

_TOLERANCE = 1.3  # times the bytes of the narrowest place are still narrow
_LARGEST_SHARE = 0.25  # of the model's operations, above which a piece is cut again where it is narrowest
_SMALL = 0.25  # of the mean operations of a layer: what has fewer, outside of numbered blocks, joins its neighbour


def choose_cuts(chain: Chain, paths: Sequence[Path], granularity: Granularity, prefixes: Sequence[str]) -> tuple[int, ...]:
    """Return the positions at which a model is cut.

    Marks in the model (`jpipe.cut`), or `prefixes`, decide alone. Otherwise the model is cut where the fewest bytes pass; a piece of more
    than a quarter of its operations is cut again at its own narrowest places. Pieces of the same numbered block are joined.

    Args:
        chain: the model in training.
        paths: of the parameters.
        granularity: "block", or "finest" to cut at every place between two parameters that is narrower than what is around it.
        prefixes: of parameters; before the first that begins so, a layer begins.

    Raises:
        InputError: a prefix that no parameter has, or a place in the middle of layer state that is read and written.
    """
    if chain.marks and not prefixes:
        positions = [position for position in chain.marks if 0 < position < len(chain.equations)]
        return _without_forbidden(chain, positions, "jpipe.cut")
    if prefixes:
        return _without_forbidden(chain, [position_before(chain, paths, prefix) for prefix in prefixes], "cuts")
    candidates = _candidates(chain, paths)
    if granularity == "finest":
        return tuple(_local_minima(chain, candidates))
    chosen = sorted(_narrowest(chain, candidates, 0, len(chain.equations)))
    return _one_per_block(chain, paths, chosen)


def readers(chain: Chain) -> list[int]:
    """Return the equations that read parameters."""
    return [number for number, reads in enumerate(chain.reads) if any(leaf is not None and leaf < chain.num_params for leaf in reads)]


def _candidates(chain: Chain, paths: Sequence[Path]) -> list[int]:
    """Return the narrowest position between each two modules that are read, of equally narrow ones the last.

    A module that is read a second time counts as another one.
    """
    forbidden, widths = forbidden_positions(chain), chain.widths
    candidates: list[int] = []
    since: set[int] = set()  # the parameters that were read since the last candidate
    for first, second in itertools.pairwise(readers(chain)):
        before, after = (_params(chain, chain.reads[number]) for number in (first, second))
        since.update(before)
        modules = [{_module(paths[leaf]) for leaf in leaves} for leaves in (before, after)]
        allowed = [position for position in range(first + 1, second + 1) if not forbidden[position]]
        if allowed and (modules[0] != modules[1] or not since.isdisjoint(after)):
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
        if chain.work[second] - chain.work[first] > _LARGEST_SHARE * chain.work[-1]:
            chosen += _narrowest(chain, candidates, first, second)
    return chosen


def _local_minima(chain: Chain, candidates: Sequence[int]) -> list[int]:
    """Return the candidates that are no wider than those next to them."""
    padded = [float("inf"), *(float(chain.widths[position]) for position in candidates), float("inf")]
    return [
        position
        for position, before, here, after in zip(candidates, padded, padded[1:], padded[2:], strict=False)
        if here <= min(before, after)
    ]


def _one_per_block(chain: Chain, paths: Sequence[Path], positions: Sequence[int]) -> tuple[int, ...]:
    """Leave out the positions between two pieces of one block, and those around a small piece that is in no numbered block."""
    bounds = [0, *positions, len(chain.equations)]
    seen: set[int] = set()
    pieces: list[list[Path]] = []  # the parameters that each piece reads first
    for begin, end in itertools.pairwise(bounds):
        leaves = [leaf for reads in chain.reads[begin:end] for leaf in sorted(_params(chain, reads))]
        pieces.append([paths[leaf] for leaf in dict.fromkeys(leaves) if leaf not in seen])
        seen.update(leaves)
    blocks = _blocks(pieces)
    ends = [block or (_to_number(piece[-1], 1) if piece else None) for block, piece in zip(blocks, pieces, strict=True)]
    kept = [position for position, before, after in zip(positions, ends, blocks[1:], strict=False) if before is None or before != after]
    is_numbered = dict(zip(bounds, (block is not None and _numbers(block) > 0 for block in ends), strict=False))
    mean = chain.work[-1] / (len(kept) + 1)
    joined: list[int] = []
    for position, end in itertools.pairwise((*kept, len(chain.equations))):
        begin = joined[-1] if joined else 0
        sizes = chain.work[position] - chain.work[begin], chain.work[end] - chain.work[position]
        is_loose = not is_numbered[begin] and not is_numbered[position]
        if not is_loose or min(sizes) >= _SMALL * mean:
            joined.append(position)
    return tuple(joined)


def _blocks(pieces: Sequence[Sequence[Path]]) -> list[Path | None]:
    """Return the block of each piece: the path of its parameters to the first number, or to the second where that is a block of modules.

    None where its parameters are of several blocks, or of none.
    """
    firsts = [_common([_to_number(path, 1) for path in piece]) for piece in pieces]
    blocks: list[Path | None] = list(firsts)
    for block in set(filter(None, firsts)):
        members = [i for i, first in enumerate(firsts) if first == block]
        seconds = [_common([_to_number(path, 2) for path in pieces[i]]) for i in members]
        is_block = {
            second: any(len(path) > len(second) + 1 for i in members for path in pieces[i] if path[: len(second)] == second)
            for second in filter(None, seconds)
        }
        if len(is_block) > 1 and None not in seconds and all(_numbers(second) == 2 and modules for second, modules in is_block.items()):
            for i, second in zip(members, seconds, strict=True):
                blocks[i] = second
    return blocks


def _common(paths: Sequence[Path]) -> Path | None:
    return paths[0] if paths and all(path == paths[0] for path in paths) else None


_NUMBERED = re.compile(r"(?:.*_)?\d+")


def is_numbered(part: str) -> bool:
    """Return whether a part of a path is a number, or ends with one as in "Block_3"."""
    return _NUMBERED.fullmatch(part) is not None


def _to_number(path: Path, count: int) -> Path:
    """Return the path to its number of that count, or without a number to its last part."""
    module = _module(path)
    numbered = [i for i, part in enumerate(module) if is_numbered(part)]
    return path[: numbered[min(count, len(numbered)) - 1] + 1] if numbered else module


def _module(path: Path) -> Path:
    """Return the path of the module of a parameter; an array in a list, or at the top, is one by itself."""
    return path if path[-1].isdigit() or len(path) == 1 else path[:-1]


def _numbers(path: Path) -> int:
    return sum(map(is_numbered, path))


def _params(chain: Chain, reads: frozenset[int | None]) -> list[int]:
    return [leaf for leaf in reads if leaf is not None and leaf < chain.num_params]


def position_before(chain: Chain, paths: Sequence[Path], prefix: str) -> int:
    """Return the narrowest position between the first reader of the parameters with this prefix and the reader before it."""
    parts = tuple(prefix.replace(".", "/").split("/"))
    leaves = {leaf for leaf, path in enumerate(paths) if path[: len(parts)] == parts}
    reading = readers(chain)
    index = next((i for i, number in enumerate(reading) if leaves & chain.reads[number]), None)
    if not leaves or index is None:
        known = sorted({".".join(path[:length]) for path in paths for length in range(1, len(path) + 1)})
        raise InputError(f"cuts: no parameter that the model reads begins with '{prefix}'; {nearest(prefix, known)}")
    if index == 0:
        raise InputError(f"cuts: the first layer begins with '{prefix}', so there is nothing before it; leave it out")
    positions = range(reading[index - 1] + 1, reading[index] + 1)
    return min(positions, key=lambda position: (chain.widths[position], -position))


def _without_forbidden(chain: Chain, positions: Sequence[int], where: str) -> tuple[int, ...]:
    forbidden = forbidden_positions(chain)
    for position in positions:
        if forbidden[position]:
            raise InputError(
                f"{where}: a cut is between the places that read and write one array of layer state, such as batch statistics, which "
                "belongs to one layer; move the cut, or leave it out"
            )
    return tuple(sorted(set(positions)))
