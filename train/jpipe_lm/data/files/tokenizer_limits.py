"""Limit how much an untrusted tokenizer can lengthen a text, and how long its regular expressions may search."""

import base64
import itertools
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MOST_GROWTH = 2**12  # a character may become at most this many characters; for chains such as ALBERT's the bound is below 2,000
MOST_STEPS = 1000  # the most steps of a chain, and the most characters that one step may add
LONGEST_TOKEN = 4096  # characters; the longest tokens of well-known tokenizers have a few hundred
MOST_ADDED = 2**26  # the most characters of all added tokens together, after normalizing
MOST_SECONDS = 1.0  # the most seconds for a few hundred short texts; usual expressions need a hundredth of this
_MOST_TEXTS = 200
_PARTS = "normalizer", "pre_tokenizer", "decoder", "post_processor"
_CHAINS = "normalizers", "pretokenizers", "decoders", "processors"
_LARGEST_FACTOR = 36
_FACTORS = {"ByteLevel": 4, "Lowercase": 3, "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18} | dict.fromkeys(
    (
        *("BPEDecoder", "BertPreTokenizer", "BertProcessing", "ByteFallback", "CTC", "CharDelimiterSplit", "Digits", "FixedLength", "Fuse"),
        *("Metaspace", "Nmt", "Punctuation", "RobertaProcessing", "Split", "Strip", "StripAccents", "UnicodeScripts", "Whitespace"),
        *("WhitespaceSplit", "WordPiece"),
    ),
    1,
)
"""The most characters that each kind of step can make from one. Other steps count with the largest of these factors."""
_ATOM = r"(?:\\[sSdDwW]|\\[pP]\{\w+\}|\\[^\w]|\[[^\[\]]+\]|[^\\\[\](){}*+?|^$.&])(?:\+|\{(\d+)(?:,\d*)?\})?"
"""An atom of a regular expression that matches at least one character, optionally with a number of repetitions."""


class TooMuch(Exception):
    """A tokenizer exceeds the limits. The message is the end of a sentence: what was expected and what was found."""


def check_content(content: bytes) -> set[str]:
    """Check a tokenizer.json before the tokenizers library reads it, and return the regular expressions in it.

    Raise TooMuch if the tokenizer exceeds the limits, and ValueError if the content is not JSON, or has a key twice, for which the library
    might read another value than this check.
    """
    declared = json.loads(content, object_pairs_hook=_object)
    if not isinstance(declared, dict):
        return set()  # the library reports the error
    steps = {part: _steps(declared.get(part), part) for part in _PARTS}
    lengths = _Lengths()
    for step in reversed([*steps["normalizer"], *steps["pre_tokenizer"]]):
        lengths.before(step, "the normalizer and pre_tokenizer")
    added = declared.get("added_tokens")
    texts = [token.get("content") for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    if (size := sum(lengths.of(text) for text in texts if isinstance(text, str))) > MOST_ADDED:
        raise TooMuch(f"added_tokens of at most {MOST_ADDED:,} characters once normalized, found {size:,.0f}")
    decoded = _Lengths()
    for step in reversed(steps["decoder"]):
        decoded.before(step, "the decoder")
    _check_template(steps["post_processor"])
    _check_model(declared.get("model"))
    return {step["pattern"]["Regex"] for part in steps.values() for step in part if _has_regex(step)}


def check_vocabulary(tokens: Mapping[str, int]) -> None:
    """Check the lengths of all tokens."""
    if (longest := max(map(len, tokens), default=0)) > LONGEST_TOKEN:
        raise TooMuch(f"tokens of at most {LONGEST_TOKEN:,} characters, found one of {longest:,}")


def check_time(rules: Any, expressions: Iterable[str]) -> None:
    """Tokenize and decode short texts for which a regular expression with catastrophic backtracking would take long.

    The library ends a search after ten million steps, so the time for a single text is bounded. Raise TooMuch beyond the limit.
    """
    words = {word for expression in expressions for word in re.findall(r"[^\W_]{1,20}", expression)[:_MOST_TEXTS]}
    letters = {letter for word in words for letter in word}
    start = time.process_time()
    for text, times in itertools.product(sorted({*words, *letters, " ", "\n", "!", "é", "中"})[:_MOST_TEXTS], (4, 16, 64)):
        rules.encode(text * times + "\0", add_special_tokens=False)
        if rules.decoder is not None:
            rules.decoder.decode([text * times + "\0"])
        if (taken := time.process_time() - start) > MOST_SECONDS:
            raise TooMuch(f"regular expressions that take at most {MOST_SECONDS:g} s for short texts, found {taken:.1f} s")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("expected each key of an object once, found a key twice")
    return found


def _has_regex(step: Mapping[str, Any]) -> bool:
    return isinstance(step.get("pattern"), dict) and isinstance(step["pattern"].get("Regex"), str)


def _shortest_match(expression: str) -> int:
    """Return the least number of characters in a match; 0 if a match may be empty, or if the number is not obvious."""
    parts = expression.split("|")
    if not all(re.fullmatch(f"(?:{_ATOM})+", part) for part in parts):
        return 0
    return min(sum(int(times or 1) for times in re.findall(_ATOM, part)) for part in parts)


def _steps(declared: Any, part: str) -> list[dict[str, Any]]:
    """Return the steps of a part in order. Nested sequences are flattened."""
    found: list[dict[str, Any]] = []
    waiting = [declared]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, dict):
            continue
        inner = [each for key in reversed(_CHAINS) if isinstance(step.get(key), list) for each in reversed(step[key])]
        if step.get("type") != "Sequence":
            found.append(step)
        waiting += inner
        if len(found) + len(waiting) > MOST_STEPS:
            raise TooMuch(f"at most {MOST_STEPS:,} steps of the {part}, found more")
    return found


class _Lengths:
    """The most characters that each character can become in the last steps of a chain. `before` adds the step before these."""

    def __init__(self) -> None:
        self._of: dict[str, float] = {}
        self._other = 1.0  # the length for characters that `_of` does not have

    def of(self, text: str) -> float:
        """Return the most characters that a text can become."""
        return sum(self._of.get(character, self._other) for character in text)

    def before(self, step: Mapping[str, Any], chain: str) -> None:
        """Add `step`, which precedes the steps so far. Raise TooMuch if a character can become more characters than the limit."""
        kind, pattern = str(step.get("type")), step.get("pattern")
        content = step.get("content") if kind == "Replace" else step.get("prepend") if kind == "Prepend" else None
        literal = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(content, str):
            new = self.of(content)
            if isinstance(literal, str) and literal:
                self._of |= {character: max(self.of(character), new / len(literal)) for character in literal}
            elif shortest := _shortest_match(step["pattern"]["Regex"]) if _has_regex(step) else 0:
                self._of = {character: max(length, new / shortest) for character, length in self._of.items()}
                self._other = max(self._other, new / shortest)
            else:
                self._all(1, new)
        else:
            factor = _longest_of_map(step) if kind == "Precompiled" else _FACTORS.get(kind, _LARGEST_FACTOR)
            self._all(factor, int(kind in ("ByteLevel", "Metaspace")))
        if (most := max([self._other, *self._of.values()])) > MOST_GROWTH:
            found = "very many" if math.isinf(most) else f"up to {most:,.0f}"
            raise TooMuch(f"{chain} to make at most {MOST_GROWTH:,} characters from one, found {found}")

    def _all(self, times: int, more: float) -> None:
        """Add a step that makes `times` characters of any kind from each character, plus `more` characters."""
        if times == 1:
            self._of = {character: length + more for character, length in self._of.items()}
            self._other += more
        else:
            self._other = times * max([self._other, *self._of.values()]) + more
            self._of = {}


def _longest_of_map(step: Mapping[str, Any]) -> int:
    """Return the length of the longest text in SentencePiece's map of characters.

    The map consists of a size, a trie of this size, and the texts.
    """
    try:
        content = base64.b64decode(step["precompiled_charsmap"])
    except (KeyError, TypeError, ValueError):
        return _LARGEST_FACTOR  # the library reports the error
    texts = content[4 + int.from_bytes(content[:4], "little") :].decode(errors="replace").split("\0")
    return max(map(len, texts))


def _check_template(steps: Sequence[Mapping[str, Any]]) -> None:
    """Check that a template adds only a few tokens to a text, and does not repeat the text."""
    for step in steps:
        for name in ("single", "pair"):
            pieces = step.get(name)
            texts = list(_ids(pieces, "Sequence"))
            if len(set(texts)) < len(texts):
                raise TooMuch(f"each text once in {name} of the post_processor, found a text twice")
            special = step.get("special_tokens")
            numbers = {key: len(value.get("ids", ())) for key, value in special.items()} if isinstance(special, dict) else {}
            if (count := sum(numbers.get(key, 1) for key in _ids(pieces, "SpecialToken"))) > MOST_STEPS:
                raise TooMuch(f"at most {MOST_STEPS:,} tokens around a text in {name} of the post_processor, found {count:,}")


def _ids(pieces: Any, kind: str) -> Iterator[str]:
    for piece in pieces if isinstance(pieces, list) else []:
        if isinstance(piece, dict) and isinstance(piece.get(kind), dict):
            yield str(piece[kind].get("id"))


def _check_model(model: Any) -> None:
    """Check the text that a model adds to each character or word, and the longest word that it searches for parts."""
    if not isinstance(model, dict):
        return
    longest = model.get("max_input_chars_per_word")
    if isinstance(longest, int) and longest > MOST_STEPS:
        raise TooMuch(f"model.max_input_chars_per_word of at most {MOST_STEPS:,}, found {longest:,}")
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        if isinstance(value := model.get(key), str) and len(value) > MOST_STEPS:
            raise TooMuch(f"model.{key} of at most {MOST_STEPS:,} characters, found {len(value):,}")
