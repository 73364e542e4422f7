"""The tokens of documents as one sequence of shards, which are read in pieces from memory or from files."""

import bisect
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int32, Int64

from jpipe import InputError

_BLOCK = 512  # a binary search in a file ends by reading this many numbers
_HASHED, _MOST_HASHED = 2**20, 2**28  # numbers that are hashed at once; of arrays with more than _MOST_HASHED numbers, parts are hashed


@runtime_checkable
class Numbers(Protocol):
    """An array in memory or in a file (`jpipe_train.data.files.file_array.FileArray`); its slices are in memory."""

    @property
    def size(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def __getitem__(self, part: slice, /) -> np.ndarray: ...


@dataclass(frozen=True)
class Shard:
    """A part of the documents; no document continues in the next shard."""

    name: str  # the name of the shard in messages
    size: int  # the number of tokens
    tokens: Callable[[], Numbers]  # a function that returns the tokens, of an unsigned dtype
    # a function that returns the position in this shard after the last token of each document, ascending; None if unknown
    ends: Callable[[], Numbers] | None = None
    # a function that returns the position in this shard of the first token of each answer, ascending; None if documents have no answers
    answers: Callable[[], Numbers] | None = None
    # a function that returns the position after the last token of each answer; None if each document ends with its only answer
    answer_ends: Callable[[], Numbers] | None = None


class Ranges(NamedTuple):
    """The positions of the documents of all shards and of their answers, in order."""

    begins: Int64[np.ndarray, " n"]  # the first token of each document
    ends: Int64[np.ndarray, " n"]  # the position after the last token of each document
    answers: Int64[np.ndarray, " m"]  # the first token of each answer
    answer_ends: Int64[np.ndarray, " m"]  # the position after the last token of each answer


@dataclass(frozen=True)
class Documents:
    """The tokens of all shards as one sequence."""

    shards: Sequence[Shard]  # the shards in order
    vocab_size: int  # every token must be below this number. It is checked when tokens are read.

    @classmethod
    def of(cls, tokens: np.ndarray, vocab_size: int, *arrays_of_shard: np.ndarray | None) -> "Documents":
        """Create documents from arrays in memory: the tokens, then the other fields of a `Shard` in order."""
        arrays = [None if array is None else functools.partial(_itself, array) for array in arrays_of_shard]
        return cls([Shard("the text", tokens.size, lambda: tokens, *arrays)] if tokens.size else [], vocab_size)

    @cached_property
    def starts(self) -> list[int]:
        """The position of each shard's first token, followed by the total number of tokens."""
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
        """Whether documents have answers. If they have, only answers are learned."""
        return bool(self.shards) and all(shard.answers is not None for shard in self.shards)

    def read(self, start: int, stop: int) -> Int32[np.ndarray, " n"]:
        """Read the tokens start to stop - 1. Raise InputError if a token is out of range."""
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
        """Return for each position from start to stop - 1 whether a document begins there. Only a few blocks of a file are read.

        Raise InputError if the ends of documents are not ascending.
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
        """Return the index of the shard with the token at `position`, and the index of the document in this shard."""
        k = bisect.bisect_right(self.starts, position) - 1
        ends = self.shards[k].ends
        assert ends is not None
        return k, _before(ends(), position - self.starts[k] + 1)

    def examples(self) -> "Ranges":
        """Return the beginning and end of each document and of each answer. Raise InputError if the positions are not ascending."""
        ranges: list[tuple[np.ndarray, ...]] = [(np.zeros(0, np.int64),) * 4]
        for shard, start in zip(self.shards, self.starts, strict=False):
            assert shard.ends is not None
            assert shard.answers is not None
            ends, answers = shard.ends()[:].astype(np.int64), shard.answers()[:].astype(np.int64)
            stops = ends if shard.answer_ends is None else shard.answer_ends()[:].astype(np.int64)
            begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
            if ends[-1] > shard.size or np.any(ends <= begins) or answers.size != stops.size or not _are_inside(answers, stops, ends):
                raise _disordered(shard.name)
            ranges.append((begins + start, ends + start, answers + start, stops + start))
        return Ranges(*map(np.concatenate, zip(*ranges, strict=True)))

    def digest(self) -> str:
        """Return a hash of all tokens and positions, or of a sample if there are very many."""
        hasher = hashlib.sha256()
        for shard in self.shards:
            for part in (shard.tokens, shard.ends, shard.answers, shard.answer_ends):
                if part is None:
                    hasher.update(b"-")
                    continue
                numbers = part()
                hasher.update(f"{numbers.size} ".encode())
                for start in range(0, numbers.size, _HASHED * max(numbers.size // _MOST_HASHED, 1)):
                    hasher.update(np.ascontiguousarray(numbers[start : start + _HASHED]).data)
        return hasher.hexdigest()

    def _parts(self, start: int, stop: int) -> list[tuple[Shard, int, int, int]]:
        """List the shards that contain the positions start to stop - 1.

        Each has the first position in it, the position after the last, and the first position in the whole sequence.
        """
        parts = []
        k = bisect.bisect_right(self.starts, start) - 1
        while start < stop:
            end = min(stop, self.starts[k + 1])
            parts.append((self.shards[k], start - self.starts[k], end - self.starts[k], start))
            start, k = end, k + 1
        return parts


def _before(ends: Numbers, position: int) -> int:
    """Return the number of ends below `position`. The binary search reads only a few blocks of a file."""
    low, high = 0, ends.size
    target = np.asarray(position, ends.dtype)  # in the dtype of the ends; otherwise NumPy would convert all of them
    while high - low > _BLOCK:
        middle = (low + high) // 2
        if ends[middle : middle + 1][0] < target:
            low = middle + 1
        else:
            high = middle
    return low + int(np.searchsorted(ends[low:high], target))


def _itself(array: np.ndarray) -> np.ndarray:
    return array


def _are_inside(answers: Int64[np.ndarray, " m"], stops: Int64[np.ndarray, " m"], ends: Int64[np.ndarray, " n"]) -> bool:
    """Return whether the answers do not overlap, are ascending, and each is inside one document."""
    if np.any(answers > stops) or np.any(answers[1:] < stops[:-1]) or np.any(answers[:1] < 0) or np.any(stops[-1:] > ends[-1]):
        return False
    inside = np.searchsorted(ends, stops, "left")  # the document in which an answer ends
    begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[inside]
    return not np.any(answers < begins)


def _disordered(name: str) -> InputError:
    return InputError(f"data: expected ascending ends of documents inside {name}, found other numbers; write the folder again")
