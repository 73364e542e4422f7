"""The texts generated from several prompts. They are generated together and printed one after the other."""

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Int
from numpy import ndarray

from jpipe import InputError
from jpipe.errors import short
from jpipe_lm.generate.token_text import Conversion, Stops, Stream
from jpipe_train.console.terminal import count

_MIN_STEPS = 10  # no speed is printed after fewer steps
End = Literal["end of text", "stop", "tokens", "positions", "interrupted"]


@dataclass
class Text:
    """The continuation of one prompt."""

    prompt: str  # the text of the prompt
    length: int  # the number of tokens of the prompt
    most: int  # the largest number of tokens to generate
    limit: End  # the reason why the text ends after `most` tokens
    stream: Stream  # converts tokens to text
    stops: Stops  # ends the text before a stop string
    new: str = ""  # the text that is not printed yet
    whole: str = ""  # the whole text
    tokens: int = 0  # the number of tokens generated so far
    end: End | None = None  # the reason why the text has ended; None if it has not ended

    def add(self, token: int, ends: Collection[int]) -> None:
        """Add a token. The text ends if the token is in `ends`, completes a stop string, or is the last token allowed."""
        if token in ends:
            self.finish("end of text")
            return
        self.tokens += 1
        self._append(self.stream.add(token))
        if self.tokens == self.most and self.end is None:
            self.finish(self.limit)

    def finish(self, why: End) -> None:
        """End the text, for the reason `why`."""
        self._append(self.stream.remainder())
        if self.end is None:
            self._write(self.stops.remainder())
            self.end = why

    def _append(self, more: str) -> None:
        text, stopped = self.stops.add(more)
        self._write(text)
        if stopped:
            self.end = "stop"

    def _write(self, text: str) -> None:
        self.new, self.whole = self.new + text, self.whole + text


@dataclass
class Texts:
    """The continuations of all prompts."""

    each: list[Text]  # the text of each prompt
    words: Conversion  # converts tokens to text
    as_json: bool  # whether to write a JSON object for each text at the end, instead of the text while it is generated
    write: Callable[[str], None]  # writes pieces of text
    say: Callable[[str], None]  # prints a line about the texts
    with_speed: bool = True  # whether to print the speed at the end
    _current: int = 0  # index of the text that is being printed
    _clock: "_Clock" = field(default_factory=lambda: _Clock())

    @property
    def are_done(self) -> bool:
        """Whether all texts have ended."""
        return all(text.end is not None for text in self.each)

    def add(self, tokens: Int[ndarray, " b"]) -> None:
        """Add the next token to each text that has not ended. Raise InputError if the logits of the model are NaN."""
        unfinished = [(text, int(token)) for text, token in zip(self.each, tokens, strict=True) if text.end is None]
        for text, token in unfinished:
            if token < 0:
                raise InputError(
                    f"generate: expected numbers as logits, found NaN after {count(text.length + text.tokens, 'token')}; the training of "
                    "this model has diverged, or its weights are damaged"
                )
            text.add(token, self.words.ends)
        self._clock.count(len(unfinished))
        if not self.as_json:
            self._write_new()

    def finish(self) -> None:
        """Write the remaining text; then print which texts ended at the model's largest position, and print the speed."""
        for text in self.each:
            if text.end is None:
                text.finish("interrupted")
        if self.as_json:
            for text in self.each:
                facts = {"prompt": text.prompt, "text": text.whole, "tokens": text.tokens, "end": text.end}
                self.write(json.dumps(facts) + "\n")
        else:
            self._write_new()
        for number, text in enumerate(self.each, 1):
            prefix = f"prompt {number}: " if len(self.each) > 1 else ""
            if text.end == "positions":
                self.say(
                    f"{prefix}stopped after {count(text.tokens, 'token')}: the model has no more than {text.length + text.most} positions"
                )
        if self.with_speed:
            self.say(self._clock.describe(sum(text.tokens for text in self.each), any(text.end == "interrupted" for text in self.each)))

    def _write_new(self) -> None:
        """Write the new text of the current prompt. If this text has ended, also write the new text of the following prompts."""
        while self._current < len(self.each):
            text = self.each[self._current]
            if text.new or text.end is not None:
                self.write(text.new + ("\n" if text.end is not None else ""))
                text.new = ""
            if text.end is None:
                return
            self._current += 1
            if self._current < len(self.each):
                self.head()

    def head(self) -> None:
        """If there are several texts, print the number and the beginning of the current prompt."""
        if len(self.each) > 1 and not self.as_json:
            self.say(f"prompt {self._current + 1}: {short(self.each[self._current].prompt)}")


class _Clock:
    """Measures the speed from the third step on, because programs are compiled during the first two steps."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]
        self._counts: list[int] = []

    def count(self, tokens: int) -> None:
        """Record a step that generated this number of tokens."""
        self._times.append(time.perf_counter())
        self._counts.append(tokens)

    def describe(self, tokens: int, interrupted: bool) -> str:
        """Return a line with the number of tokens, the time and the speed."""
        words = f"{'interrupted after ' if interrupted else ''}{count(tokens, 'token')} in {self._times[-1] - self._times[0]:.1f} s"
        later, seconds = sum(self._counts[2:]), self._times[-1] - self._times[min(2, len(self._counts))]
        return words + (f"; {later / seconds:,.0f} tokens/s once compiled" if len(self._counts) >= _MIN_STEPS and seconds > 0 else "")


def start_texts(
    prompts: Sequence[str],
    tokens: Sequence[Sequence[int]],
    most: int,
    positions: int,
    words: Conversion,
    stops: Sequence[str] = (),
) -> list[Text]:
    """Return an empty text for each prompt, given as tokens.

    `most` limits the tokens to generate for each, and `positions` a prompt with its continuation. A text ends before the
    first of the `stops` in it.
    """

    def start(prompt: str, prompt_tokens: Sequence[int]) -> Text:
        room = positions - len(prompt_tokens)
        limit: End = "positions" if room < most else "tokens"
        stream = Stream(words.decode, prompt_tokens)
        return Text(prompt, len(prompt_tokens), min(most, room), limit, stream, Stops(stops))

    return [start(prompt, prompt_tokens) for prompt, prompt_tokens in zip(prompts, tokens, strict=True)]
