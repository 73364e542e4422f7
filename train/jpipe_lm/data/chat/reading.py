"""Read files of conversations: render each line, tokenize it, and find the tokens of the answers."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from jpipe import InputError
from jpipe_lm.data.chat.conversations import conversation
from jpipe_lm.data.chat.renderer import Ended, Failure, NoTemplate, Rendered, Renderer
from jpipe_lm.data.chat.tokens import Tokenized, tokenized
from jpipe_lm.data.tokenizer import Tokenizer, batched
from jpipe_train.console import interrupt
from jpipe_train.data import sources
from jpipe_train.data.files.arrow import Column
from jpipe_train.data.files.records import records
from jpipe_train.data.files.wrong_lines import Place, WrongLine, WrongLines, check_characters

_BATCH = 2**22  # characters that go to the tokenizer together
_HINT = "or change the template"
COLUMNS = Column("messages"), Column("tools", is_needed=False)
"""The columns of a conversation."""


class Read(NamedTuple):
    """A text of a conversation; most conversations have only one.

    Attributes:
        place: its file, and line or row.
        held_out: whether it is for validation.
        size: how many bytes of the file it takes; 0 for all texts of a conversation but the first.
        number: the number of the text, from 1.
        texts: the texts of this conversation.
        tokenized: the text and its tokens.
    """

    place: Place
    held_out: bool
    size: int
    number: int
    texts: int
    tokenized: Tokenized


class _Pending(NamedTuple):
    """A text that is not tokenized yet."""

    place: Place
    held_out: bool
    size: int
    number: int
    texts: int
    rendered: Rendered


def read(files: Sequence[Path], renderer: Renderer, tokenizer: Tokenizer, fraction: float, where: str) -> Iterator[Read]:
    """Yield the texts of all conversations in order; the next ones are rendered while some are tokenized.

    Args:
        files: files with a conversation in each row.
        renderer: renders conversations.
        tokenizer: the tokenizer of their text.
        fraction: share to hold out, chosen by hash.
        where: the key or the option that names the files, for messages.

    Raises:
        InputError: a line is wrong, or the template does not render it.
    """
    wrong = WrongLines(where, "or leave it out")
    with ThreadPoolExecutor(1, "tokenizer") as thread:
        ahead: tuple[list[_Pending], Future[list[Tokenized]]] | None = None
        for batch in batched(_rendered(files, renderer, fraction, wrong), lambda each: len(each.rendered.text) + 100, _BATCH):
            following = batch, thread.submit(tokenized, [each.rendered for each in batch], tokenizer)
            if ahead is not None:
                yield from _joined(*ahead)
            ahead = following
        if ahead is not None:
            yield from _joined(*ahead)
    wrong.check()


def no_template(error: NoTemplate) -> InputError:
    """Return the error for a template that cannot be compiled."""
    return InputError(f"chat template: {error}; correct it, or choose another one")


def _joined(batch: Sequence[_Pending], result: "Future[list[Tokenized]]") -> list[Read]:
    return [Read(*each[:-1], done) for each, done in zip(batch, result.result(), strict=True)]


def _rendered(files: Sequence[Path], renderer: Renderer, fraction: float, wrong: WrongLines) -> Iterator[_Pending]:
    """Yield the texts of each conversation; after a wrong line the remaining ones are only checked."""
    for file in files:
        for line, found in records(file, wrong, COLUMNS, conversation):
            interrupt.check()
            try:
                texts = renderer.answers(found.messages, found.tools)
                for rendered in texts:
                    check_characters(rendered.text)
            except NoTemplate as error:
                raise no_template(error) from None
            except Ended as error:
                raise InputError(str(error), where=wrong.where, key=line.place, change=f"leave it out, {_HINT}") from None
            except (Failure, WrongLine) as error:
                wrong.hint = _HINT
                wrong.add(line.place, f"the chat template fails: {error}")
                continue
            if wrong.number:
                continue
            held_out = sources.place_of(found.key) < fraction
            for i, rendered in enumerate(texts):
                yield _Pending(line.place, held_out, 0 if i else line.size, i + 1, len(texts), rendered)
