"""Text to tokens and back, also while the tokens are still coming."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from jpipe_train.data.tokenizer import Tokenizer

BYTES = "bytes"  # in place of a tokenizer.json: each byte is a token
_UNKNOWN = "\ufffd"  # in place of what is no character, or not yet


@dataclass(frozen=True)
class Words:
    """What tokens mean.

    Attributes:
        encode: the tokens of a text.
        decode: the text of tokens; what is no UTF-8 becomes replacement characters.
        symbols: all tokens there are, rising.
        before: what stands before each text.
        alone: what a text begins with that is empty; nothing: there is no such thing.
        ends: tokens behind which there is nothing more.
        takes_bytes: whether a text may have bytes that are no UTF-8, as `surrogateescape` has them.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    symbols: Int[np.ndarray, " n"]
    before: tuple[int, ...] = ()
    alone: tuple[int, ...] = ()
    ends: Collection[int] = ()
    takes_bytes: bool = False

    def prompt(self, text: str) -> list[int]:
        """The tokens to begin with."""
        return [*self.before, *self.encode(text)] or list(self.alone)


def of_bytes() -> Words:
    """A token for each byte."""

    def encode(text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    return Words(encode, lambda tokens: bytes(tokens).decode("utf-8", "replace"), np.arange(256), takes_bytes=True)


def of_tokenizer(tokenizer: Tokenizer, begins: Sequence[int] = (), ends: Sequence[int] = ()) -> Words:
    """Those of a tokenizer.

    Args:
        tokenizer: which.
        begins: what an empty text begins with, if the tokenizer does not say it.
        ends: tokens that also end a text.
    """
    found = {*ends, *(() if tokenizer.end is None else (tokenizer.end,))}
    alone = tokenizer.begin or tuple(begins)
    return Words(lambda text: tokenizer.encoded([text])[0].tolist(), tokenizer.decoded, tokenizer.ids, tokenizer.begin, alone, found)


class Stream:
    """The text of tokens as they come. A character whose bytes are in several tokens waits until it is whole.

    Args:
        decode: the text of tokens.
        before: tokens whose text is there already; whether a space is to follow may depend on them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = list(before[-8:])  # so many are enough, and one that is cut at its beginning is cut in both texts below
        self._given = len(self._text())  # characters of their text that are not to come any more
        self._whole = len(self._tokens)  # tokens whose text ended with a whole character

    def add(self, token: int) -> str:
        """What can be said now."""
        self._tokens.append(token)
        text = self._text()
        known = text.rstrip(_UNKNOWN)  # some tokenizers take whole characters for none as well, where one behind them is not whole
        new = known[self._given :]
        self._given += len(new)
        if known == text:
            self._tokens = self._tokens[self._whole :]
            self._whole, self._given = len(self._tokens), len(self._text())
        return new

    def rest(self) -> str:
        """What is left when no more tokens come."""
        return self._text()[self._given :]

    def _text(self) -> str:
        return self._decode(self._tokens)
