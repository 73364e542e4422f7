"""The request of `jpipe data prepare`, which the command line is read from."""

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
        source: Files, folders or globs to read; by default the source of Python's standard library.
        tokenizer: A tokenizer.json, which is copied into the folder; jpipe data tokenizer makes one.
        out: The folder, a new one.
        form: A document is a file of text, or a row of JSON lines, CSV, TSV, Parquet or Arrow with a text (text; auto, which rejects files
            that seem to be neither), with a prompt and an answer (prompts), a conversation (chat) or token ids (tokens).
        validation_fraction: Share for validation: of several texts whole ones, of one text its end, of rows those selected by a hash.
        shard_tokens: A file of tokens ends with the document that makes it this large.
        end_of_text: The token that ends each document; by default the tokenizer's own.
        text_key: The column, or key of a JSON line, with the text; none reads files of rows as text, too.
        prompt_key: The column with the prompt.
        answer_key: The column with the answer.
        tokens_key: The column with the token ids.
        chat_template: The chat template of conversations; by default the one beside the tokenizer.
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
