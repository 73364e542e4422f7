"""Show conversations in the form that a model gets, and which parts are learned (`jpipe data show`)."""

from collections.abc import Iterator

from jpipe import InputError
from jpipe_lm.config.data_config import DataConfig
from jpipe_lm.data import tokenizer as tokenizers
from jpipe_lm.data.chat import read_chat, template
from jpipe_lm.data.chat.renderer import TRAINING_TIME, Renderer
from jpipe_lm.data.chat.tokens import Tokenized
from jpipe_train.config.config import Config
from jpipe_train.console.terminal import count, printable
from jpipe_train.data import sources

BOLD = "\x1b[1m", "\x1b[0m"
BRACKETS = "[[", "]]"


def lines(config: Config, most: int, *, bold: bool) -> Iterator[str]:
    """Yield lines that show the first conversations, at most `most`. Learned parts are bold or in double brackets.

    Raise InputError if the config has no conversations, or they cannot be read.
    """
    data = config.data
    if not isinstance(data, DataConfig) or data.format != "chat":
        found = data.format if data.target is None else f"data.target {data.target}"
        raise InputError(f"data show: expected a config with data.format chat, found {found}; give a config with conversations")
    if most < 1:
        raise InputError(f"--count: expected 1 or more conversations, found {most}; without --count it shows 3")
    tokenizer = tokenizers.load(str(data.tokenizer), "data.tokenizer")
    with sources.readable(), Renderer(template.find(tokenizer, data.chat_template), TRAINING_TIME) as renderer:
        _, files = sources.find_files(sources.with_validation(data.first_path, "data.path")[0])
        shown = 0
        for row, i, text in read_chat.read(files, renderer, tokenizer, 0.0, "data.path"):
            shown += i == 0
            if shown > most:
                break
            part = f", text {i + 1} of {len(row.value[1])}" if len(row.value[1]) > 1 else ""
            tokens, learned = text.tokens.size, sum(stop - start for start, stop in text.answers)
            yield printable(f"{row.place}{part}: {count(tokens, 'token')}, {learned} learned")
            yield from _text(text, *(BOLD if bold else BRACKETS)).removesuffix("\n").split("\n")
            yield ""


def _text(conversation: Tokenized, before: str, after: str) -> str:
    """Return the text with `before` and `after` around the learned parts. Unprintable characters other than line ends are escaped."""
    parts, at = [], 0
    for start, stop in conversation.answers:
        first, last = int(conversation.offsets[start, 0]), int(conversation.offsets[stop - 1, 1])
        parts += [_printable(conversation.text[at:first]), before, _printable(conversation.text[first:last]), after]
        at = last
    return "".join([*parts, _printable(conversation.text[at:])])


def _printable(text: str) -> str:
    return "\n".join(map(printable, text.split("\n")))
