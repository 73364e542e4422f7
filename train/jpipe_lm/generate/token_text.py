"""Convert text to tokens, and tokens to text, also while the tokens are generated."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from jpipe_lm.data.tokenizer import Tokenizer

BYTES = "bytes"  # given instead of a tokenizer.json: each byte is a token
_UNKNOWN = "\ufffd"  # replaces bytes that are not a character, or not yet a complete character


@dataclass(frozen=True)
class Conversion:
    """The conversion of text to tokens and back."""

    encode: Callable[[str], list[int]]  # returns the tokens of a text
    decode: Callable[[Sequence[int]], str]  # returns the text of tokens. Invalid UTF-8 becomes replacement characters.
    symbols: Int[np.ndarray, " n"]  # shape (n,), all tokens in increasing order
    before: tuple[int, ...] = ()  # the tokens that are put before each text
    alone: tuple[int, ...] = ()  # the tokens of an empty prompt; empty if no token can begin a text
    ends: Collection[int] = ()  # the tokens that end a text
    takes_bytes: bool = False  # whether a text may contain bytes that are not UTF-8, represented as by the error handler `surrogateescape`
    tokenizer: Tokenizer | None = None  # the tokenizer; None if each byte is a token
    chat_template: str | None = None  # the file of a chat template that replaces the tokenizer's template

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        return [*self.before, *self.encode(text)] or list(self.alone)


def of_bytes() -> Conversion:
    """Return a conversion in which each byte is a token."""

    def encode(text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    return Conversion(encode, lambda tokens: bytes(tokens).decode("utf-8", "replace"), np.arange(256), takes_bytes=True)


def of_tokenizer(
    tokenizer: Tokenizer, begins: Sequence[int] = (), ends: Sequence[int] = (), chat_template: str | None = None
) -> Conversion:
    """Return the conversion of a tokenizer.

    `begins` are the tokens of an empty prompt, if the tokenizer has no begin tokens; `ends` end a text in addition to its end token.
    """
    all_ends = {*ends, *(() if tokenizer.end is None else (tokenizer.end,))}
    alone = tokenizer.begin or tuple(begins)
    return Conversion(
        lambda text: tokenizer.encoded([text])[0].tolist(),
        tokenizer.decoded,
        tokenizer.ids,
        tokenizer.begin,
        alone,
        all_ends,
        tokenizer=tokenizer,
        chat_template=chat_template,
    )


class Stream:
    """Converts tokens to text as they are generated. If several tokens make a character, it is returned with the last one.

    Args:
        decode: returns the text of tokens.
        before: the preceding tokens. Whether the text begins with a space may depend on them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(before[-8:])  # eight are enough: if the first character is cut off, it is so in both decoded texts
        self._returned = len(self._text())  # number of characters already returned
        self._whole = len(self._tokens)  # number of tokens up to the last complete character

    def add(self, token: int) -> str:
        """Add a token, and return the text that is now complete."""
        self._tokens.append(token)
        text = self._text()
        complete = text.rstrip(_UNKNOWN)  # some tokenizers also replace complete characters if a later character is incomplete
        new = complete[self._returned :]
        self._returned += len(new)
        if complete == text:
            self._tokens = self._tokens[self._whole :]
            self._whole, self._returned = len(self._tokens), len(self._text())
        return new

    def remainder(self) -> str:
        """Return the remaining text, after the last token."""
        return self._text()[self._returned :]

    def _text(self) -> str:
        return self._decode(self._tokens)


class Stops:
    """Ends a text before the first stop string in it, even if the stop string begins or ends inside a token.

    Args:
        strings: the stop strings, none of them empty.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Add text. Return the text that is certainly before any stop string, and whether the text has ended with a stop string."""
        self._held += text
        found = [(at + len(stop), at) for stop in self._strings if (at := self._held.find(stop)) >= 0]
        if found:
            before, self._held = self._held[: min(found)[1]], ""
            return before, True
        kept = max((n for stop in self._strings for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0)
        known, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return known, False

    def remainder(self) -> str:
        """Return the text that was held back, after the last text was added."""
        remainder, self._held = self._held, ""
        return remainder
