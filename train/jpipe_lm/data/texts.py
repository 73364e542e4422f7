"""Read the text of files in pieces and tokenize these, in constant memory."""

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

    def encoded(batch: Sequence[Piece]) -> list[np.ndarray]:
        return tokenizer.encoded([piece.text for piece in batch], [piece.continues for piece in batch])

    # An empty piece has a size, too, so that many of them make a batch.
    return ahead(texts, lambda piece: len(piece.text) + 100, _BATCH, encoded)


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


def _of_rows(file: Path, form: Format, share: float, keys: Keys, wrong: WrongLines) -> Iterator[Piece]:
    """Yield the texts of each row."""
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
