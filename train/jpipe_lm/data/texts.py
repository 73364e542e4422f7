"""Read the text of files in pieces and tokenize the pieces, in constant memory."""

import codecs
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from jpipe import InputError
from jpipe.files import open_to_read
from jpipe_lm.data.tokenizer import Tokenizer, ahead
from jpipe_train.data import sources
from jpipe_train.data.files import kinds, streams
from jpipe_train.data.files.arrow import Column
from jpipe_train.data.files.records import records, setting_of
from jpipe_train.data.files.wrong_lines import Place, WrongLines, text_of, value_of

Format = Literal["text", "prompts"]
Role = Literal["text", "prompt", "answer"]
PIECE = 2**18  # a piece of a text has from PIECE to 2 * PIECE characters
_BATCH = PIECE * max(4, os.cpu_count() or 1)  # characters tokenized together: enough for all cores, but not too many, because Ctrl-C waits
_BLOCK = 2**20  # bytes that are read at once


class Keys(NamedTuple):
    """The columns, or keys of a JSON line, with a text, a prompt and its answer, or token ids.

    `text` is None if every file is read as one text, even a file with rows.
    """

    text: str | None = "text"
    prompt: str = "prompt"
    answer: str = "answer"
    tokens: str = "input_ids"


class Piece(NamedTuple):
    """A piece of the text of a document."""

    text: str  # the text to tokenize
    part: Role  # what the piece is a part of: a text, a prompt or an answer
    last: bool  # whether the document ends with this piece
    held_out: bool  # whether the document is for validation
    place: Place  # the file and the line or row of the document, for messages
    size: int  # the number of bytes of the file, which may be compressed, that were read for the piece
    continues: bool = False  # whether the piece continues the previous one


def pieces(names: Sequence[str], files: Sequence[Path], form: Format, fraction: float, keys: Keys, where: str) -> Iterator[Piece]:
    """Yield the text of all files in order, in pieces.

    `form` says what documents are: texts (whole files, or rows with a text), or rows with prompts and answers. The `fraction` to hold out
    consists of whole files of several text files, which their `names` decide, the end of a single text file, or the rows that their hashes
    select. Raise InputError if a file has wrong content, and OSError if it cannot be read.
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
    """Return whether a file has rows with a text, or is itself a text. Raise InputError if it is JSON in another form."""
    kind = kinds.content_of(file, key)
    if kind is not None and kind.is_json:
        raise InputError(
            where=where,
            expected="text, or rows with a text",
            found=f"that '{file}' is {kind.name}",
            change=f"{kind.hint}, or set {setting_of(where, 'text_key')} to {'null' if where.startswith('data.') else 'none'} to "
            "read it as text",
        )
    return kind is not None and kind.reader is not None


def tokenized(texts: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yield each piece with its tokens. Meanwhile all cores tokenize the next pieces. Raise InputError if the tokenizer fails."""

    def encoded(batch: Sequence[Piece]) -> list[np.ndarray]:
        return tokenizer.encoded([piece.text for piece in batch], [piece.continues for piece in batch])

    # An empty piece also gets a size, so that many empty pieces fill a batch.
    return ahead(texts, lambda piece: len(piece.text) + 100, _BATCH, encoded)


def _of_text(file: Path, start: int, stop: int | None, held_out: bool, where: str) -> Iterator[Piece]:
    """Yield the document in the bytes `start` to `stop` - 1 of a file, in pieces that end where most tokenizers split text.

    The positions are in the decompressed file. Without `stop` the document extends to the end of the file.
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
                    change="convert the file, or remove it from the data",
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
    """Return where to split a text of more than twice `PIECE` characters.

    It is after a line between lines that are not empty or indented, or else between two words, or else anywhere.
    """
    for mark, behind in (("\n", 1), (" ", 0)):
        end = 2 * PIECE
        while (end := text.rfind(mark, 1, end)) > PIECE:
            if not text[end - 1].isspace() and not text[end + 1].isspace():
                return end + behind
    return 2 * PIECE


def _next_line(file: Path, start: int, size: int) -> int:
    """Return the position after the line with byte `start` in a file of `size` decompressed bytes.

    If the line is very long, or is the last line, return the next position between two characters instead.
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


def _of_rows(file: Path, form: Format, share: float, keys: Keys, wrong: WrongLines) -> Iterator[Piece]:
    """Yield the texts of each row as pieces."""
    parts: Sequence[tuple[Role, str]]
    if form == "text":
        assert keys.text is not None
        parts = [("text", keys.text)]
    else:
        parts = [("prompt", keys.prompt), ("answer", keys.answer)]
    columns = [Column(name, f"{part}_key", "text") for part, name in parts]
    rows = records(
        [file],
        wrong,
        columns,
        lambda record: [text_of(value_of(record, name), name) for _, name in parts],
        lambda texts: "\0".join(texts).encode(),
        share,
    )
    for row in rows:
        for i, ((part, _), text) in enumerate(zip(parts, row.value, strict=True)):
            last = i == len(parts) - 1
            yield Piece(text, part, last, row.held_out, row.place, row.size if last else 0, i > 0 and row.value[0] != "")
