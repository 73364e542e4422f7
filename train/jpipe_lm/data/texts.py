"""Read the text of files in pieces, tokenize these, and assemble the tokens into documents, in constant memory."""

import codecs
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from jpipe import InputError
from jpipe.files import open_to_read
from jpipe_lm.data.tokenizer import Tokenizer, batched
from jpipe_train.console.terminal import count
from jpipe_train.data import sources
from jpipe_train.data.files import kinds, streams
from jpipe_train.data.files.arrow import Column
from jpipe_train.data.files.records import records, setting_of
from jpipe_train.data.files.wrong_lines import Place, WrongLines, text_of, value_of

Format = Literal["text", "prompts"]
Role = Literal["text", "prompt", "answer"]
PIECE = 2**18  # characters of a text that are tokenized at once, at least; at most twice as many
_BATCH = PIECE * max(4, os.cpu_count() or 1)  # characters that go to the tokenizer together: all cores have some, and Ctrl-C waits for them
_BLOCK = 2**20  # bytes that are read at once


class Keys(NamedTuple):
    """The columns, or keys of a JSON line, with a text, a prompt and its answer, or token ids.

    `text` is None if files of text are read as they are, even if they have rows.
    """

    text: str | None = "text"
    prompt: str = "prompt"
    answer: str = "answer"
    tokens: str = "input_ids"


class Piece(NamedTuple):
    """A piece of the text of a document.

    Attributes:
        text: that is to be tokenized.
        part: what it is part of.
        last: whether the document ends with it.
        held_out: whether the document is for validation.
        place: its file and line or row, for messages.
        size: how many bytes of the file, which may be compressed, it takes.
        continues: whether it continues the piece before it.
    """

    text: str
    part: Role
    last: bool
    held_out: bool
    place: Place
    size: int
    continues: bool = False


Answers = Sequence[tuple[int, int]]
"""The first token of each answer in a document, and the one after its last."""


@runtime_checkable
class Sink(Protocol):
    """An interface that receives documents in parts."""

    def add(self, tokens: np.ndarray) -> None:
        """Add tokens to the document."""

    def end(self, answers: Answers | None, place: Place) -> None:
        """End the document; if it can have answers, they are these of its tokens."""


def pieces(names: Sequence[str], files: Sequence[Path], form: Format, fraction: float, keys: Keys, where: str) -> Iterator[Piece]:
    """Yield the text of all files in order, in pieces.

    Args:
        names: the names of the files, which decide where whole files are held out.
        files: the files to read.
        form: the form of the documents: texts, which are whole files or their rows; or prompts with answers, which are rows.
        fraction: share to hold out: of files; of the text, its end, if there is one file; of rows, chosen by their hashes.
        keys: the keys of rows.
        where: the key or the option that names the files, for messages.

    Raises:
        InputError: a file is not what it should be.
        OSError: a file cannot be read.
    """
    wrong = WrongLines(where) if form == "prompts" else WrongLines(where, f"or set {setting_of(where, 'text_key')}")
    have_rows = [form != "text" or (keys.text is not None and _has_rows(file, keys.text, where)) for file in files]
    if len(files) == 1 and fraction and not have_rows[0]:
        size = streams.size(files[0])
        cut = _next_line(files[0], round(size * (1 - fraction)), size)
        yield from _of_text(files[0], 0, cut, False, where)
        yield from _of_text(files[0], cut, None, True, where)
        return
    texts = [name for name, has_rows in zip(names, have_rows, strict=True) if not has_rows]
    held_out = sources.validation_names(texts, fraction) if fraction and len(texts) > 1 else frozenset()
    for name, file, has_rows in zip(names, files, have_rows, strict=True):
        if has_rows:
            yield from _of_rows(file, form, fraction, keys, wrong)
        else:
            yield from _of_text(file, 0, None, name in held_out, where)
    wrong.check()


def _has_rows(file: Path, key: str, where: str) -> bool:
    """Return whether a file has rows with a text; otherwise it is itself a text.

    Raises:
        InputError: it is JSON in another form.
    """
    kind = kinds.content_of(file, key)
    if kind is not None and kind.is_json:
        raise InputError(
            where=where,
            expected="text, or rows with it",
            found=f"that '{file}' is {kind.name}",
            change=f"{kind.hint}, or set {setting_of(where, 'text_key')} to {'null' if where.startswith('data.') else 'none'} to "
            "read it as text",
        )
    return kind is not None and kind.reader is not None


def tokenized(texts: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yield each piece with its tokens; meanwhile all cores tokenize the next pieces.

    Raises:
        InputError: the tokenizer fails.
    """
    with ThreadPoolExecutor(1, "tokenizer") as thread:
        ahead = None
        # An empty piece has a size, too, so that many of them make a batch.
        for batch in batched(texts, lambda piece: len(piece.text) + 100, _BATCH):
            following = batch, thread.submit(tokenizer.encoded, [piece.text for piece in batch], [piece.continues for piece in batch])
            if ahead is not None:
                yield from zip(ahead[0], ahead[1].result(), strict=True)
            ahead = following
        if ahead is not None:
            yield from zip(ahead[0], ahead[1].result(), strict=True)


@dataclass
class Assembler:
    """Assembles pieces into documents: the tokens that begin a document, its own tokens, and its end.

    Documents without tokens are counted and left out.

    Attributes:
        tokenizer: the one that made the tokens.
        sinks: the sinks of documents for training (False) and for validation (True).
        documents: how many there were of either.
        tokens: how many tokens.
        empty: how many documents were left out: those without text, and prompts and conversations without an answer.
        first_empty: the place of the first of them.
        divided: how many conversations became several documents.
    """

    tokenizer: Tokenizer
    sinks: dict[bool, Sink]
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    first_empty: Place | None = None
    divided: int = 0

    def __post_init__(self) -> None:
        self._began = False  # whether a document is under way
        self._some = False  # whether the text that is read gave one
        self._prompt: np.ndarray = np.zeros(0, np.uint32)

    def add(self, piece: Piece, tokens: np.ndarray) -> None:
        """Add the next piece."""
        if piece.part == "text":
            self._add_text(piece, tokens)
        elif piece.part == "prompt":
            self._prompt = tokens
        else:
            self._add_example(piece, tokens)

    def add_document(self, tokens: np.ndarray, answers: Answers | None, place: Place, *, held_out: bool) -> None:
        """Add a whole tokenized document; with answers, unless they are None."""
        if not tokens.size if answers is None else tokens.size < 2 or not answers:
            self._leave_out(place)
            return
        self._write(held_out, tokens)
        self._end(held_out, answers, place)

    def remarks(self) -> Iterator[str]:
        """Yield lines about documents that were left out and conversations that were divided."""
        if self.first_empty is not None:
            yield f"{count(self.empty, 'empty document')} left out, the first is {self.first_empty}"
        if self.divided:
            yield (
                f"{count(self.divided, 'conversation')} learned as several texts, because the chat template writes an answer otherwise "
                "once messages follow it"
            )

    def _add_text(self, piece: Piece, tokens: np.ndarray) -> None:
        end = self.tokenizer.end
        # One inside a text ends a document, too.
        parts = [tokens] if end is None else np.split(tokens, np.flatnonzero(tokens == end) + 1)
        for part in parts:
            if not part.size or (end is not None and not self._began and part[0] == end):
                continue
            if not self._began:
                self._write(piece.held_out, self.tokenizer.begin)
            self._began = self._some = True
            self._write(piece.held_out, part)
            if end is not None and part[-1] == end:
                self._end(piece.held_out, None, piece.place)
        if piece.last:
            if self._began:
                self._write(piece.held_out, () if end is None else (end,))
                self._end(piece.held_out, None, piece.place)
            elif not self._some:
                self._leave_out(piece.place)
            self._some = False

    def _add_example(self, piece: Piece, tokens: np.ndarray) -> None:
        end = () if self.tokenizer.end is None else (self.tokenizer.end,)
        answer = len(self.tokenizer.begin) + self._prompt.size
        if not tokens.size or answer + tokens.size + len(end) < 2:
            self._leave_out(piece.place)
            return
        for part in (self.tokenizer.begin, self._prompt, tokens, end):
            self._write(piece.held_out, part)
        self._end(piece.held_out, [(answer, answer + tokens.size + len(end))], piece.place)

    def _write(self, held_out: bool, tokens: Sequence[int] | np.ndarray) -> None:
        if len(tokens):
            self.sinks[held_out].add(np.asarray(tokens, np.uint32))
            self.tokens += len(tokens)

    def _end(self, held_out: bool, answers: Answers | None, place: Place) -> None:
        self.sinks[held_out].end(answers, place)
        self.documents += 1
        self._began = False

    def _leave_out(self, place: Place) -> None:
        self.empty += 1
        self.first_empty = self.first_empty or place


def _of_text(file: Path, start: int, stop: int | None, held_out: bool, where: str) -> Iterator[Piece]:
    """Yield the document in the bytes start .. stop - 1 of a file, in pieces that end where most tokenizers split text.

    Bytes count in the decompressed file; without `stop` the document extends to its end.
    """
    decode = codecs.getincrementaldecoder("utf-8")()
    text, at, continues = "", start, False
    with open_to_read(file) as raw:
        opened = streams.unpacked(raw, file)
        streams.skip(opened, start)
        yielded = raw.tell()
        while True:
            block = opened.read(_BLOCK if stop is None else min(_BLOCK, stop - at))
            try:
                text += decode.decode(block, final=not block)
            except UnicodeDecodeError as error:
                byte = at - (len(error.object) - len(block)) + error.start
                raise InputError(
                    where=where,
                    expected=f"text in UTF-8 in '{file}'",
                    found=f"the byte {error.object[error.start]:#04x} at {byte}{sources.guess(file)}",
                    change="convert the file, or leave it out",
                ) from None
            at += len(block)
            while len(text) > 2 * PIECE:
                end = _good_end(text)
                yield Piece(text[:end], "text", False, held_out, Place(file), raw.tell() - yielded, continues)
                text, yielded, continues = text[end:], raw.tell(), True
            if not block:
                break
        yield Piece(text, "text", True, held_out, Place(file), raw.tell() - yielded, continues)


def _good_end(text: str) -> int:
    """Choose where to split a text of more than twice `PIECE` characters.

    Returns:
        The place after a line, if no line around it is empty or indented; otherwise between words; otherwise anywhere.
    """
    for mark, behind in (("\n", 1), (" ", 0)):
        end = 2 * PIECE
        while (end := text.rfind(mark, 1, end)) > PIECE:
            if not text[end - 1].isspace() and not text[end + 1].isspace():
                return end + behind
    return 2 * PIECE


def _next_line(file: Path, start: int, size: int) -> int:
    """Return the position after the line with byte `start` in a file of `size` decompressed bytes.

    If the line does not end soon, or is the last one, return the position after the character.
    """
    with open_to_read(file) as raw:
        opened = streams.unpacked(raw, file)
        streams.skip(opened, start)
        block = opened.read(_BLOCK)
    end = block.find(b"\n") + 1
    if end == 0 or start + end >= size:
        end = 0
        while end < len(block) and 0x80 <= block[end] < 0xC0:
            end += 1
    return start + end


def _of_rows(file: Path, form: Format, fraction: float, keys: Keys, wrong: WrongLines) -> Iterator[Piece]:
    """Yield the text of each row; after a wrong row the remaining ones are only checked."""
    parts: Sequence[tuple[Role, str]]
    if form == "text":
        assert keys.text is not None
        parts = [("text", keys.text)]
    else:
        parts = [("prompt", keys.prompt), ("answer", keys.answer)]
    columns = [Column(name, f"{part}_key", "text") for part, name in parts]
    for read, texts in records(file, wrong, columns, lambda record: [text_of(value_of(record, name), name) for _, name in parts]):
        if wrong.number:
            continue
        held_out = sources.place_of("\0".join(texts).encode()) < fraction
        for i, ((part, _), text) in enumerate(zip(parts, texts, strict=True)):
            last = i == len(parts) - 1
            yield Piece(text, part, last, held_out, read.place, read.size if last else 0, i > 0 and texts[0] != "")
