"""Group traced equations into layers: by block, by small module; merge small leftovers into a neighbour."""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from jpipe.model.traced._chain import Chain, is_contraction

Path = tuple[str, ...]

LARGEST_SHARE = 0.25  # share of the model's operations; a piece with more is cut again at its narrowest places
_SMALL = 0.25  # share of a layer's mean operations; a piece with fewer, outside of numbered blocks, joins its neighbour


@dataclass(frozen=True)
class _Pieces:
    """The pieces of a chain that is cut at some positions."""

    chain: Chain  # the model
    paths: Sequence[Path]  # the paths of its parameters
    positions: Sequence[int]  # the positions between the pieces

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """For each piece the number of its first equation, and the number after its last equation."""
        return list(itertools.pairwise((0, *self.positions, len(self.chain.equations))))

    @cached_property
    def first_read(self) -> list[list[Path]]:
        """For each piece the parameters that no earlier piece reads."""
        seen: set[int] = set()
        pieces: list[list[Path]] = []
        for begin, end in self.bounds:
            leaves = [leaf for reads in self.chain.reads[begin:end] for leaf in sorted(params_of(self.chain, reads))]
            pieces.append([self.paths[leaf] for leaf in dict.fromkeys(leaves) if leaf not in seen])
            seen.update(leaves)
        return pieces

    @cached_property
    def blocks(self) -> list[Path | None]:
        """The block of each piece, see `_blocks`."""
        return _blocks(self.first_read)

    def work(self, piece: int) -> int:
        """Return an estimate of the operations of a piece."""
        begin, end = self.bounds[piece]
        return int(self.chain.work[end] - self.chain.work[begin])

    def without(self, joined: Callable[[int], bool]) -> "_Pieces":
        """Return the pieces after two neighbours are joined at each position with a number that `joined` accepts."""
        return _Pieces(self.chain, self.paths, [position for i, position in enumerate(self.positions) if not joined(i)])


def one_per_block(chain: Chain, paths: Sequence[Path], positions: Sequence[int]) -> tuple[int, ...]:
    """Join the pieces that belong to one layer, and return the positions that remain.

    Four rules join pieces: all pieces of one numbered block; a piece without a matrix product, such as a norm, with a piece that has one;
    all pieces of one module, if they have at most a quarter of the model's operations; and a small piece outside of numbered blocks with
    its neighbour. A rule that would join the whole model is skipped.
    """
    pieces = _Pieces(chain, paths, positions)
    for join in (_within_blocks, _without_light, _within_modules, _without_small):
        joined = join(pieces)
        pieces = joined if joined.positions else pieces  # even a small model has at least two layers
    return tuple(pieces.positions)


def _within_blocks(pieces: _Pieces) -> _Pieces:
    """Join the pieces of one block."""
    blocks, ends = pieces.blocks, _ends(pieces)
    return pieces.without(lambda i: ends[i] is not None and ends[i] == blocks[i + 1])


def _ends(pieces: _Pieces) -> list[Path | None]:
    """Return the block of each piece; for a piece with several blocks, the block of its last parameter."""
    return [block or (_to_number(piece[-1], 1) if piece else None) for block, piece in zip(pieces.blocks, pieces.first_read, strict=True)]


def _without_light(pieces: _Pieces) -> _Pieces:
    """Join pieces without parameters in a product, convolution or look-up with the neighbour that fits better.

    Next to blocks of several modules, such pieces stay separate, so that the blocks stay equal.
    """
    chain, joined = pieces.chain, set[int]()
    kinds = [_kind(block, piece) for block, piece in zip(pieces.blocks, pieces.first_read, strict=True)]
    is_light = [
        kind < 2 and not any(params_of(chain, chain.reads[i]) and is_contraction(chain.equations[i]) for i in range(*bounds))
        for kind, bounds in zip(kinds, pieces.bounds, strict=True)
    ]
    for light, group in itertools.groupby(range(len(kinds)), key=is_light.__getitem__):
        members = list(group)
        is_numbered = all(kinds[i] for i in members)
        neighbours = [i for i in (members[0] - 1, members[-1] + 1) if 0 <= i < len(kinds) and kinds[i] < 2]
        if light and neighbours:
            nearest = min(neighbours, key=lambda i: 0 if is_numbered else kinds[i])
            joined.update(range(min(nearest, members[0]), max(nearest, members[-1])))
    return pieces.without(joined.__contains__)


def _kind(block: Path | None, piece: Sequence[Path]) -> int:
    """Return 2 for a piece that is a numbered block of modules, 1 for numbered modules, and 0 for any other piece."""
    if block is None or not _numbers(block):
        return int(any(map(_numbers, piece)))
    return 2 if any(len(path) > len(block) + 1 for path in piece) else 1


def _within_modules(pieces: _Pieces) -> _Pieces:
    """Join the pieces of a module without lists of blocks, unless they have more than a quarter of the model's operations."""
    modules = [[module_of(path) for path in piece] for piece in pieces.first_read]
    prefixes = [() if any(part.isdigit() for path in paths for part in path) else common_beginning(paths) for paths in modules]
    joined: set[int] = set()
    for length in range(1, max(map(len, prefixes), default=0) + 1):
        keys = [prefix[:length] if len(prefix) >= length and not _numbers(prefix[:length]) else i for i, prefix in enumerate(prefixes)]
        for _, group in itertools.groupby(range(len(keys)), key=lambda i: keys[i]):
            members = list(group)
            if sum(map(pieces.work, members)) <= LARGEST_SHARE * pieces.chain.work[-1]:
                joined.update(members[:-1])
    return pieces.without(joined.__contains__)


def _without_small(pieces: _Pieces) -> _Pieces:
    """Join each small piece outside of numbered blocks with its neighbour."""
    chain, ends = pieces.chain, _ends(pieces)
    is_numbered = [block is not None and _numbers(block) > 0 for block in ends]
    mean = chain.work[-1] / len(ends)
    kept: list[int] = []
    begin = 0
    for i, position in enumerate(pieces.positions):
        sizes = chain.work[position] - chain.work[begin], pieces.work(i + 1)
        begins_numbered = is_numbered[next((j for j, (start, _) in enumerate(pieces.bounds) if start == begin), 0)]
        if begins_numbered or is_numbered[i + 1] or min(sizes) >= _SMALL * mean:
            kept.append(position)
            begin = position
    return _Pieces(chain, pieces.paths, kept)


def _blocks(pieces: Sequence[Sequence[Path]]) -> list[Path | None]:
    """Return the block of each piece: the path of its parameters up to the first number, or the second if the first is a block of modules.

    A piece with parameters of several blocks, or of no block, gets None.
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
    """Return the path up to its `count`-th number, or the path of the module if it has no number."""
    module = module_of(path)
    numbered = [i for i, part in enumerate(module) if is_numbered(part)]
    return path[: numbered[min(count, len(numbered)) - 1] + 1] if numbered else module


def module_of(path: Path) -> Path:
    """Return the path of the module of a parameter; an array in a list, or at the top, counts as a module."""
    return path if path[-1].isdigit() or len(path) == 1 else path[:-1]


def _numbers(path: Path) -> int:
    return sum(map(is_numbered, path))


def common_beginning(paths: Iterable[Path]) -> Path:
    """Return the longest path with which all these paths begin."""
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    return tuple(parts[0] for parts in same)


def params_of(chain: Chain, reads: frozenset[int | None]) -> list[int]:
    """Return the numbers of the parameters among the values in `Chain.reads` of an equation."""
    return [leaf for leaf in reads if leaf is not None and leaf < chain.num_params]
