"""The section `data` of a config: what is read, and how it becomes batches."""

import re
import reprlib
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from jpipe_train.config.section import AUTO, FilePath, Fraction, Section, TargetSection

_Word = Annotated[str, Field(min_length=1, max_length=256)]
_LONGEST_NAME, _MOST_COLUMNS = 256, 10**5


def _checked_columns(names: object) -> object:
    if not isinstance(names, list):
        _check_name(names)
        return names
    if not 1 <= len(names) <= _MOST_COLUMNS:
        raise ValueError(f"expected the name of a column, or a list of 1 to {_MOST_COLUMNS:,} names, found {len(names):,} names")
    for name in names:
        _check_name(name)
    if twice := next((name for name, number in Counter(names).items() if number > 1), None):
        raise ValueError(f"expected each column once, found '{twice}' twice; leave out one of them")
    return names


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        found = reprlib.repr(name)
        advice = f"write '{found}'" if isinstance(name, int | float) and not isinstance(name, bool) else "quotes in YAML make text"
        raise ValueError(f"expected names of columns as text, found {found}; {advice}")
    if not 1 <= len(name) <= _LONGEST_NAME:
        raise ValueError(f"expected names of columns of 1 to {_LONGEST_NAME} characters, found {reprlib.repr(name)}")


_Columns = Annotated[str | list[str], BeforeValidator(_checked_columns)]
_ONLY_WITH = {  # the formats that a key applies to; with any other it is an error
    "tokenizer": ("text", "prompts", "chat", "labels"),
    "end_of_text": ("text", "prompts"),
    "validation_fraction": ("bytes", "text", "tokens", "prompts", "chat", "labels", "arrays"),
    "boundaries": ("bytes", "text", "tokens"),
    "objective": ("text", "tokens"),
    "too_long": ("tokens", "prompts", "chat", "labels"),
    "prompt_key": ("prompts",),
    "answer_key": ("prompts",),
    "chat_template": ("chat",),
    "text_key": ("text", "labels"),
    "second_key": ("labels",),
    "choices_key": ("labels",),
    "label_key": ("labels",),
    "tokens_key": ("tokens",),
    "inputs_key": ("arrays",),
    "targets_key": ("arrays",),
}

_PATHS = {  # what the path of a format names that has no default
    "tokens": "a folder that jpipe data prepare wrote, or files with rows of token ids",
    "prompts": "files with prompts and answers, such as JSON lines or Parquet",
    "chat": "files with conversations, such as JSON lines or Parquet",
    "labels": "files with texts and labels, such as JSON lines, CSV or Parquet",
    "arrays": "files with rows of numbers, such as Parquet or CSV, or NumPy's files",
}


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


class DataConfig(TargetSection):
    """The data of a run: `path` is a file, folder or glob; null means the source code of the running Python's standard library.

    In place of `path`, `sources` are several of them; their rows are mixed in proportion to their weights. The other keys hold for all.

    The `format` is bytes, text (which needs a `tokenizer`), tokens (a folder that `jpipe data prepare` wrote, or rows of token ids),
    prompts (rows with a prompt and an answer), chat (rows with conversations), labels (rows with texts and a label) or arrays (rows of
    numbers, or NumPy's files, for a model of the user's); auto means bytes, and rejects files that are known not to be text. Rows are in
    JSON lines, CSV, TSV, Parquet or Arrow files, and `…_key` names a column of them, or with `arrays` a list of several; with
    `text_key: null` text is whole files, even of rows. A `target` is a function: `target(seed, batch_size, **arguments)` returns
    (train, validation), or a `jpipe_train.data.data.Data`.
    """

    format: Literal["auto", "bytes", "text", "tokens", "prompts", "chat", "labels", "arrays"] = AUTO
    path: FilePath | None = None
    sources: Annotated[list[SourceConfig], Field(min_length=1, max_length=1000), AfterValidator(_named)] | None = None
    validation_path: FilePath | None = None
    validation_fraction: Fraction = 0.05
    tokenizer: FilePath | None = None
    end_of_text: _Word | None = AUTO
    boundaries: Literal["keep", "ignore"] | None = None
    objective: Literal["next", "masked"] = "next"
    masked_fraction: Fraction = 0.15
    prompt_key: _Word = "prompt"
    answer_key: _Word = "answer"
    chat_template: FilePath | None = None
    text_key: _Word | None = "text"
    second_key: _Word | None = None
    choices_key: _Word = "choices"
    label_key: _Word = "label"
    tokens_key: _Word = "input_ids"
    inputs_key: _Columns = "inputs"
    targets_key: _Columns = "targets"
    too_long: Literal["refuse", "cut"] = "refuse"

    @property
    def read_as(self) -> Literal["bytes", "text", "tokens", "prompts", "chat", "labels", "arrays"]:
        """The format, with bytes in place of auto."""
        return "bytes" if self.format == AUTO else self.format

    @property
    def reads_bytes(self) -> bool:
        """Whether the tokens of a batch are bytes."""
        return self.target is None and self.read_as == "bytes"

    @property
    def has_examples(self) -> bool:
        """Whether a row is an example with its label or target, in place of tokens."""
        return self.target is None and self.format in ("labels", "arrays")

    @property
    def first_path(self) -> str | None:
        """The path, or the first source's."""
        return self.path if self.sources is None else self.sources[0].path

    def of_source(self, source: SourceConfig) -> "DataConfig":
        """Return the section for the data of one source alone."""
        return self.model_copy(update={"sources": None, "path": source.path, "validation_path": source.validation_path})

    @model_validator(mode="after")
    def _sources_are_in_place_of_a_path(self) -> "DataConfig":
        if self.sources is None:
            return self
        if self.path is not None:
            raise ValueError("path has no effect with sources; make it one of them, or leave it out")
        if self.validation_path is not None:
            raise ValueError("validation_path has no effect with sources; give each source its own")
        if all(source.validation_path is not None for source in self.sources) and self._is_changed("validation_fraction"):
            raise ValueError("validation_fraction has no effect if each source has a validation_path; leave it out")
        return self

    @model_validator(mode="after")
    def _keys_fit_the_format(self) -> "DataConfig":
        if self.target is not None:
            return self
        for key, formats in _ONLY_WITH.items():
            if self._is_changed(key) and self.read_as not in formats:
                raise ValueError(f"{key} has no effect with format {self.read_as}: it is for {' and '.join(formats)}; leave it out")
        if self.format == "labels" and self.text_key is None:
            raise ValueError("text_key: expected a column for format labels, found null; name one")
        if self.first_path is None and self.format in _PATHS:
            raise ValueError(f"path is missing, which format {self.format} needs; name {_PATHS[self.format]}")
        if self.tokenizer is None and self.format in _ONLY_WITH["tokenizer"]:
            raise ValueError(f"tokenizer is missing, which format {self.format} needs; name a tokenizer.json (see jpipe data tokenizer)")
        return self

    @model_validator(mode="after")
    def _keys_fit_each_other(self) -> "DataConfig":
        if self.validation_path is not None and self._is_changed("validation_fraction"):
            raise ValueError("validation_fraction has no effect with validation_path; leave one of them out")
        if self.objective == "masked" and self.boundaries == "keep":
            raise ValueError("boundaries keep has no effect with objective masked: its rows are full; leave it out")
        if self.objective != "masked" and self._is_changed("masked_fraction"):
            raise ValueError("masked_fraction has no effect with objective next; leave it out, or use objective masked")
        return self

    def _is_changed(self, key: str) -> bool:
        return bool(getattr(self, key) != type(self).model_fields[key].default)
