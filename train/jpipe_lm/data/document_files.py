"""Read the documents in files as tokens, for a run and for `jpipe data prepare`, and assemble them for training and validation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jpipe_lm.data import texts
from jpipe_lm.data.chat import read_chat, template
from jpipe_lm.data.chat.renderer import TRAINING_TIME, Renderer
from jpipe_lm.data.files import token_rows
from jpipe_lm.data.tokenizer import LARGEST_VOCABULARY, Tokenizer
from jpipe_train.console.terminal import count
from jpipe_train.data.files.records import setting_of
from jpipe_train.data.files.wrong_lines import Place

Answers = Sequence[tuple[int, int]]
"""For each answer in a document, the index of its first token and the index after its last."""


class Files(NamedTuple):
    """The files to read, and their format."""

    paths: Sequence[str]  # files, folders or globs; if empty, the source code of the standard library
    # the form of the documents: text (whole files, or rows with a text), or rows with prompts, conversations (chat) or token ids. auto
    # means text, but rejects files that are neither text nor rows.
    form: texts.Format | Literal["auto", "chat", "tokens"] = "auto"
    keys: texts.Keys = texts.Keys()  # the keys of rows
    chat_template: str | None = None  # for conversations, a template file that replaces the template next to the tokenizer

    @property
    def kind(self) -> Literal["text", "prompts", "chat"]:
        """The kind of documents after tokenizing: "text", "prompts" or "chat"."""
        return self.form if self.form == "prompts" or self.form == "chat" else "text"


class Tokens(NamedTuple):
    """The tokens of a document, or of a piece of a text."""

    ids: np.ndarray  # the ids of the tokens
    held_out: bool  # whether the document is for validation
    place: Place  # the file and the line or row of the document, for messages
    size: int  # the number of bytes of the file, which may be compressed, that were read for it
    answers: Answers | None = None  # the answers in a whole document; None if documents of this kind have no answers
    # whether a text ends with this piece; None for a whole document, which includes the tokens that begin and end it
    ends_text: bool | None = None
    number: int = 1  # if a conversation became several documents, the number of this document, from 1


def read(
    files: Files, names: Sequence[str], paths: Sequence[Path], share: float, where: str, tokenizer: Tokenizer | None
) -> Iterator[Tokens]:
    """Yield the documents in files in order; texts come in pieces.

    If whole files are held out, their `names` decide which; `share` is as in `texts.pieces`. Without a tokenizer rows have token ids. Raise
    InputError if a file has wrong content, and OSError if it cannot be read.
    """
    if files.form == "tokens":
        most = LARGEST_VOCABULARY if tokenizer is None else tokenizer.vocab_size
        for row in token_rows.read(paths, files.keys.tokens, share, where, most):
            yield Tokens(row.value, row.held_out, row.place, row.size)
        return
    assert tokenizer is not None
    if files.form == "chat":
        chosen = template.find(tokenizer, files.chat_template, setting_of(where, "chat_template"))
        with Renderer(chosen, TRAINING_TIME) as renderer:
            for text, i, found in read_chat.read(paths, renderer, tokenizer, share, where):
                yield Tokens(found.tokens, text.held_out, text.place, 0 if i else text.size, found.answers, number=i + 1)
        return
    begin, end = (np.asarray(ids, np.uint32) for ids in (tokenizer.begin, () if tokenizer.end is None else (tokenizer.end,)))
    prompt: np.ndarray = np.zeros(0, np.uint32)
    form: texts.Format = "prompts" if files.form == "prompts" else "text"
    for piece, ids in texts.tokenized(texts.pieces(names, paths, form, share, files.keys, where), tokenizer):
        if piece.part == "text":
            yield Tokens(ids, piece.held_out, piece.place, piece.size, ends_text=piece.last)
        elif piece.part == "prompt":
            prompt = ids
        else:
            whole = np.concatenate([begin, prompt, ids, end])
            yield Tokens(whole, piece.held_out, piece.place, piece.size, [(begin.size + prompt.size, whole.size)] if ids.size else [])


@runtime_checkable
class Sink(Protocol):
    """An object that receives documents in parts."""

    def add(self, tokens: np.ndarray) -> None:
        """Add tokens to the document."""

    def end(self, answers: Answers | None, place: Place) -> None:
        """End the document. `answers` are the answers in it; None if documents of this kind have no answers."""


@dataclass
class Assembler:
    """Assembles pieces of texts into documents, and adds the tokens at the beginning and end of a document.

    Documents without tokens are counted and left out.
    """

    sinks: dict[bool, Sink]  # the sinks of documents for training (False) and for validation (True)
    begin: Sequence[int] = ()  # the tokens that are added before a text
    end_of_text: int | None = None  # the token that ends a text; None if there is none
    documents: int = 0  # the number of documents
    tokens: int = 0  # the number of tokens
    empty: int = 0  # the number of documents that were left out: empty texts, and prompts and conversations without an answer
    first_empty: Place | None = None  # the place of the first document that was left out
    divided: int = 0  # the number of conversations that became several documents

    def __post_init__(self) -> None:
        self._began = False  # whether a document has begun
        self._some = False  # whether the current text has produced a document

    def add(self, read: Tokens) -> None:
        """Add the next document, or the next piece of a text."""
        if read.ends_text is not None:
            self._add_text(read, is_last=read.ends_text)
            return
        self.divided += read.number == 2
        if not read.ids.size if read.answers is None else read.ids.size < 2 or not read.answers:
            self._leave_out(read.place)
            return
        self._write(read, read.ids)
        self._end(read)

    def remarks(self) -> Iterator[str]:
        """Yield lines about documents that were left out and conversations that were divided."""
        if self.first_empty is not None:
            yield f"{count(self.empty, 'empty document')} left out, the first is {self.first_empty}"
        if self.divided:
            yield (
                f"{count(self.divided, 'conversation')} learned as several texts, because the chat template writes an answer differently "
                "once messages follow it"
            )

    def _add_text(self, read: Tokens, *, is_last: bool) -> None:
        end, tokens = self.end_of_text, read.ids
        # An end-of-text token inside a text also ends a document.
        parts = [tokens] if end is None else np.split(tokens, np.flatnonzero(tokens == end) + 1)
        for part in parts:
            if not part.size or (end is not None and not self._began and part[0] == end):
                continue
            if not self._began:
                self._write(read, self.begin)
            self._began = self._some = True
            self._write(read, part)
            if end is not None and part[-1] == end:
                self._end(read)
        if is_last:
            if self._began:
                self._write(read, () if end is None else (end,))
                self._end(read)
            elif not self._some:
                self._leave_out(read.place)
            self._some = False

    def _write(self, read: Tokens, tokens: Sequence[int] | np.ndarray) -> None:
        if len(tokens):
            self.sinks[read.held_out].add(np.asarray(tokens, np.uint32))
            self.tokens += len(tokens)

    def _end(self, read: Tokens) -> None:
        self.sinks[read.held_out].end(read.answers, read.place)
        self.documents += 1
        self._began = False

    def _leave_out(self, place: Place) -> None:
        self.empty += 1
        self.first_empty = self.first_empty or place
