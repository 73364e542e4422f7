"""Tokenize rendered conversations, and find the tokens of answers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int64, UInt32

from jpipe_lm.data.chat.renderer import Failure, Rendered, Renderer
from jpipe_lm.data.tokenizer import Tokenizer

Range = tuple[int, int]


class Tokenized(NamedTuple):
    """A conversation as tokens."""

    text: str  # the text of the whole conversation
    tokens: UInt32[np.ndarray, " n"]  # the tokens of the text
    # shape (n, 2): for each token, the position of its first character in the text and the position after its last
    offsets: Int64[np.ndarray, "n 2"]
    answers: list[Range]  # for each answer, the index of its first token and the index after its last


def tokenized(conversations: Sequence[Rendered], tokenizer: Tokenizer) -> list[Tokenized]:
    """Tokenize conversations on all cores, or raise InputError. The template writes the special tokens at the ends of a text."""
    special = np.asarray(tokenizer.special_ids(), np.int64)
    encoded = tokenizer.with_offsets([conversation.text for conversation in conversations])
    found = []
    for (text, spans, is_marked), (tokens, offsets) in zip(conversations, encoded, strict=True):
        ranges = [_range(offsets, *span) for span in spans]
        if not is_marked:
            is_special = np.isin(tokens, special)
            ranges = [_without_spaces(answer, text, offsets, is_special) for answer in ranges]
        found.append(Tokenized(text, tokens, offsets, _apart(ranges)))
    return found


def end_of_turn(renderer: Renderer, tokenizer: Tokenizer) -> tuple[list[int], list[str]]:
    """Return a list with the special token and a list with the text that a template writes after an answer; one of them is empty."""
    question, answer = {"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}
    try:
        text = renderer.text([question, answer])
    except Failure:  # rendering a conversation reports the error
        return [], []
    _, found, after = text.rpartition("answer")
    if not found or not after.strip():
        return [], []
    ((tokens, offsets),) = tokenizer.with_offsets([after])
    first = next(i for i, (start, stop) in enumerate(offsets) if after[start:stop].strip())
    if int(tokens[first]) in tokenizer.special_ids():
        return [int(tokens[first])], []
    return [], [after.strip()]


def _range(offsets: Int64[np.ndarray, "n 2"], start: int, stop: int) -> Range:
    """Return the range of tokens that contain any of the characters start to stop - 1."""
    some = np.flatnonzero((offsets[:, 0] < stop) & (offsets[:, 1] > start))
    return (int(some[0]), int(some[-1]) + 1) if some.size else (0, 0)


def _without_spaces(answer: Range, text: str, offsets: Int64[np.ndarray, "n 2"], is_special: np.ndarray) -> Range:
    """Return an answer without the spaces after its final special token, because generation stops at this token."""
    start, stop = answer
    last = next((i for i in reversed(range(start, stop)) if is_special[i]), None)
    if last is None or text[offsets[last, 1] : offsets[stop - 1, 1]].strip():
        return answer
    return start, last + 1


def _apart(ranges: Sequence[Range]) -> list[Range]:
    """Return ranges without common tokens. A token that ends an answer and begins the next one belongs to the first."""
    found: list[Range] = []
    for start, stop in ranges:
        start = max(start, found[-1][1] if found else 0)
        if start < stop:
            found.append((start, stop))
    return found
