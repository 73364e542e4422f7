"""Load a tokenizer from a local tokenizer.json, within limits, and find the tokens that begin and end a text."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int64, UInt32

from jpipe import InputError
from jpipe.errors import nearest
from jpipe.files import read_bytes
from jpipe_lm.config.data_config import DataConfig
from jpipe_lm.data.files import tokenizer_limits
from jpipe_train.config.section import AUTO
from jpipe_train.console.terminal import first_line
from jpipe_train.registry import located

FILE = "tokenizer.json"
MOST_BYTES = 2**27  # the largest size of a tokenizer.json; the largest known vocabularies need a quarter of it
LARGEST_VOCABULARY = 2**24
ENDS_OF_TEXT = "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]"
"""Tokens that end a text, in order of preference, for tokenizers that add no token after a text."""
PADDINGS = "[PAD]", "<pad>", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>"
"""Tokens that fill rows, in order of preference."""

_Item = TypeVar("_Item")
_Tokens = TypeVar("_Tokens")
_NO_MARK: tuple[str, tuple[int, ...]] = ("", ())


class Row(NamedTuple):
    """A tokenized text or pair of texts."""

    tokens: UInt32[np.ndarray, " n"]  # the tokens
    types: UInt32[np.ndarray, " n"]  # for each token, the number of the text that it belongs to, from the tokenizer
    is_cut: bool  # whether the text was cut


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer, which converts text to token ids and back."""

    rules: Any  # the tokenizer as an object of the tokenizers library
    content: bytes  # the content of the tokenizer.json
    where: str  # the config key or option and the path of the file, for messages
    begin: tuple[int, ...]  # the tokens that the tokenizer adds before a text
    end: int | None  # the token that ends a document; None if there is none
    path: Path  # the path of the tokenizer.json

    @cached_property
    def ids(self) -> Int64[np.ndarray, " n"]:
        """The ids of all tokens in ascending order, possibly with gaps."""
        return np.unique(np.fromiter(self.rules.get_vocab(with_added_tokens=True).values(), np.int64))

    @property
    def vocab_size(self) -> int:
        """The largest id plus one, which is the number of rows of an embedding of all tokens."""
        return 1 + int(self.ids[-1])

    @property
    def sha256(self) -> str:
        """The hash of the file."""
        return hashlib.sha256(self.content).hexdigest()

    def encoded(self, texts: Sequence[str], continued: Sequence[bool] = ()) -> list[UInt32[np.ndarray, " _"]]:
        """Tokenize each text on all cores, without the special tokens that begin or end a text, or raise InputError.

        `continued` has for each text whether it continues another text, so that no space is put before it; empty if none does.
        """
        marks = self._marks if any(continued) else {}
        before = [marks.get(text[0].isspace(), _NO_MARK) if text and on else _NO_MARK for text, on in zip(texts, continued, strict=False)]
        before += [_NO_MARK] * (len(texts) - len(before))
        tokens = self._encoded([mark + text for (mark, _), text in zip(before, texts, strict=True)])
        for i, (_, head) in enumerate(before):
            whole = tuple(tokens[i][: len(head)].tolist()) == head
            tokens[i] = tokens[i][len(head) :] if whole else self._encoded([texts[i]])[0]
        return tokens

    def with_offsets(self, texts: Sequence[str]) -> list[tuple[UInt32[np.ndarray, " n"], Int64[np.ndarray, "n 2"]]]:
        """Tokenize each text on all cores, without the special tokens that begin or end a text, or raise InputError.

        For each text return its tokens, and an array of shape (n, 2) with the positions in the text where each token begins and ends.
        """
        with _errors_reported(self.where, "cannot tokenize"):
            encodings = self.rules.encode_batch(list(texts), add_special_tokens=False)
        return [(np.asarray(each.ids, np.uint32), np.asarray(each.offsets, np.int64).reshape(-1, 2)) for each in encodings]

    @cached_property
    def _marks(self) -> dict[bool, tuple[str, tuple[int, ...]]]:
        """Prefixes for continued texts, with their tokens: one for texts that begin with a space (True), one for other texts (False).

        The dict is empty unless the tokenizer puts a space before a text, like Llama 2's tokenizer.
        """
        a, b, one, other, unknown = (tokens.tolist() for tokens in self._encoded(["a", "b", "\na", "\nb", "\U0010ffffa"]))
        head = [first for first, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
        if a == b or not head or one[len(head) :] == a or unknown[: len(head)] == head:
            return {}
        return {True: ("a", tuple(a)), False: ("\n", tuple(head))}

    def _encoded(self, texts: Sequence[str]) -> list[UInt32[np.ndarray, " _"]]:
        with _errors_reported(self.where, "cannot tokenize"):
            encodings = self.rules.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in encodings]

    def whole(self, texts: Sequence[str | tuple[str, str]], most: int | None = None) -> list["Row"]:
        """Tokenize texts and pairs of texts on all cores, with the special tokens that the tokenizer adds around and between them.

        Rows with more than `most` tokens are cut; in a pair, the longer text is cut first. Raise InputError if the tokenizer fails.
        """
        with _errors_reported(self.where, "cannot tokenize"):
            if most is not None:
                self.rules.enable_truncation(most)
            encodings = self.rules.encode_batch_fast(list(texts))
            self.rules.no_truncation()
        return [Row(np.asarray(one.ids, np.uint32), np.asarray(one.type_ids, np.uint32), bool(one.overflowing)) for one in encodings]

    @cached_property
    def padding(self) -> int | None:
        """The token that fills rows: a padding token, or the end-of-text token if the tokenizer does not add it to texts; or None."""
        known = [self.rules.token_to_id(name) for name in PADDINGS]
        is_free = self.end is not None and self.rules.encode("a").ids[-1:] != [self.end]
        return next((int(number) for number in known if number is not None), self.end if is_free else None)

    def decoded(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Special tokens are left out. Raise InputError if the tokenizer fails."""
        with _errors_reported(self.where, "cannot make text of tokens"):
            return str(self.rules.decode(list(tokens), skip_special_tokens=True))

    def id_of(self, *names: str) -> int:
        """Return the id of the first of these special tokens that the tokenizer has. Raise InputError if it has none of them."""
        for name in names:
            if (number := self.rules.token_to_id(name)) is not None:
                return int(number)
        either = " or ".join(names)
        raise InputError(
            where=self.where, expected=f"a tokenizer with the token {either}", found="none", change="use a tokenizer made for such a model"
        )

    def differing(self, other: "Tokenizer") -> list[tuple[int, tuple[str, str]]]:
        """Return the ids that two tokenizers use for different tokens, each with the two tokens."""
        mine, theirs = ({number: token for token, number in each.rules.get_vocab(with_added_tokens=True).items()} for each in (self, other))
        return [
            (number, (mine[number], theirs[number])) for number in sorted(mine.keys() & theirs.keys()) if mine[number] != theirs[number]
        ]

    def special_ids(self) -> tuple[int, ...]:
        """Return the ids of all special tokens."""
        return tuple(sorted(number for number, token in self.rules.get_added_tokens_decoder().items() if token.special))


def load(path: str | Path, where: str, end_of_text: str | None = AUTO) -> Tokenizer:
    """Load a tokenizer.json, which may come from a stranger.

    Settings for padding and truncation in the file are ignored. BPE dropout is turned off, because it would make the tokens random.

    `end_of_text` is the token that ends a document, as text, or None. With auto, it is the token that the tokenizer adds after a text, or
    else the first of `ENDS_OF_TEXT` that it has. Raise InputError if it has no such token, or if the file cannot be read, is too large, or
    is not a tokenizer.
    """
    try:
        file = _file(str(path), where)
        content = read_bytes(file, MOST_BYTES)
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}", where=where, change="give a tokenizer.json") from None
    where = f"{where}: '{path}'"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # without it, each forked process prints a warning
    import tokenizers  # only here, because most runs do not need it

    with _errors_reported(where, "expected a tokenizer.json of the tokenizers library"):
        expressions = tokenizer_limits.check_content(content)
        rules = tokenizers.Tokenizer.from_buffer(content)
        rules.no_padding()
        rules.no_truncation()
        if getattr(rules.model, "dropout", None):
            rules.model.dropout = None
        size = rules.get_vocab_size(with_added_tokens=True)
        tokenizer_limits.check_vocabulary(rules.get_vocab(with_added_tokens=True))
        if expressions:
            tokenizer_limits.check_time(rules, expressions)
        plain, whole = (rules.encode("a", add_special_tokens=special).ids for special in (False, True))
    if not 1 <= size <= LARGEST_VOCABULARY:
        raise InputError(where=where, expected=f"1 to {LARGEST_VOCABULARY:,} tokens", found=f"{size:,}", change="is this a tokenizer?")
    tokenizer = Tokenizer(rules, content, where, (), None, file)
    if tokenizer.vocab_size > LARGEST_VOCABULARY:
        raise InputError(
            where=where,
            expected=f"ids below {LARGEST_VOCABULARY:,}",
            found=f"{tokenizer.vocab_size - 1:,}",
            change="give a tokenizer with smaller ids",
        )
    before, after = _around(plain, whole)
    if before == (rules.token_to_id("[CLS]"),):
        before = ()  # [CLS] begins a row of masked tokens, not each document in the row
    return _with_end(replace(tokenizer, begin=before), after, end_of_text)


def file_of(config: Any) -> Path | None:
    """Return the path of the tokenizer.json of a run; None if the run reads bytes or has a `data.target`."""
    if not isinstance(data := config.data, DataConfig):
        return None
    if data.format == "tokens":
        return located(str(data.first_path), "data.path") / FILE
    return None if data.tokenizer is None else _file(data.tokenizer, "data.tokenizer")


def _file(path: str, where: str) -> Path:
    """Return the path of a tokenizer.json, given this path or its folder."""
    found = located(path, where)
    return found / FILE if found.is_dir() else found


def _with_end(tokenizer: Tokenizer, after: tuple[int, ...], end_of_text: str | None) -> Tokenizer:
    rules = tokenizer.rules
    if end_of_text is None:
        return tokenizer
    if end_of_text != AUTO:
        number = rules.token_to_id(end_of_text)
        if number is None:
            hint = nearest(end_of_text, [token.content for token in rules.get_added_tokens_decoder().values()])
            raise InputError(where=tokenizer.where, expected=f"a tokenizer with the token {end_of_text!r}", found="none", change=hint)
        return replace(tokenizer, end=int(number))
    if len(after) == 1:
        return replace(tokenizer, end=after[0])
    known = [rules.token_to_id(name) for name in ENDS_OF_TEXT]
    return replace(tokenizer, end=next((number for number in known if number is not None), None))


def _around(plain: Sequence[int], whole: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens before and after `plain` in `whole`; both are empty if `whole` does not contain `plain`."""
    for start in range(len(whole) - len(plain) + 1):
        if list(whole[start : start + len(plain)]) == list(plain):
            return tuple(whole[:start]), tuple(whole[start + len(plain) :])
    return (), ()


@contextlib.contextmanager
def _errors_reported(where: str, what: str) -> Iterator[None]:
    """Raise InputError for an error of the library, or of its limits. Ctrl-C, exits and a lack of memory pass."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except tokenizer_limits.TooMuch as error:
        raise InputError(where=where, expected=str(error), change="use the tokenizer of a model that you trust") from None
    except BaseException as error:  # a panic in Rust is not an Exception
        reason = first_line(error) if isinstance(error, Exception) else "it panics"
        change = "give the tokenizer.json of a fast tokenizer, for example from jpipe data tokenizer"
        raise InputError(what, where=where, found=f"one that fails: {reason}", change=change) from None


def batched(items: Iterable[_Item], size: Callable[[_Item], int], most: int) -> Iterator[list[_Item]]:
    """Yield items in batches to tokenize together. A batch ends with the item that brings its size to `most` or more."""
    batch: list[_Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if total >= most:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def ahead(
    items: Iterable[_Item], size: Callable[[_Item], int], most: int, tokenize: Callable[[list[_Item]], Sequence[_Tokens]]
) -> Iterator[tuple[_Item, _Tokens]]:
    """Yield each item with its tokens. Meanwhile a thread tokenizes the next batch; batches are made by `batched`."""
    with ThreadPoolExecutor(1, "tokenizer") as thread:
        last: tuple[list[_Item], Future[Sequence[_Tokens]]] | None = None
        for batch in batched(items, size, most):
            following = batch, thread.submit(tokenize, batch)
            if last is not None:
                yield from zip(last[0], last[1].result(), strict=True)
            last = following
        if last is not None:
            yield from zip(last[0], last[1].result(), strict=True)
