"""`jpipe data`: prepare text or tokens to train on, make a tokenizer, and show what is learned of conversations."""

from typing import Annotated, Literal

import tyro

from jpipe_train.commands.group import Group
from jpipe_train.console import interrupt
from jpipe_train.console.options import Count, OptionalFile, Overrides

Source = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[SOURCE …]", help_behavior_hint="")]
Form = Annotated[Literal["auto", "text", "prompts", "chat"], tyro.conf.arg(name="format")]
AnyForm = Annotated[Literal["auto", "text", "prompts", "chat", "tokens"], tyro.conf.arg(name="format")]
Key = Annotated[str, tyro.conf.arg(metavar="KEY")]
TextKey = Annotated[str, tyro.conf.arg(metavar="KEY|none")]


def prepare(
    source: Source = (),
    *,
    tokenizer: Annotated[str, tyro.conf.arg(metavar="FILE")],
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")],
    form: AnyForm = "auto",
    validation_fraction: Annotated[float, tyro.conf.arg(metavar="F")] = 0.05,
    shard_tokens: Count = 100_000_000,
    end_of_text: Annotated[str, tyro.conf.arg(metavar="TOKEN|none")] = "auto",
    text_key: TextKey = "text",
    prompt_key: Key = "prompt",
    answer_key: Key = "answer",
    tokens_key: Key = "input_ids",
    chat_template: OptionalFile = None,
) -> int:
    """Write text as a folder of tokens, for data.format: tokens. It is written completely or not at all.

    Args:
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
    with interrupt.importing():
        from jpipe_lm.data import prepare as preparing
        from jpipe_lm.data.document_files import Files
        from jpipe_lm.data.texts import Keys
        from jpipe_train.console.progress import Reporter

    keys = Keys(None if text_key == "none" else text_key, prompt_key, answer_key, tokens_key)
    files = Files(source, form, keys, chat_template)
    end = None if end_of_text == "none" else end_of_text
    preparing.prepare(files, tokenizer, out, Reporter(1, 1, "bytes"), validation_fraction, shard_tokens, end)
    return 0


def make_tokenizer(
    source: Source = (),
    *,
    vocab_size: Count,
    out: Annotated[str, tyro.conf.arg(metavar="FILE")],
    form: Form = "auto",
    kind: Literal["decoder", "bert"] = "decoder",
    special: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TOKEN")] = (),
    text_key: TextKey = "text",
    prompt_key: Key = "prompt",
    answer_key: Key = "answer",
) -> int:
    """Make a tokenizer from text: a byte-level BPE, which has a token for every byte, and so represents every text.

    Args:
        source: Files, folders or globs to read; by default the source of Python's standard library.
        vocab_size: The largest number of tokens.
        out: The tokenizer.json, a new file.
        form: As in jpipe data prepare; of a conversation the contents of its messages are read.
        kind: The kind of the model: its special tokens are <|endoftext|>, or BERT's.
        special: A further special token, such as one of a chat template; may be given several times.
        text_key: As in jpipe data prepare.
        prompt_key: The column with the prompt.
        answer_key: The column with the answer.
    """
    with interrupt.importing():
        from jpipe_lm.data import prepare as preparing
        from jpipe_lm.data.document_files import Files
        from jpipe_lm.data.texts import Keys
        from jpipe_train.console.progress import Reporter

    files = Files(source, form, Keys(None if text_key == "none" else text_key, prompt_key, answer_key))
    preparing.make_tokenizer(files, vocab_size, out, Reporter(1, 1, "bytes"), kind, special)
    return 0


def show(
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")],
    overrides: Overrides = (),
    count: Annotated[int, tyro.conf.arg(name="count", metavar="N")] = 3,
) -> int:
    """Show the first conversations of a config with data.format: chat as the model gets them, and what is learned of them.

    What is learned is bold on a terminal, and in [[double brackets]] elsewhere.

    Args:
        config: The YAML file.
        overrides: Replace one key of the file, such as data.path=conversations.jsonl.
        count: How many conversations to show.
    """
    with interrupt.importing():
        import sys

        from jpipe_lm.data.chat import show as showing
        from jpipe_train.config import config_file

    for line in showing.lines(config_file.load(config, overrides, allow_code=True), count, bold=sys.stdout.isatty()):
        print(line)
    return 0


GROUP = Group(
    "Make a tokenizer, write text as files of tokens to train on, or show what is learned of conversations.",
    {"prepare": prepare, "tokenizer": make_tokenizer, "show": show},
)
"""The commands of `jpipe data`."""
