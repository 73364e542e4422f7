"""Hold a conversation with a model: `jpipe generate --chat`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from jpipe import InputError
from jpipe_train.console import interrupt
from jpipe_train.console.terminal import count
from jpipe_train.data.chat import template
from jpipe_train.data.chat.renderer import Failure, Renderer
from jpipe_train.data.chat.tokens import end_of_turn
from jpipe_train.generate import model_source
from jpipe_train.generate.generate import Model, Request, check_options, check_text, check_tokens, start
from jpipe_train.generate.texts import Texts, start_texts
from jpipe_train.generate.token_text import Conversion
from jpipe_train.launch.together import Together

MOST_BY_DEFAULT = 1000  # tokens of an answer
_MEMORY_FOR = 8192  # positions at the start; a model that has more is not placed for all of them
_SEEDS = 2**32


@dataclass
class Chat:
    """A conversation so far.

    Attributes:
        request: the options.
        source: the model, on disk.
        model: the model, on its devices.
        words: the conversion of its tokens.
        renderer: renders the conversation as text.
        stops: strings before which an answer ends.
        messages: what was said.
    """

    request: Request
    source: model_source.Origin
    model: Model
    words: Conversion
    renderer: Renderer
    stops: tuple[str, ...]
    messages: list[dict[str, Any]] = field(default_factory=list)

    def answer(self, said: str, write: Callable[[str], None], say: Callable[[str], None]) -> bool:
        """Answer what a user says.

        Args:
            said: the text.
            write: writes the answer, piece by piece.
            say: prints a line about it.

        Returns:
            Whether the answer is complete; False if Ctrl-C was pressed.

        Raises:
            InputError: the template does not render the conversation, or the model has too few positions.
        """
        check_text(said, "standard input")
        self.messages.append({"role": "user", "content": said})
        tokens = self._tokens()
        most = MOST_BY_DEFAULT if self.request.tokens is None else self.request.tokens
        started = start_texts([said], [tokens], most, self.source.config.max_positions_used, self.words, self.stops)
        texts = Texts(started, self.words, self.request.as_json, write, say, with_speed=False)
        is_complete = self.model.answer([tokens], texts, (self.request.seed + len(self.messages) // 2) % _SEEDS)
        (text,) = texts.each
        if text.end == "tokens":
            say(f"stopped after {count(text.tokens, 'token')}; --tokens N allows more")
        self.messages.append({"role": "assistant", "content": text.whole})
        return is_complete

    def _tokens(self) -> list[int]:
        try:
            tokens = self.words.encode(self.renderer.text(self.messages, generation_prompt=True))
        except Failure as error:
            raise InputError(f"chat template: {error}; use a model whose template knows such conversations") from None
        if not tokens:
            raise InputError("chat template: expected a text of the conversation, found an empty one; use another template")
        check_tokens(tokens, self.words, self.source.config, "the conversation", "begin a new one")
        return tokens


def main(
    request: Request, said: Callable[[], Iterator[str]], write: Callable[[str], None], say: Callable[[str], None], *, goes_on: bool
) -> bool:
    """Hold a conversation.

    Args:
        request: the options.
        said: yields what the user says, one text after the other.
        write: writes answers, piece by piece.
        say: prints a line about them.
        goes_on: whether the conversation goes on after Ctrl-C has stopped an answer.

    Returns:
        Whether it ended with what the user says; False if Ctrl-C was pressed.

    Raises:
        InputError: as `jpipe_train.generate.generate.main`; there is no chat template, or it does not render the conversation.
    """
    check_options(request)
    source = model_source.find(request.source, request.step, request.weights, request.tokenizer, request.dtype, say, request.adapters)
    words = source.words()
    if words.tokenizer is None:
        raise InputError("--chat: expected a model with a tokenizer and a chat template, found one of bytes; leave --chat out")
    with Renderer(template.find(words.tokenizer, words.chat_template)) as renderer:
        ends, stops = end_of_turn(renderer, words.tokenizer)
        words = replace(words, ends={*words.ends, *ends})
        model = start(request, source, words, 1, min(source.config.max_positions_used, _MEMORY_FOR), say, Together(None))
        chat = Chat(request, source, model, words, renderer, (*request.stops, *stops))
        if request.system is not None:
            check_text(request.system, "--system")
            chat.messages.append({"role": "system", "content": request.system})
        for text in said():
            if not chat.answer(text, write, say):
                if not goes_on:
                    return False
                interrupt.forget()
    return True
