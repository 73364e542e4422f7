"""Folders of tokens that `jpipe data prepare` writes. tokens.json describes the shards, which are read when needed.

A shard `train-00000` consists of these files, with little-endian numbers. `train-00000.bin` has its tokens as uint16 or uint32.
`train-00000.ends` has for each document the position after its last token as uint64. For prompts and chat, `train-00000.answers` has the
position of the first token of each answer, and for chat `train-00000.answer_ends` the position after its last token, both as uint64.
"""

import functools
import glob
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
from pydantic import Field

from jpipe import InputError
from jpipe.errors import explain, short
from jpipe.files import open_to_read, read_bytes, read_text
from jpipe_lm.data.documents import Documents, Numbers, Shard
from jpipe_lm.data.tokenizer import FILE, LARGEST_VOCABULARY, MOST_BYTES
from jpipe_train.data import sources
from jpipe_train.data.files.file_array import FileArray
from jpipe_train.registry import located

INDEX = "tokens.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
POSITIONS: np.dtype[Any] = np.dtype("<u8")
_MOST_BYTES = 2**26  # the largest size of tokens.json; a hundred thousand shards take a third of it
_SAMPLE = 4096  # the number of bytes that the digest reads at the beginning, in the middle and at the end of each file
_SOME = 8  # the number of ends that are checked at the beginning and at the end of each file when it is opened
_WITH_ROWS = ".parquet", ".arrow", ".feather", ".jsonl", ".ndjson", ".gz", ".zst"  # endings of files that may have rows of tokens
MOST_OPEN = 256  # the most files that are open at a time; each needs a file descriptor
_Count = Annotated[int, Field(ge=0, le=2**62)]


def _is_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
        raise ValueError(f"expected 1 to 100 letters, digits, '_', '.' and '-', and not '.' or '-' first, found {short(name)}; rename it")
    return name


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class ShardFacts(_Part):
    """A shard: the `name` of its files without endings, the numbers of `tokens`, `documents` and `answers`, and the hash of the tokens.

    `documents` is null if the ends of documents are unknown. `answers` is null unless the tokens are conversations.
    """

    name: Annotated[str, pydantic.AfterValidator(_is_name)]
    tokens: Annotated[int, Field(ge=1, le=2**62)]
    documents: Annotated[int, Field(ge=1, le=2**62)] | None = None
    answers: Annotated[int, Field(ge=1, le=2**62)] | None = None
    sha256: str | None = None

    def count(self, ending: str) -> int | None:
        """Return the number of numbers in the file with this ending, or None if unknown."""
        answers = self.documents if self.answers is None else self.answers
        return {".bin": self.tokens, ".ends": self.documents, ".answers": answers, ".answer_ends": self.answers}[ending]


class Index(_Part):
    """The content of tokens.json: a description of the tokens, and the shards for training and validation.

    `end_of_text` is the token that ends each document, `tokenizer_sha256` the hash of the tokenizer.json, and `text_bytes` the size of the
    files that the tokens were made from.
    """

    format: Literal["jpipe-tokens/1"]
    kind: Literal["text", "prompts", "chat"] = "text"
    dtype: Literal["uint16", "uint32"]
    vocab_size: Annotated[int, Field(ge=1, le=LARGEST_VOCABULARY)]
    end_of_text: _Count | None = None
    tokenizer_sha256: str | None = None
    source: Annotated[str, Field(max_length=10_000)] = ""
    text_bytes: _Count | None = None
    train: Annotated[list[ShardFacts], Field(max_length=10**6)] = []
    validation: Annotated[list[ShardFacts], Field(max_length=10**6)] = []

    @property
    def parts(self) -> tuple[tuple[str, np.dtype[Any]], ...]:
        """The ending and the dtype of each file of a shard."""
        positions = (".ends", ".answers", ".answer_ends")[: {"text": 1, "prompts": 2, "chat": 3}[self.kind]]
        return (".bin", DTYPES[self.dtype]), *((ending, POSITIONS) for ending in positions)


def is_folder(path: str) -> bool:
    """Return whether to read a path as a folder of tokens.

    It is read as such a folder if it is one, or if it is no file, no glob, and no folder with files of rows.
    """
    root = located(path, "data.path")
    if not root.is_dir():
        return not (root.is_file() or glob.has_magic(path))
    return (root / INDEX).exists() or not any(name.endswith(_WITH_ROWS) for _, _, names in os.walk(root) for name in names)


def read_index(path: str, where: str) -> tuple[Path, Index]:
    """Read the index of the folder at `path`, and check that every shard exists and has its size.

    Raise InputError if it is no folder of tokens, a file is missing or has a wrong size, or another tokenizer made the tokens.
    """
    folder = located(path, where)
    file = folder / INDEX
    text = read_text(
        file,
        _MOST_BYTES,
        f"cannot read '{file}'",
        "give a folder that jpipe data prepare wrote",
        f"expected JSON in '{file}', found text that is not UTF-8",
        where,
    )
    try:
        index = Index.model_validate_json(text)
    except pydantic.ValidationError as error:
        raise explain(error, Index, str(file)) from None
    shards = (*index.train, *index.validation)
    if index.kind != "text" and any(shard.count(ending) is None for shard in shards for ending, _ in index.parts):
        raise InputError(f"{file}: expected the number of documents of every shard of {index.kind}, found null; write the folder again")
    for shard in shards:
        for ending, dtype in index.parts:
            if (count := shard.count(ending)) is not None:
                _check_size(folder / f"{shard.name}{ending}", count, dtype, where)
    _check_tokenizer(folder / FILE, index, where)
    return folder, index


def documents(folder: Path, index: Index, shards: Sequence[ShardFacts]) -> Documents:
    """Return the documents in the shards. They are read when needed."""
    cached = functools.lru_cache(maxsize=MOST_OPEN)(_opened)

    def opened(shard: ShardFacts, part: int) -> Callable[[], Numbers] | None:
        if part >= len(index.parts) or (part and shard.documents is None):
            return None
        ending, dtype = index.parts[part]
        count = shard.count(ending)
        assert count is not None
        return lambda: cached(folder / f"{shard.name}{ending}", dtype, count, shard.tokens if ending == ".ends" else None)

    def of(shard: ShardFacts) -> Shard:
        tokens = opened(shard, 0)
        assert tokens is not None
        return Shard(f"'{folder / shard.name}.bin'", shard.tokens, tokens, *(opened(shard, part) for part in (1, 2, 3)))

    return Documents([of(shard) for shard in shards], index.vocab_size)


def digest(folder: Path, index: Index) -> str:
    """Return a hash of the index, which contains hashes, and of a sample of every file, independent of file times.

    Raise InputError if a file cannot be read.
    """
    hasher = hashlib.sha256(index.model_dump_json().encode())
    with sources.readable():
        for shard in (*index.train, *index.validation):
            for ending, _ in index.parts[: 1 if shard.documents is None else None]:
                for block in _sample(folder / f"{shard.name}{ending}"):
                    hasher.update(block)
    return hasher.hexdigest()


def _sample(path: Path) -> list[bytes]:
    with open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        return [os.pread(file.fileno(), _SAMPLE, max(start, 0)) for start in (0, size // 2 - _SAMPLE // 2, size - _SAMPLE)]


def _opened(path: Path, dtype: np.dtype[Any], count: int, size: int | None) -> FileArray:
    """Open a file of `count` numbers. If `size` is set, they are ends of documents with `size` tokens in total; then check some of them.

    Raise InputError if the ends are not ascending, the last is not `size`, or the file was cut off, and OSError if the file
    cannot be opened.
    """
    array = FileArray(path, dtype, size=count)
    if size is None:
        return array
    first, last = array[:_SOME], array[-_SOME:]
    if last[-1] != size:
        raise InputError(
            f"data: expected the last number in '{path}' to be {size:,}, the number of tokens, found {last[-1]:,}; write the folder again"
        )
    for some in (first, last):
        if some[0] == 0 or np.any(some[1:] <= some[:-1]):
            raise InputError(
                where="data", expected=f"ascending numbers in '{path}'", found=some[:5].tolist(), change="write the folder again"
            )
    return array


def _check_size(path: Path, count: int, dtype: np.dtype[Any], where: str) -> None:
    expected = count * dtype.itemsize
    try:
        if not path.is_file():
            actual = "something else there" if os.path.lexists(path) else "no such file"
            raise InputError(where=where, expected=f"'{path}' with {expected:,} bytes", found=actual, change="copy it again")
        size = path.stat().st_size
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}", where=where, change="give files that can be read") from None
    if size != expected:
        other = next((name for name, another in DTYPES.items() if another != dtype and size == count * another.itemsize), None)
        hint = (
            "copy or prepare the folder again" if other is None or dtype is POSITIONS else f"are these {other}? {INDEX} says {dtype.name}"
        )
        raise InputError(where=where, expected=f"'{path}' to have {expected:,} bytes", found=f"{size:,}", change=hint)


def _check_tokenizer(path: Path, index: Index, where: str) -> None:
    """Check that the tokenizer next to the tokens has made them."""
    try:
        if index.tokenizer_sha256 is None or not path.exists():
            return
        actual = hashlib.sha256(read_bytes(path, MOST_BYTES)).hexdigest()
    except OSError as error:
        raise InputError(f"cannot read '{path}': {error.strerror}", where=where, change="give files that can be read") from None
    if actual != index.tokenizer_sha256:
        raise InputError(
            where=where,
            expected=f"'{path}' to be the tokenizer that made the tokens (see {INDEX})",
            found="another tokenizer",
            change="copy the folder again, or prepare it with this tokenizer",
        )
