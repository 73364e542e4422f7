"""Sources of a run's initial parameters: their names, shapes and dtypes, and functions that read them."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jpipe_train.config.config import WarmStartConfig
from jpipe_train.config.model_section import ModelSection

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # in safetensors; parameters have no other dtypes


class Spec(NamedTuple):
    """Shape and dtype of an array that may still be in a file."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def fits(self, wanted: "Spec") -> bool:
        """Return whether an array of this spec can be used as `wanted`, perhaps after conversion to its floating-point dtype."""
        return self.shape == wanted.shape and (self.dtype == wanted.dtype or {self.dtype, wanted.dtype} <= set(FLOATS.values()))


Names = Mapping[str, Collection[str]]
"""The names of arrays by layer id."""


@dataclass(frozen=True)
class Source:
    """Arrays on disk, by their names in an export."""

    where: str  # the file or folder, for messages
    specs: dict[str, Spec]  # shapes and dtypes of the arrays
    # a function that yields at least the named arrays, in parts, so that they need not all be in memory at once
    read: Callable[[Names], Iterator[dict[str, Any]]]
    digest: Callable[[], str]  # a function that returns a hash of the source
    converts: bool = False  # whether to accept arrays of another floating-point dtype than the model's
    optional: frozenset[str] = frozenset()  # the names of arrays that may be missing
    in_file: Mapping[str, str] = field(default_factory=dict)  # the names of arrays in the file, if they differ


@runtime_checkable
class Format(Protocol):
    """A kind of files or folders of other programs from which a run can begin: a module with these functions, which a package adds."""

    def opens(self, path: Path) -> bool:
        """Return whether a path is of this kind. Raise InputError if it is a part of such a folder, and cannot be opened alone."""
        ...

    def open_source(self, path: Path, config: WarmStartConfig, model: ModelSection, specs: Mapping[str, Spec] | None) -> Source:
        """Return the parameters in a file or folder of this kind; `specs`, by name, are None if they are not known yet.

        Raise InputError if it cannot be read, or does not match the model.
        """
        ...

    def fill_config(self, data: dict[Any, Any], where: str) -> None:
        """If `warm_start.file` is of this kind, add the config keys that it determines. Raise InputError if a key contradicts the file."""
        ...
