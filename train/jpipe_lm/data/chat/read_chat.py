"""Read files of conversations: render each conversation, tokenize its text, and find the tokens of the answers."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jpipe import InputError
from jpipe_lm.data.chat.conversations import Conversation, conversation
from jpipe_lm.data.chat.renderer import Ended, Failure, NoTemplate, Rendered, Renderer
from jpipe_lm.data.chat.tokens import Tokenized, tokenized
from jpipe_lm.data.tokenizer import Tokenizer, ahead
from jpipe_train.console import interrupt
from jpipe_train.data.files.arrow import Column
from jpipe_train.data.files.records import Row, records
from jpipe_train.data.files.wrong_lines import WrongLine, WrongLines, check_characters

_BATCH = 2**22  # characters that are tokenized together
_HINT = "or change the template"
COLUMNS = Column("messages"), Column("tools", is_needed=False)
"""The columns of a conversation."""


_Texts = tuple[Conversation, list[Rendered]]
"""A conversation and its texts; most conversations have only one text."""


def read(
    files: Sequence[Path], renderer: Renderer, tokenizer: Tokenizer, share: float, where: str
) -> Iterator[tuple[Row[_Texts], int, Tokenized]]:
    """Yield the row of each text, the number of the text in the row (from 0), and its tokens.

    While texts are tokenized, the next texts are rendered.

    Args:
        files: files with a conversation in each row.
        renderer: renders conversations.
        tokenizer: tokenizes the texts.
        share: the share of the conversations to hold out.

    Raises:
        InputError: a row is wrong, or the template cannot render it.
    """
    wrong = WrongLines(where, "or remove it")

    def texts(record: Mapping[str, Any]) -> _Texts:
        interrupt.check()
        found = conversation(record)
        return found, rendered(found, renderer, wrong)

    rows = records(files, wrong, COLUMNS, texts, lambda value: value[0].key, share)
    each = ((row, i, text) for row in rows for i, text in enumerate(row.value[1]))
    done = ahead(each, lambda item: len(item[2].text) + 100, _BATCH, lambda batch: tokenized([text for _, _, text in batch], tokenizer))
    yield from ((row, i, tokens) for (row, i, _), tokens in done)
    wrong.check()


def no_template(error: NoTemplate) -> InputError:
    """Return the error for a template that cannot be compiled."""
    return InputError(f"chat template: {error}; correct the template, or choose another one")


def rendered(found: Conversation, renderer: Renderer, wrong: WrongLines) -> list[Rendered]:
    """Return the texts of a conversation.

    Raise InputError if the template cannot be compiled, and WrongLine if the template fails for this conversation.
    """
    try:
        texts = renderer.answers(found.messages, found.tools)
        for rendered in texts:
            check_characters(rendered.text)
    except NoTemplate as error:
        raise no_template(error) from None
    except Ended as error:
        raise WrongLine(str(error), f"remove the conversation, {_HINT}") from None
    except (Failure, WrongLine) as error:
        wrong.hint = _HINT
        raise WrongLine(f"the chat template fails: {error}") from None
    return texts
