"""Tokens of documents as one sequence, in one or more shards, read in pieces from memory or from files."""

import bisect
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int32, Int64

from jpipe import InputError

_BLOCK = 512  # numbers of a file that are read at once to search in them
_HASHED, _MOST_HASHED = 2**20, 2**28  # numbers that are hashed at once, and in all of an array; of a longer one, some parts


@runtime_checkable
class Numbers(Protocol):
    """An array in memory, or in a file (`jpipe_train.data.files.file_array.FileArray`): a slice of it is in memory."""

    @property
    def size(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


@dataclass(frozen=True)
class Shard:
    """A part of the documents; no document continues in the next shard.

    Attributes:
        name: for messages.
        size: how many tokens.
        tokens: gives them, of an unsigned type.
        ends: gives the positions in this shard behind the last token of each document, rising; None: they are not known.
        answers: gives the positions in this shard of the first token of each document's answer, where documents are prompts with answers.
    """

    name: str
    size: int
    tokens: Callable[[], Numbers]
    ends: Callable[[], Numbers] | None = None
    answers: Callable[[], Numbers] | None = None


@dataclass(frozen=True)
class Documents:
    """The tokens of all shards as one sequence.

    Attributes:
        shards: in their order.
        vocab_size: every token is below this, which is checked as tokens are read.
    """

    shards: Sequence[Shard]
    vocab_size: int

    @classmethod
    def of(cls, tokens: np.ndarray, vocab_size: int, ends: np.ndarray | None = None, answers: np.ndarray | None = None) -> "Documents":
        """Create documents from arrays in memory."""
        arrays = None if ends is None else (lambda: ends), None if answers is None else (lambda: answers)
        return cls([Shard("the text", tokens.size, lambda: tokens, *arrays)] if tokens.size else [], vocab_size)

    @cached_property
    def starts(self) -> list[int]:
        """The position of each shard's first token, followed by the number of all tokens."""
        return [0, *itertools.accumulate(shard.size for shard in self.shards)]

    @property
    def size(self) -> int:
        """The number of tokens."""
        return self.starts[-1]

    @property
    def have_ends(self) -> bool:
        """Whether the end of each document is known."""
        return all(shard.ends is not None for shard in self.shards)

    @property
    def have_answers(self) -> bool:
        """Whether each document is a prompt with its answer."""
        return bool(self.shards) and all(shard.answers is not None for shard in self.shards)

    def read(self, start: int, stop: int) -> Int32[np.ndarray, " n"]:
        """Read the tokens start .. stop - 1.

        Raises:
            InputError: one of them is out of range.
        """
        parts = [shard.tokens()[first:last] for shard, first, last, _ in self._parts(start, stop)]
        tokens = (parts[0] if len(parts) == 1 else np.concatenate(parts)).astype(np.int32)
        unsigned = tokens.view(np.uint32)
        if tokens.size and np.max(unsigned) >= self.vocab_size:
            wrong = int(np.argmax(unsigned >= self.vocab_size))
            k = bisect.bisect_right(self.starts, start + wrong) - 1
            raise InputError(
                f"data: expected every token of {self.shards[k].name} to be from 0 to {self.vocab_size - 1}, found {unsigned[wrong]} at "
                f"{start + wrong - self.starts[k]}; write the file again"
            )
        return tokens

    def begins(self, start: int, stop: int) -> Bool[np.ndarray, " n"]:
        """Return for each position start .. stop - 1 whether a document begins there, found by binary search.

        Raises:
            InputError: ends that do not rise.
        """
        is_first = np.zeros(stop - start, bool)
        for shard, first, last, at in self._parts(start, stop):
            if first == 0:
                is_first[at - start] = True
            assert shard.ends is not None
            ends = shard.ends()
            inside = ends[_before(ends, first) : _before(ends, last)].astype(np.int64)
            if inside.size and (np.min(inside) < first or np.max(inside) >= last or np.any(np.diff(inside) <= 0)):
                raise _disordered(shard.name)
            is_first[inside - first + at - start] = True
        return is_first

    def number(self, position: int) -> tuple[int, int]:
        """Return the shard and the document in it to which this token belongs."""
        k = bisect.bisect_right(self.starts, position) - 1
        ends = self.shards[k].ends
        assert ends is not None
        return k, _before(ends(), position - self.starts[k] + 1)

    def examples(self) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]:
        """Return where each document begins, where it ends, and where its answer begins.

        Raises:
            InputError: positions that do not rise.
        """
        ranges: list[tuple[np.ndarray, ...]] = []
        for shard, start in zip(self.shards, self.starts, strict=False):
            assert shard.ends is not None
            assert shard.answers is not None
            ends, answers = shard.ends()[:].astype(np.int64), shard.answers()[:].astype(np.int64)
            begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
            if ends[-1] > shard.size or np.any(ends <= begins) or np.any(answers < begins) or np.any(answers > ends):
                raise _disordered(shard.name)
            ranges.append((begins + start, ends + start, answers + start))
        columns = list(zip(*ranges, strict=True))
        return np.concatenate(columns[0]), np.concatenate(columns[1]), np.concatenate(columns[2])

    def digest(self) -> str:
        """Hash all tokens and ends, or a sample if there are very many."""
        hasher = hashlib.sha256()
        for shard in self.shards:
            for part in (shard.tokens, shard.ends, shard.answers):
                if part is None:
                    hasher.update(b"-")
                    continue
                numbers = part()
                hasher.update(f"{numbers.size} ".encode())
                for start in range(0, numbers.size, _HASHED * max(numbers.size // _MOST_HASHED, 1)):
                    hasher.update(np.ascontiguousarray(numbers[start : start + _HASHED]).data)
        return hasher.hexdigest()

    def _parts(self, start: int, stop: int) -> list[tuple[Shard, int, int, int]]:
        """List the shards that hold the positions start .. stop - 1.

        Returns:
            Each shard, the first position and the end in it, and the first position in the whole.
        """
        parts = []
        k = bisect.bisect_right(self.starts, start) - 1
        while start < stop:
            end = min(stop, self.starts[k + 1])
            parts.append((self.shards[k], start - self.starts[k], end - self.starts[k], start))
            start, k = end, k + 1
        return parts


def _before(ends: Numbers, position: int) -> int:
    """Count the ends below this position by binary search, which reads only a few blocks of a file."""
    low, high = 0, ends.size
    target = np.asarray(position, ends.dtype)  # in the dtype of the ends; otherwise NumPy would convert all of them
    while high - low > _BLOCK:
        middle = (low + high) // 2
        if ends[middle : middle + 1][0] < target:
            low = middle + 1
        else:
            high = middle
    return low + int(np.searchsorted(ends[low:high], target))


def _disordered(name: str) -> InputError:
    return InputError(f"data: expected the ends of the documents of {name} to rise within it, found others; write the folder again")
