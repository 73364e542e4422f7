"""Convert text to tokens and back, even while tokens are being generated."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from jpipe_lm.data.tokenizer import Tokenizer

BYTES = "bytes"  # in place of a tokenizer.json: each byte is a token
_UNKNOWN = "\ufffd"  # replaces what is not, or not yet, a character


@dataclass(frozen=True)
class Conversion:
    """The conversion of text to tokens and back.

    Attributes:
        encode: returns the tokens of a text.
        decode: returns the text of tokens; invalid UTF-8 becomes replacement characters.
        symbols: shape (n,), all tokens in increasing order.
        before: tokens that precede each text.
        alone: tokens that an empty text begins with; empty if there are none.
        ends: tokens that end a text.
        takes_bytes: whether a text may have bytes that are not UTF-8, in the form of `surrogateescape`.
        tokenizer: the tokenizer; None if each byte is a token.
        chat_template: the file of a chat template in place of the tokenizer's own.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    symbols: Int[np.ndarray, " n"]
    before: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    ends: Collection[int] = ()
    takes_bytes: bool = False
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt."""
        return [*self.before, *self.encode(text)] or list(self.alone)


def of_bytes() -> Conversion:
    """Return a conversion with a token for each byte."""

    def encode(text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    return Conversion(encode, lambda tokens: bytes(tokens).decode("utf-8", "replace"), np.arange(256), takes_bytes=True)


def of_tokenizer(
    tokenizer: Tokenizer, begins: Sequence[int] = (), ends: Sequence[int] = (), chat_template: str | None = None
) -> Conversion:
    """Return the conversion of a tokenizer.

    Args:
        tokenizer: the tokenizer.
        begins: tokens that an empty text begins with, unless the tokenizer has its own.
        ends: additional tokens that end a text.
        chat_template: as in `Conversion`.
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
    """Converts tokens to text as they are generated. A character with bytes in several tokens waits until it is complete.

    Args:
        decode: returns the text of tokens.
        before: the preceding tokens; whether a space follows may depend on them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(before[-8:])  # eight are enough; a character cut at the beginning is cut in both texts below
        self._returned = len(self._text())  # number of characters already returned
        self._whole = len(self._tokens)  # number of tokens up to the last complete character

    def add(self, token: int) -> str:
        """Add a token, and return the text that is now complete."""
        self._tokens.append(token)
        text = self._text()
        complete = text.rstrip(_UNKNOWN)  # some tokenizers replace complete characters, too, if a later one is incomplete
        new = complete[self._returned :]
        self._returned += len(new)
        if complete == text:
            self._tokens = self._tokens[self._whole :]
            self._whole, self._returned = len(self._tokens), len(self._text())
        return new

    def remainder(self) -> str:
        """Return the remaining text, once there are no more tokens."""
        return self._text()[self._returned :]

    def _text(self) -> str:
        return self._decode(self._tokens)


class Stops:
    """Ends a text before the first stop string in it, wherever tokens begin and end.

    Args:
        strings: the stop strings, none of them empty.
    """

    def __init__(self, strings: Sequence[str] = ()) -> None:
        self._strings = tuple(strings)
        self._held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """Add text; return the text that certainly precedes any stop string, and whether a stop string is complete."""
        self._held += text
        found = [(at + len(stop), at) for stop in self._strings if (at := self._held.find(stop)) >= 0]
        if found:
            before, self._held = self._held[: min(found)[1]], ""
            return before, True
        kept = max((n for stop in self._strings for n in range(1, len(stop)) if self._held.endswith(stop[:n])), default=0)
        known, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        return known, False

    def remainder(self) -> str:
        """Return the remaining text, once there is no more."""
        remainder, self._held = self._held, ""
        return remainder
