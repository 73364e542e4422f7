"""The section `data` of a config for text: bytes, documents, conversations and texts with labels."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from jpipe_train.config.data_section import DataSection
from jpipe_train.config.section import AUTO, FilePath, Fraction

if TYPE_CHECKING:
    import jpipe_train.config.config

BYTES = 256  # the number of symbols of a text that is read as bytes
_Word = Annotated[str, Field(min_length=1, max_length=256)]
_FORMATS_OF = MappingProxyType(
    {  # the formats that a key is for; with any other format the key is an error
        "tokenizer": ("text", "prompts", "chat", "labels", "preferences"),
        "end_of_text": ("text", "prompts", "preferences"),
        "boundaries": ("bytes", "text", "tokens"),
        "objective": ("text", "tokens"),
        "too_long": ("tokens", "prompts", "chat", "labels", "preferences"),
        "prompt_key": ("prompts", "preferences"),
        "answer_key": ("prompts",),
        "chosen_key": ("preferences",),
        "rejected_key": ("preferences",),
        "chat_template": ("chat", "preferences"),
        "text_key": ("text", "labels"),
        "second_key": ("labels",),
        "choices_key": ("labels",),
        "label_key": ("labels",),
        "tokens_key": ("tokens",),
    }
)

_PATHS = {  # for each format that needs a path, what the path must name
    "tokens": "a folder that jpipe data prepare wrote, or files with rows of token ids",
    "prompts": "files with prompts and answers, such as JSON lines or Parquet",
    "chat": "files with conversations, such as JSON lines or Parquet",
    "labels": "files with texts and labels, such as JSON lines, CSV or Parquet",
    "preferences": "files with prompts, chosen and rejected answers, such as JSON lines or Parquet",
}


class DataConfig(DataSection):
    """Text for language models. `path` is a file, folder or glob; null means the source code of Python's standard library.

    The `format` is bytes, text (which needs a `tokenizer`), tokens (a folder that `jpipe data prepare` wrote, or rows of token ids),
    prompts (rows with a prompt and an answer), chat (rows with conversations), labels (rows with texts and a label) or preferences (rows
    with a prompt, a chosen and a rejected answer). auto means bytes, but rejects files that are not text. Rows are in JSON lines, CSV, TSV,
    Parquet or Arrow files, and the keys `…_key` name their columns. With `text_key: null` every file is read as one text, even a file of
    rows.
    """

    formats_of: ClassVar[Mapping[str, tuple[str, ...]]] = _FORMATS_OF

    format: Literal["auto", "bytes", "text", "tokens", "prompts", "chat", "labels", "preferences"] = AUTO
    tokenizer: FilePath | None = None
    end_of_text: _Word | None = AUTO
    boundaries: Literal["keep", "ignore"] | None = None
    objective: Literal["next", "masked"] = "next"
    masked_fraction: Fraction = 0.15
    prompt_key: _Word = "prompt"
    answer_key: _Word = "answer"
    chosen_key: _Word = "chosen"
    rejected_key: _Word = "rejected"
    chat_template: FilePath | None = None
    text_key: _Word | None = "text"
    second_key: _Word | None = None
    choices_key: _Word = "choices"
    label_key: _Word = "label"
    tokens_key: _Word = "input_ids"
    too_long: Literal["refuse", "cut"] = "refuse"

    @property
    def read_as(self) -> Literal["bytes", "text", "tokens", "prompts", "chat", "labels", "preferences"]:
        """The format, with bytes in place of auto."""
        return "bytes" if self.format == AUTO else self.format

    @property
    def has_tokens(self) -> bool:
        """Whether the rows are windows of a text. Texts with labels and preferences are not."""
        return self.format not in ("labels", "preferences")

    @property
    def may_be_padded(self) -> bool:
        """Whether rows with labels below zero are ignored. In rows of masked windows all labels count."""
        return self.objective != "masked"

    @property
    def loss_unit(self) -> str:
        """The unit of the cross-entropy."""
        if self.format == "labels":
            return " nats per label"
        if self.objective == "masked":
            return " nats"  # the sum of two means: per masked token, and per row
        return " nats per byte" if self.read_as == "bytes" else " nats per token"

    def check_config(self, config: "jpipe_train.config.config.Config") -> None:
        """Check that this section is compatible with the other sections of a config."""
        if self.format == "labels" and getattr(config.model, "head", "language") == "language":
            raise ValueError(
                "data.format labels needs a built-in model with model.head classification, regression or multiple_choice; set model.head, "
                "or use data.target"
            )
        if self.format == "preferences" and (getattr(config.model, "kind", None), getattr(config.model, "head", None)) != (
            "decoder",
            "language",
        ):
            raise ValueError("data.format preferences needs a built-in decoder with model.head language; change model, or use data.target")
        if self.format == "preferences" and config.loss.name is None and config.loss.target is None:
            raise ValueError("data.format preferences needs a loss of preferences; set loss.name to dpo, simpo or orpo")
        if self.format in ("labels", "preferences") and config.plan.slices is not None:
            raise ValueError(f"data.format {self.format} needs whole rows; remove plan.slices")

    @model_validator(mode="after")
    def _keys_fit_the_format(self) -> "DataConfig":
        for key, formats in _FORMATS_OF.items():
            if self.is_changed(key) and self.read_as not in formats:
                raise ValueError(f"{key} has no effect with format {self.read_as}: {key} is for {' and '.join(formats)}; remove {key}")
        if self.format == "labels" and self.text_key is None:
            raise ValueError("text_key: expected a column for format labels, found null; name a column")
        if self.first_path is None and self.format in _PATHS:
            raise ValueError(f"format {self.format} needs path; set path to {_PATHS[self.format]}")
        if self.tokenizer is None and self.format in _FORMATS_OF["tokenizer"]:
            raise ValueError(f"format {self.format} needs tokenizer; set tokenizer to a tokenizer.json (see jpipe data tokenizer)")
        return self

    @model_validator(mode="after")
    def _keys_fit_each_other(self) -> "DataConfig":
        if self.objective == "masked" and self.boundaries == "keep":
            raise ValueError("boundaries keep has no effect with objective masked, because its rows are full; remove boundaries")
        if self.objective != "masked" and self.is_changed("masked_fraction"):
            raise ValueError("masked_fraction has no effect with objective next; remove masked_fraction, or use objective masked")
        return self
