"""The section `data` of a config: the keys and methods that all formats of data share."""

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
    """One of several sources of data. Its share of the rows is its `weight` divided by the sum of all weights.

    Without `validation_path` a share of the rows of `path` is held out for validation. Losses of the source are named after `name`, by
    default the name of the file or folder.
    """

    path: FilePath
    weight: Annotated[float, Field(gt=0, le=10**6)] = 1.0
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]{1,64}$")] | None = None
    validation_path: FilePath | None = None


def _named(sources: list[SourceConfig]) -> list[SourceConfig]:
    """Return the sources with names: a source without a name is named after its file. Raise ValueError if a name is given twice."""
    given = [source.name for source in sources if source.name is not None]
    if _AVERAGED in given:
        raise ValueError(f"the name {_AVERAGED} stands for the averaged weights (val_loss_{_AVERAGED}); choose another name")
    if twice := next((name for name in given if given.count(name) > 1), None):
        raise ValueError(f"expected a different name for each source, found '{twice}' twice; change one of them")
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
    """Return the name of a file or folder with only letters, digits and `_`; for a glob, the last part of the path without a `*`."""
    path = re.sub(r"@[0-9a-f]{40}\b", "", path)  # the commit of `hf:datasets/owner/name`
    parts = [
        re.sub(r"[^A-Za-z0-9]+", "_", part).strip("_") for part in (Path(path).stem, *reversed(Path(path).parts[:-1])) if "*" not in part
    ]
    return next((part[:60] for part in parts if part), "source")


_AVERAGED = "ema"


class DataSection(TargetSection):
    """The data of a run. `path` is a file, a folder or a glob. `sources` replaces it by several paths, mixed according to their weights.

    A share of the rows (`validation_fraction`) is held out for validation, or `validation_path` names separate validation data.
    A `format` that an installed package adds is a subclass, which may have further keys. It has a method `read_examples`. For data that are
    not a list of rows it has `load_batches` and `load_held_out` instead. A `target` is a function that replaces the format: `target(seed,
    batch_size, **arguments)` returns (train, validation), or a `jpipe_train.data.data.Data`.

    Attributes:
        formats_of: a mapping from keys that only some formats of this class use to those formats.
        content: what the files contain, for messages.
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
            config: the config of the run.
            path: data to read in place of the section's paths; all their rows are for validation.

        Raises:
            InputError: the data cannot be read.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method read_examples")

    def load_batches(self, config: "jpipe_train.config.config.Config") -> "jpipe_train.data.data.Data | None":
        """Return the data for training and validation, or None if `read_examples` reads them."""
        return None

    def load_held_out(self, config: "jpipe_train.config.config.Config", path: str | None) -> "jpipe_train.data.data.Data | None":
        """Return the data at `path`, by default the section's data, all of them for validation. They may fill less than one batch.

        The result is None if `read_examples` reads the data.
        """
        return None

    def check_config(self, config: "jpipe_train.config.config.Config") -> None:
        """Check that this section is compatible with the other sections of a config.

        Raise ValueError if the sections contradict each other.
        """

    def check_files(self, config: "jpipe_train.config.config.Config", path: str | None = None) -> None:
        """Check the files that the section names, before any data are read. The arguments are the same as for `read_examples`.

        Raise InputError if a file is missing, or cannot be read.
        """

    def check_sources(self) -> None:
        """Check that several `sources` can be mixed, before they are read.

        Raise InputError if the sources cannot be mixed.
        """

    def amount_of_step(self, config: "jpipe_train.config.config.Config") -> tuple[int, str]:
        """Return the amount of data that a step processes, and its unit."""
        return config.train.batch_size, "samples"

    @property
    def has_tokens(self) -> bool:
        """Whether each row is a window of `model.seq_len` tokens of a text."""
        return False

    @property
    def may_be_padded(self) -> bool:
        """Whether the cross-entropy ignores rows with labels below zero."""
        return self.target is None

    @property
    def loss_unit(self) -> str:
        """The unit of the cross-entropy, to print after a number."""
        return " nats per label"

    @property
    def first_path(self) -> str | None:
        """The path, or the path of the first source."""
        return self.path if self.sources is None else self.sources[0].path

    def of_source(self, source: SourceConfig) -> "DataSection":
        """Return a section that reads only one source."""
        return self.model_copy(update={"sources": None, "path": source.path, "validation_path": source.validation_path})

    @model_validator(mode="after")
    def _sources_are_in_place_of_a_path(self) -> "DataSection":
        if self.sources is None:
            return self
        if self.path is not None:
            raise ValueError("path has no effect with sources; add it to the sources, or remove it")
        if self.validation_path is not None:
            raise ValueError("validation_path has no effect with sources; set validation_path of each source instead")
        if all(source.validation_path is not None for source in self.sources) and self.is_changed("validation_fraction"):
            raise ValueError("validation_fraction has no effect if each source has a validation_path; remove validation_fraction")
        return self

    @model_validator(mode="after")
    def _one_part_is_held_out(self) -> "DataSection":
        if self.validation_path is not None and self.is_changed("validation_fraction"):
            raise ValueError("validation_fraction has no effect with validation_path; remove one of them")
        return self

    def is_changed(self, key: str) -> bool:
        """Return whether the value of a key differs from its default."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)
