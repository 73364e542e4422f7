"""`jpipe data`: prepare text or tokens for training, make a tokenizer, and show which parts of conversations are learned."""

from typing import Annotated, Literal

import tyro

from jpipe_lm.data.prepare_request import Key, PrepareRequest, Source, TextKey
from jpipe_train.commands.group import Group
from jpipe_train.console import interrupt
from jpipe_train.console.options import Count, Fields, Overrides

Form = Annotated[Literal["auto", "text", "prompts", "chat"], tyro.conf.arg(name="format")]


def prepare(request: Fields[PrepareRequest]) -> int:
    """Write text as a folder of tokens, for data.format: tokens. The folder is written completely or not at all."""
    with interrupt.importing():
        from jpipe_lm.data import prepare as preparing
        from jpipe_train.console.progress import Reporter

    preparing.prepare(request, Reporter(1, 1, "bytes"))
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
    """Make a tokenizer from text: a byte-level BPE. It has a token for every byte, and so can represent every text.

    Args:
        source: Files, folders or globs to read; by default the source code of Python's standard library.
        vocab_size: The largest number of tokens.
        out: The tokenizer.json to create.
        form: What a document is, as in jpipe data prepare. From conversations, the contents of the messages are read.
        kind: The kind of model. A decoder has the special token <|endoftext|>; BERT has its own special tokens.
        special: A further special token, for example of a chat template.
        text_key: The column, or the key of a JSON line, with the text. With none, files of rows are also read as text.
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
    """Show the first conversations of a config with data.format: chat, as the model gets them, and which parts are learned.

    Learned parts are bold on a terminal, and in [[double brackets]] elsewhere.

    Args:
        config: The YAML file.
        overrides: Replace one key of the file, such as data.path=conversations.jsonl.
        count: The number of conversations to show.
    """
    with interrupt.importing():
        import sys

        from jpipe_lm.data.chat import show as showing
        from jpipe_train.config import config_file

    for line in showing.lines(config_file.load(config, overrides, allow_code=True), count, bold=sys.stdout.isatty()):
        print(line)
    return 0


GROUP = Group(
    "Make a tokenizer, write text as files of tokens for training, or show which parts of conversations are learned.",
    {"prepare": prepare, "tokenizer": make_tokenizer, "show": show},
)
"""The commands of `jpipe data`."""
