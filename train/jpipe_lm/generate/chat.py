"""Hold a conversation with a model: `jpipe generate --chat`."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Self

from jpipe import InputError
from jpipe_lm.data.chat import template
from jpipe_lm.data.chat.renderer import Failure, Renderer
from jpipe_lm.data.chat.tokens import end_of_turn
from jpipe_lm.data.tokenizer import Tokenizer
from jpipe_lm.generate import model_source
from jpipe_lm.generate.continue_prompts import agree_on, check_options, check_text, check_tokens, ignore, start
from jpipe_lm.generate.request import Request
from jpipe_lm.generate.several_prompts import Text, Texts, start_texts
from jpipe_lm.generate.token_text import Conversion
from jpipe_train.console import interrupt
from jpipe_train.console.terminal import count
from jpipe_train.launch.team import Team

MOST_BY_DEFAULT = 1000  # the most tokens of an answer
_MEMORY_FOR = 8192  # the placement reserves memory for at most this many positions, even if the model has more
_SEEDS = 2**32
_LONGEST_PAUSE = 7 * 24 * 3600.0  # seconds that other processes wait for the user's next message


@dataclass
class Chat:
    """The conversation so far, in process 0."""

    request: Request  # the options
    source: model_source.Origin  # the source of the model
    words: Conversion  # the conversion between text and tokens
    renderer: Renderer  # renders the conversation as text
    messages: list[dict[str, Any]] = field(default_factory=list)  # the messages so far

    @classmethod
    def begin(cls, request: Request, source: model_source.Origin, words: Conversion, renderer: Renderer) -> Self:
        """Return a new conversation, with only the system message, if any. Raise InputError if that is not in UTF-8."""
        chat = cls(request, source, words, renderer)
        if request.system is not None:
            check_text(request.system, "--system")
            chat.messages.append({"role": "system", "content": request.system})
        return chat

    def prompt(self, said: str) -> list[int]:
        """Add a user's message, and return the tokens of the whole conversation.

        Raise InputError if the template cannot render it, or the model has too few positions.
        """
        check_text(said, "standard input")
        self.messages.append({"role": "user", "content": said})
        try:
            tokens = self.words.encode(self.renderer.text(self.messages, generation_prompt=True))
        except Failure as error:
            raise InputError(f"chat template: {error}; use a model with a template for such conversations") from None
        if not tokens:
            raise InputError("chat template: expected the text of the conversation, found an empty text; use another template")
        check_tokens(tokens, self.words, self.source.config, "the conversation", "begin a new conversation")
        return tokens


def main(
    request: Request,
    said: Callable[[], Iterator[str]],
    write: Callable[[str], None],
    say: Callable[[str], None],
    team: Team,
    *,
    goes_on: bool,
) -> bool:
    """Hold a conversation. Return whether the user's messages ended it; False if Ctrl-C did.

    Only process 0 calls `said`, which returns an iterator of the user's messages, `write`, which writes pieces of answers, and `say`, which
    prints a line about the answers. `goes_on` tells whether the conversation goes on after Ctrl-C has stopped an answer. Raise InputError
    as in `jpipe_lm.generate.continue_prompts.main`, or if there is no chat template, or it cannot render the conversation, and PeerLost if
    another process died, hung or stopped.
    """
    if not team.is_first:
        write = say = ignore

    def prepare() -> tuple[model_source.Origin, Conversion, Tokenizer]:
        check_options(request)
        source = model_source.find(request, say)
        if (words := source.words()).tokenizer is None:
            raise InputError("--chat: expected a model with a tokenizer and a chat template, found a model of bytes; remove --chat")
        return source, words, words.tokenizer

    source, words, tokenizer = team.run_on_all(prepare)
    agree_on(request, source, team)
    with contextlib.ExitStack() as stack:
        chats: list[Chat] = []  # one conversation in process 0, none in other processes

        def begin() -> str:
            renderer = stack.enter_context(Renderer(template.find(tokenizer, words.chat_template)))
            chats.append(Chat.begin(request, source, words, renderer))
            return json.dumps(end_of_turn(renderer, tokenizer))

        ends, stops = json.loads(team.from_first("what ends an answer", begin))
        words_with_ends = replace(words, ends={*words.ends, *ends})
        model = start(request, source, words_with_ends, 1, min(source.config.max_positions_used, _MEMORY_FOR), say, team)
        most = MOST_BY_DEFAULT if request.tokens is None else request.tokens
        for turn, (text, tokens) in enumerate(_turns(said, chats, team)):
            started = start_texts([text], [tokens], most, source.config.max_positions_used, words, (*request.stops, *stops))
            texts = Texts(started, words_with_ends, request.as_json, write, say, with_speed=False)
            is_complete = model.answer([tokens], texts, (request.seed + turn) % _SEEDS)
            _report(started[0], chats, say)
            if not is_complete:
                if not goes_on:
                    say("interrupted")
                    return False
                interrupt.forget()
    return True


def _report(answer: Text, chats: list[Chat], say: Callable[[str], None]) -> None:
    """Add an answer to the conversation, and report if it was cut at the limit of tokens."""
    if answer.end == "tokens":
        say(f"stopped after {count(answer.tokens, 'token')}; --tokens N allows more")
    for chat in chats:
        chat.messages.append({"role": "assistant", "content": answer.whole})


def _turns(said: Callable[[], Iterator[str]], chats: list[Chat], team: Team) -> Iterator[tuple[str, list[int]]]:
    """Yield each user's message and the tokens of the conversation so far. All processes get the messages of process 0."""
    spoken = said()

    def following() -> str:
        text = next(spoken, None)
        return json.dumps(None if text is None else (text, chats[0].prompt(text)))

    for turn in itertools.count(1):
        found = json.loads(team.from_first(f"turn {turn} of the user", following, limit=_LONGEST_PAUSE))
        if found is None:
            if turn == 1 and team.processes is not None:  # jpipe launch does not pass on the terminal
                nothing = "--chat: expected lines on standard input, found none; with jpipe launch, pipe the lines in: cat | jpipe launch …"
                raise team.shared(InputError(nothing))
            return
        yield found[0], found[1]
