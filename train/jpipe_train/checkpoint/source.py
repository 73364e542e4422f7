"""Arrays on a disk that a run can begin with: what there is, and how it is read."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # in safetensors; parameters are nothing else


class Spec(NamedTuple):
    """Shape and dtype of an array that may still be in a file."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def fits(self, wanted: "Spec") -> bool:
        """Whether it is of that shape, and of that dtype or one that is converted."""
        return self.shape == wanted.shape and (self.dtype == wanted.dtype or {self.dtype, wanted.dtype} <= set(FLOATS.values()))


Names = Mapping[str, Collection[str]]
"""By layer id the names of arrays, which begin with it."""


@dataclass(frozen=True)
class Source:
    """Arrays on a disk, by name as in an export.

    Attributes:
        where: the file or folder, for messages.
        specs: what there is.
        read: gives at least those that are named, in parts, so that not all need be in memory at once.
        digest: a hash that tells this source from others.
        converts: arrays of another floating-point dtype than the model's are as good.
        optional: arrays that may be missing.
    """

    where: str
    specs: dict[str, Spec]
    read: Callable[[Names], Iterator[dict[str, Any]]]
    digest: Callable[[], str]
    converts: bool = False
    optional: frozenset[str] = frozenset()
