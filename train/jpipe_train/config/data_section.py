"""The section `data` of a config: the keys and the functions that every format of data has."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, Field, model_validator

from jpipe_train.config.section import AUTO, FilePath, Fraction, Section, TargetSection

if TYPE_CHECKING:
    import jpipe_train.config.config
    import jpipe_train.data.data


class SourceConfig(Section):
    """One of several sources of data: its share of the rows is its `weight` among all weights; its loss is named after it.

    Without `validation_path` a share of `path` is for validation, as in `DataConfig`. The default `name` is the name of the file or folder.
    """

    path: FilePath
    weight: Annotated[float, Field(gt=0, le=10**6)] = 1.0
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")] | None = None
    validation_path: FilePath | None = None


def _named(sources: list[SourceConfig]) -> list[SourceConfig]:
    """Return the sources with names, those without one named after their files, or raise ValueError if two have the same."""
    given = [source.name for source in sources if source.name is not None]
    if _AVERAGED in given:
        raise ValueError(f"the averaged weights have the name {_AVERAGED} (val_loss_{_AVERAGED}); choose another")
    if twice := next((name for name in given if given.count(name) > 1), None):
        raise ValueError(f"expected a name of its own for each source, found '{twice}' twice; change one of them")
    taken, named = {*given, _AVERAGED}, []
    for source in sources:
        name, number = source.name or _name_of(source.path), 1
        base = name
        while source.name is None and name in taken:
            number += 1
            name = f"{base}_{number}"
        taken.add(name)
        named.append(source.model_copy(update={"name": name}))
    return named


def _name_of(path: str) -> str:
    """Return the name of a file or folder as a word; for a glob, the part before its wildcards."""
    parts = [
        re.sub(r"[^A-Za-z0-9]+", "_", part).strip("_") for part in (Path(path).stem, *reversed(Path(path).parts[:-1])) if "*" not in part
    ]
    return next((part[:60] for part in parts if part), "source")


_AVERAGED = "ema"


class DataSection(TargetSection):
    """The data of a run: `path` is a file, a folder or a glob; or, in place of it, `sources` are several of them, mixed by their weights.

    A share of the rows (`validation_fraction`) is held out for validation, or `validation_path` names other data for it.
    A `format` that an installed package adds is a subclass, which may have further keys. It has a method `read_examples`, or `load_batches`
    and `load_held_out` for data that are more than rows. A `target` is a function in place of a format:
    `target(seed, batch_size, **arguments)` returns (train, validation), or a `jpipe_train.data.data.Data`.

    Attributes:
        formats_of: the formats that a key is for, where one class has several formats; of other keys all of them.
        content: what its files hold, for messages.
    """

    formats_of: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    content: ClassVar[str] = "text"

    format: str = AUTO
    path: FilePath | None = None
    sources: Annotated[list[SourceConfig], Field(min_length=1, max_length=1000), AfterValidator(_named)] | None = None
    validation_path: FilePath | None = None
    validation_fraction: Fraction = 0.05

    def read_examples(self, config: "jpipe_train.config.config.Config", path: str | None = None) -> "jpipe_train.data.data.Examples":
        """Read rows for training and for validation.

        Args:
            config: of the run.
            path: other data, all of them for validation.

        Raises:
            InputError: they cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method read_examples")

    def load_batches(self, config: "jpipe_train.config.config.Config") -> "jpipe_train.data.data.Data | None":
        """Read the data for training and for validation; None: they are the rows of `read_examples`."""
        return None

    def load_held_out(self, config: "jpipe_train.config.config.Config", path: str | None) -> "jpipe_train.data.data.Data | None":
        """Read all data for validation, or those at `path`, in which rows may fill no batch; None: they are the rows of `read_examples`."""
        return None

    def check_config(self, config: "jpipe_train.config.config.Config") -> None:
        """Check that the section fits the other ones of a config.

        Raises:
            ValueError: it does not.
        """

    def check_files(self, config: "jpipe_train.config.config.Config", path: str | None = None) -> None:
        """Check the files that the section names, before any data are read; the arguments are as for `read_examples`.

        Raises:
            InputError: a file is missing, or cannot be read.
        """

    def check_sources(self) -> None:
        """Check that several `sources` can be mixed, before they are read.

        Raises:
            InputError: they cannot.
        """

    def amount_of_step(self, config: "jpipe_train.config.config.Config") -> tuple[int, str]:
        """Return how much a step processes, and in which unit."""
        return config.train.batch_size, "samples"

    @property
    def has_tokens(self) -> bool:
        """Whether the rows are windows of a text, of `model.seq_len` tokens."""
        return False

    @property
    def may_be_padded(self) -> bool:
        """Whether a row with labels below zero does not count for the cross-entropy."""
        return self.target is None

    @property
    def loss_unit(self) -> str:
        """The unit of the cross-entropy, as it follows a number in a message."""
        return " nats per label"

    @property
    def first_path(self) -> str | None:
        """The path, or the first source's."""
        return self.path if self.sources is None else self.sources[0].path

    def of_source(self, source: SourceConfig) -> "DataSection":
        """Return the section for the data of one source alone."""
        return self.model_copy(update={"sources": None, "path": source.path, "validation_path": source.validation_path})

    @model_validator(mode="after")
    def _sources_are_in_place_of_a_path(self) -> "DataSection":
        if self.sources is None:
            return self
        if self.path is not None:
            raise ValueError("path has no effect with sources; make it one of them, or leave it out")
        if self.validation_path is not None:
            raise ValueError("validation_path has no effect with sources; give each source its own")
        if all(source.validation_path is not None for source in self.sources) and self.is_changed("validation_fraction"):
            raise ValueError("validation_fraction has no effect if each source has a validation_path; leave it out")
        return self

    @model_validator(mode="after")
    def _one_part_is_held_out(self) -> "DataSection":
        if self.validation_path is not None and self.is_changed("validation_fraction"):
            raise ValueError("validation_fraction has no effect with validation_path; leave one of them out")
        return self

    def is_changed(self, key: str) -> bool:
        """Return whether a key has another value than its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)
