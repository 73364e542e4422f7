"""The texts that come of several prompts: made together, said one after the other."""

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Int
from numpy import ndarray

from jpipe import InputError
from jpipe.errors import short
from jpipe_train.console.terminal import count
from jpipe_train.generate.words import Stream, Words

_FEW = 10  # steps of which it is not told how fast they were
End = Literal["end of text", "tokens", "positions", "interrupted"]


@dataclass
class Text:
    """What comes of one prompt.

    Attributes:
        prompt: its text.
        length: how many tokens it has.
        most: at most so many come.
        last: why they end then.
        stream: from tokens to text.
        new: text that is not said yet.
        whole: all of it.
        tokens: how many have come.
        end: why no more come; None: they do.
    """

    prompt: str
    length: int
    most: int
    last: End
    stream: Stream
    new: str = ""
    whole: str = ""
    tokens: int = 0
    end: End | None = None

    def add(self, token: int, ends: Collection[int]) -> None:
        """One more token, which may end the text."""
        if token in ends:
            self.finish("end of text")
            return
        self.tokens += 1
        self._say(self.stream.add(token))
        if self.tokens == self.most:
            self.finish(self.last)

    def finish(self, why: End) -> None:
        """No more tokens come."""
        self._say(self.stream.rest())
        self.end = why

    def _say(self, more: str) -> None:
        self.new, self.whole = self.new + more, self.whole + more


@dataclass
class Texts:
    """All of them.

    Attributes:
        each: one for each prompt.
        words: what tokens mean.
        as_json: an object for each in the end, in place of text as it comes.
        write: gets text, piece by piece.
        say: gets lines about it.
    """

    each: list[Text]
    words: Words
    as_json: bool
    write: Callable[[str], None]
    say: Callable[[str], None]
    _at: int = 0  # the one that is being said
    _clock: "_Clock" = field(default_factory=lambda: _Clock())

    @property
    def are_done(self) -> bool:
        """Whether each has ended."""
        return all(text.end is not None for text in self.each)

    def add(self, tokens: Int[ndarray, " b"]) -> None:
        """The next token of each.

        Raises:
            InputError: the model gave none, for what it computes is no number.
        """
        coming = [(text, int(token)) for text, token in zip(self.each, tokens, strict=True) if text.end is None]
        for text, token in coming:
            if token < 0:
                raise InputError(
                    f"generate: expected numbers as logits, found NaN after {count(text.length + text.tokens, 'token')}; the training of "
                    "this model has diverged, or its weights are damaged"
                )
            text.add(token, self.words.ends)
        self._clock.count(len(coming))
        if not self.as_json:
            self._tell()

    def finish(self) -> None:
        """Say the rest, why texts ended where that is not plain, and how fast they came."""
        for text in self.each:
            if text.end is None:
                text.finish("interrupted")
        if self.as_json:
            for text in self.each:
                facts = {"prompt": text.prompt, "text": text.whole, "tokens": text.tokens, "end": text.end}
                self.write(json.dumps(facts) + "\n")
        else:
            self._tell()
        for number, text in enumerate(self.each, 1):
            which = f"prompt {number}: " if len(self.each) > 1 else ""
            if text.end == "positions":
                self.say(
                    f"{which}stopped after {count(text.tokens, 'token')}: the model has no more than {text.length + text.most} positions"
                )
        self.say(self._clock.told(sum(text.tokens for text in self.each), any(text.end == "interrupted" for text in self.each)))

    def _tell(self) -> None:
        """What is new of the text that is being said, and of those behind it if it has ended."""
        while self._at < len(self.each):
            text = self.each[self._at]
            if text.new or text.end is not None:
                self.write(text.new + ("\n" if text.end is not None else ""))
                text.new = ""
            if text.end is None:
                return
            self._at += 1
            if self._at < len(self.each):
                self.head()

    def head(self) -> None:
        """Before a text, where there are several, which it is."""
        if len(self.each) > 1 and not self.as_json:
            self.say(f"prompt {self._at + 1}: {short(self.each[self._at].prompt)}")


class _Clock:
    """How fast tokens come, from the third step on: programs are compiled in the first two."""

    def __init__(self) -> None:
        self._times = [time.perf_counter()]
        self._counts: list[int] = []

    def count(self, tokens: int) -> None:
        """So many came now."""
        self._times.append(time.perf_counter())
        self._counts.append(tokens)

    def told(self, tokens: int, interrupted: bool) -> str:
        """In words."""
        words = f"{'interrupted after ' if interrupted else ''}{count(tokens, 'token')} in {self._times[-1] - self._times[0]:.1f} s"
        later, seconds = sum(self._counts[2:]), self._times[-1] - self._times[min(2, len(self._counts))]
        return words + (f"; {later / seconds:,.0f} tokens/s once compiled" if len(self._counts) >= _FEW and seconds > 0 else "")


def begun(prompts: Sequence[str], tokens: Sequence[Sequence[int]], most: int, positions: int, words: Words) -> list[Text]:
    """A text for each prompt, before anything comes.

    Args:
        prompts: their texts.
        tokens: their tokens.
        most: so many may come.
        positions: and all are no more than so many.
        words: what tokens mean.
    """

    def of(prompt: str, own: Sequence[int]) -> Text:
        left = positions - len(own)
        return Text(prompt, len(own), min(most, left), "positions" if left < most else "tokens", Stream(words.decode, own))

    return [of(prompt, own) for prompt, own in zip(prompts, tokens, strict=True)]
