"""The arguments of `jpipe data prepare`, as a dataclass."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from jpipe_train.console.options import Count, OptionalFile

Source = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[SOURCE …]", help_behavior_hint="")]
Key = Annotated[str, tyro.conf.arg(metavar="KEY")]
TextKey = Annotated[str, tyro.conf.arg(metavar="KEY|none")]


@dataclass(frozen=True, kw_only=True)
class PrepareRequest:
    """The arguments of `jpipe data prepare`.

    Attributes:
        source: Files, folders, globs or names such as hf:datasets/owner/name; by default the source code of Python's standard library.
        tokenizer: A tokenizer.json, its folder, or a name such as hf:owner/name. It is copied; jpipe data tokenizer makes one.
        out: The folder to create.
        form: What a document is. text: a text file, or a row of JSON lines, CSV, TSV, Parquet or Arrow with a text. auto: the same, but
            other files are rejected. prompts: a row with a prompt and an answer. chat: a conversation. tokens: a row with token ids.
        validation_fraction: The share for validation.
        shard_tokens: The size of a file of tokens.
        end_of_text: The token that ends each document; by default the end-of-text token of the tokenizer.
        text_key: The column, or the key of a JSON line, with the text. With none, files of rows are also read as text.
        prompt_key: The column with the prompt.
        answer_key: The column with the answer.
        tokens_key: The column with the token ids.
        chat_template: The chat template for conversations; by default the template next to the tokenizer.
    """

    source: Source = ()
    tokenizer: Annotated[str, tyro.conf.arg(metavar="FILE")]
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")]
    form: Annotated[Literal["auto", "text", "prompts", "chat", "tokens"], tyro.conf.arg(name="format")] = "auto"
    validation_fraction: Annotated[float, tyro.conf.arg(metavar="F")] = 0.05
    shard_tokens: Count = 100_000_000
    end_of_text: Annotated[str, tyro.conf.arg(metavar="TOKEN|none")] = "auto"
    text_key: TextKey = "text"
    prompt_key: Key = "prompt"
    answer_key: Key = "answer"
    tokens_key: Key = "input_ids"
    chat_template: OptionalFile = None
