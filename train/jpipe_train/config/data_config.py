"""The section `data` of a config: what is read, and how it becomes batches."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jpipe_train.config.section import AUTO, FilePath, Fraction, TargetSection

_Word = Annotated[str, Field(min_length=1, max_length=256)]
_ONLY_WITH = {  # the formats that a key applies to; with any other it is an error
    "tokenizer": ("text", "prompts", "chat", "labels"),
    "end_of_text": ("text", "prompts"),
    "validation_fraction": ("bytes", "text", "tokens", "prompts", "chat", "labels"),
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
}

_PATHS = {  # what the path of a format names that has no default
    "tokens": "a folder that jpipe data prepare wrote, or files with rows of token ids",
    "prompts": "files with prompts and answers, such as JSON lines or Parquet",
    "chat": "files with conversations, such as JSON lines or Parquet",
    "labels": "files with texts and labels, such as JSON lines, CSV or Parquet",
}


class DataConfig(TargetSection):
    """The data of a run: `path` is a file, folder or glob; null means the source code of the running Python's standard library.

    The `format` is bytes, text (which needs a `tokenizer`), tokens (a folder that `jpipe data prepare` wrote, or rows of token ids),
    prompts (rows with a prompt and an answer), chat (rows with conversations) or labels (rows with texts and a label); auto means bytes,
    and rejects files that are known not to be text. Rows are in JSON lines, CSV, TSV, Parquet or Arrow files, and `…_key` names a column of
    them; with `text_key: null` text is whole files, even of rows. A `target` is a function: `target(seed, batch_size, **arguments)` returns
    (train, validation), or a `jpipe_train.data.data.Data`.
    """

    format: Literal["auto", "bytes", "text", "tokens", "prompts", "chat", "labels"] = AUTO
    path: FilePath | None = None
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
    too_long: Literal["refuse", "cut"] = "refuse"

    @property
    def read_as(self) -> Literal["bytes", "text", "tokens", "prompts", "chat", "labels"]:
        """The format, with bytes in place of auto."""
        return "bytes" if self.format == AUTO else self.format

    @property
    def reads_bytes(self) -> bool:
        """Whether the tokens of a batch are bytes."""
        return self.target is None and self.read_as == "bytes"

    @model_validator(mode="after")
    def _keys_fit_the_format(self) -> "DataConfig":
        if self.target is not None:
            return self
        for key, formats in _ONLY_WITH.items():
            if self._is_changed(key) and self.read_as not in formats:
                raise ValueError(f"{key} would mean nothing with format {self.read_as}: it is for {' and '.join(formats)}; leave it out")
        if self.format == "labels" and self.text_key is None:
            raise ValueError("text_key: expected a column for format labels, found null; name one")
        if self.path is None and self.format in _PATHS:
            raise ValueError(f"path is missing, which format {self.format} needs; name {_PATHS[self.format]}")
        if self.tokenizer is None and self.format in _ONLY_WITH["tokenizer"]:
            raise ValueError(f"tokenizer is missing, which format {self.format} needs; name a tokenizer.json (see jpipe data tokenizer)")
        return self

    @model_validator(mode="after")
    def _keys_fit_each_other(self) -> "DataConfig":
        if self.validation_path is not None and self._is_changed("validation_fraction"):
            raise ValueError("validation_fraction would mean nothing beside validation_path; leave one of them out")
        if self.objective == "masked" and self.boundaries == "keep":
            raise ValueError("boundaries keep would mean nothing with objective masked, whose rows are full; leave it out")
        if self.objective != "masked" and self._is_changed("masked_fraction"):
            raise ValueError("masked_fraction would mean nothing with objective next; leave it out, or use objective masked")
        return self

    def _is_changed(self, key: str) -> bool:
        return bool(getattr(self, key) != type(self).model_fields[key].default)
