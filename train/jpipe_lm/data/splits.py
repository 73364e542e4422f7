"""Read the data that a config names as documents for training and validation: bytes, text, prompts, conversations or token files."""

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8

from jpipe import InputError
from jpipe.errors import shortened
from jpipe_lm.config.data_config import BYTES, DataConfig
from jpipe_lm.config.sections import data_of
from jpipe_lm.data import texts
from jpipe_lm.data import tokenizer as tokenizers
from jpipe_lm.data.chat import read_chat, template
from jpipe_lm.data.chat.renderer import TRAINING_TIME, Failure, NoTemplate, Renderer
from jpipe_lm.data.document_files import Answers, Assembler, Files
from jpipe_lm.data.document_files import read as read_documents
from jpipe_lm.data.documents import Documents, Shard
from jpipe_lm.data.files import token_files
from jpipe_train.config.config import Config
from jpipe_train.config.section import AUTO
from jpipe_train.data import sources
from jpipe_train.data.files import kinds
from jpipe_train.data.files.file_array import FileArray
from jpipe_train.data.files.wrong_lines import Place as FilePlace
from jpipe_train.data.sources import DataPath, parts_of
from jpipe_train.registry import located

_MOST_IN_MEMORY = 2**28  # bytes; if files have more, they are read when needed
Place = Callable[[int], str] | None


@dataclass(frozen=True)
class Split:
    """Documents for training and for validation."""

    train: Documents  # the documents for training
    validation: Documents  # the held-out documents
    source: str  # a phrase that describes where the documents come from
    digest: Callable[[], str]  # a function that returns a hash of the documents, or of a sample of large files, to compare two processes
    tokenizer: tokenizers.Tokenizer | None = None  # the tokenizer that made the tokens, or None
    unit: str = "tokens"  # the unit in which documents are measured
    # for training and for validation, a function that names the place of an example, for messages; None without examples
    place: tuple[Place, Place] = (None, None)
    remarks: tuple[str, ...] = ()  # lines that say what was left out


def read(config: Config) -> Split:
    """Read the documents that `config.data` names. Raise InputError if the documents cannot be read."""
    with sources.readable():
        split = _read(config)
        return replace(split, remarks=(*split.remarks, *sources.left_out_of(data_of(config))))


def _read(config: Config) -> Split:
    data = data_of(config)
    if data.read_as == "bytes":
        if data.format == AUTO:
            _check_kinds(data)
        return read_bytes(data.path, data.validation_fraction, data.validation_path)
    check_beside_weights(config)
    if data.format == "tokens" and token_files.is_folder(str(data.path)):
        return _of_token_files(config)
    return _of_files(config, parts_of(data))


def check_files(config: Config, other: str | None = None) -> int | None:
    """Check the files of `config.data` without reading data. Return the size of the vocabulary, or None if it is unknown.

    Raise InputError if a file does not exist, no installed library reads it, or the tokenizer or the chat template cannot be used.
    """
    data = data_of(config)
    data = data if other is None else data.model_copy(update={"path": other, "validation_path": None})
    if data.read_as == "bytes":
        if data.format == AUTO:
            _check_kinds(data)
        for path, where in ((data.path, "data.path"), (data.validation_path, "data.validation_path")):
            if path is not None:
                with sources.readable(where):
                    sources.find_files(path, where)
        return BYTES
    if data.format == "tokens" and token_files.is_folder(str(data.path)):
        return token_files.read_index(str(data.path), "data.path")[1].vocab_size
    sources.check_rows(data, other)
    if data.tokenizer is None:
        return None
    check_beside_weights(config)
    tokenizer = tokenizers.load(data.tokenizer, "data.tokenizer", data.end_of_text)
    if data.format == "chat":
        with Renderer(template.find(tokenizer, data.chat_template), TRAINING_TIME) as renderer:
            try:
                renderer.start()
            except NoTemplate as error:
                raise read_chat.no_template(error) from None
            except Failure:  # reported with the first conversation
                pass
    return tokenizer.vocab_size


def _check_kinds(data: DataConfig) -> None:
    """Check that all files seem to be text. Raise InputError if a file is of another kind; the message says what to do with it."""
    for path, where in ((data.path, "data.path"), (data.validation_path, "data.validation_path")):
        if path is None:
            continue
        as_it_is = "or set data.format: bytes to learn its bytes"
        with sources.readable(where):
            names, files = sources.find_files(path, where)
            if token_files.INDEX in names and located(path, where).is_dir():
                raise InputError(
                    f"'{path}' is a folder of tokens from jpipe data prepare",
                    where=where,
                    change=f"set data.format: tokens, {as_it_is}",
                )
            for file in files:
                kind = kinds.kind_of(file, data.text_key) or (kinds.kind_by_name(file) if file.stat().st_size else None)
                if kind is None:
                    continue
                hint = kind.hint
                if {data.prompt_key, data.answer_key} <= set(kind.columns):
                    hint = "set data.format: prompts and data.tokenizer"
                elif {data.chosen_key, data.rejected_key} <= set(kind.columns):
                    hint = "set data.format: preferences, data.tokenizer and loss.name: dpo"
                elif "messages" in kind.columns:
                    hint = "set data.format: chat and data.tokenizer"
                elif data.text_key in kind.columns:
                    hint = "set data.format: text and data.tokenizer"
                columns = f" with {shortened(kind.columns)[:100]}" if kind.columns else ""
                raise InputError(where=where, expected="text", found=f"that '{file}' is {kind.name}{columns}", change=f"{hint}, {as_it_is}")


def check_beside_weights(config: Config) -> None:
    """Check that tokens mean the same as for the run's initial weights, if both tokenizers are known."""
    ours, file = tokenizers.file_of(config), config.warm_start.file
    beside = None if file is None else located(file, "warm_start.file") / tokenizers.FILE
    if ours is None or beside is None or config.warm_start.mode == "partial" or not (ours.is_file() and beside.is_file()):
        return
    key = "data.path" if data_of(config).format == "tokens" else "data.tokenizer"
    our_tokenizer, their_tokenizer = (tokenizers.load(path, where, None) for path, where in ((ours, key), (beside, "warm_start.file")))
    if our_tokenizer.sha256 != their_tokenizer.sha256 and (wrong := our_tokenizer.differing(their_tokenizer)):
        number, tokens = wrong[0]
        raise InputError(
            where=key,
            expected=f"the tokens of '{beside}', which the weights were trained with",
            found=f"{len(wrong):,} different tokens in '{ours}', the first is {number}, {tokens[0]!r} in place of {tokens[1]!r}",
            change="use that tokenizer, or remove warm_start.file",
        )


def read_bytes(path: str | None, validation_fraction: float, validation_path: str | None = None) -> Split:
    """Find the bytes of `path` (a file, a folder or a glob; None: the source code of the standard library) and split them.

    Small files are read immediately, large files when they are needed.
    """
    source = sources.named(path)
    names, train = _files_of_bytes(path, "data.path")
    if validation_path is not None:
        validation = _files_of_bytes(validation_path, "data.validation_path")[1]
    elif len(train) == 1:
        train, validation = train[0].split(1 - validation_fraction)
    else:
        source = f"{source} ({len(train)} files)"
        held_out = sources.validation_names(names, validation_fraction)
        validation = [part for name, part in zip(names, train, strict=True) if name in held_out]
        train = [part for name, part in zip(names, train, strict=True) if name not in held_out]
    with sources.readable():
        parts = _documents_of_bytes(train), _documents_of_bytes(validation)
    return Split(*parts, source, functools.partial(_digest, "", *parts), unit="bytes")


@sources.readable()
def read_whole(config: Config, path: str) -> Split:
    """Read all documents at `path` in the format of `config.data`. Both parts of the split have all documents.

    Raise InputError if the documents cannot be read, or are tokens of another tokenizer.
    """
    if data_of(config).read_as == "bytes":
        if data_of(config).format == AUTO:
            _check_kinds(data_of(config).model_copy(update={"path": path, "validation_path": None}))
        files = _files_of_bytes(path, "data.path")[1]
        documents = _documents_of_bytes(files)
        source = sources.named(path) if len(files) == 1 else f"{sources.named(path)} ({len(files)} files)"
        digest = functools.partial(_digest, "", documents)
        return Split(documents, documents, source, digest, unit="bytes", remarks=sources.left_out(path))
    if data_of(config).format == "tokens" and token_files.is_folder(path):
        return _whole_folder(config, path)
    split = _of_files(config, [DataPath(path, 0.0, "data.path")])
    remarks = *split.remarks, *sources.left_out(path)
    return replace(split, validation=split.train, place=(split.place[0], split.place[0]), remarks=remarks)


class _Bytes(NamedTuple):
    """The bytes from `start` to `stop` - 1 of a file."""

    file: Path
    start: int
    stop: int

    def split(self, share: float) -> tuple[list["_Bytes"], list["_Bytes"]]:
        """Divide the bytes: return the first part, which has this share of them, and the rest."""
        cut = round((self.stop - self.start) * share)
        return [self._replace(stop=self.start + cut)], [self._replace(start=self.start + cut)]

    def opened(self) -> FileArray:
        """Return the bytes as an array. A slice reads them."""
        return FileArray(self.file, np.dtype(np.uint8), self.start, self.stop - self.start)


def _files_of_bytes(path: str | None, where: str) -> tuple[list[str], list[_Bytes]]:
    """Return the names of the files at a path, and the range of bytes in each. The bytes are not read yet."""
    with sources.readable(where):
        names, files = sources.find_files(path, where)
        return names, [_Bytes(file, 0, file.stat().st_size) for file in files]


def _digest(tokenizer_digest: str, *parts: Documents) -> str:
    return hashlib.sha256(" ".join([tokenizer_digest, *(part.digest() for part in parts)]).encode()).hexdigest()


def _documents_of_bytes(files: Sequence[_Bytes]) -> Documents:
    """Return a document for each file that is not empty."""
    files = [file for file in files if file.stop > file.start]
    sizes = [file.stop - file.start for file in files]
    if sum(sizes) <= _MOST_IN_MEMORY:  # later changes of the files then have no effect
        whole: UInt8[np.ndarray, " n"] = np.concatenate([np.zeros(0, np.uint8), *(file.opened()[:] for file in files)])
        return Documents.of(whole, BYTES, np.cumsum(sizes, dtype=np.int64))
    cached = functools.lru_cache(maxsize=token_files.MOST_OPEN)(_Bytes.opened)

    def of(file: _Bytes, size: int) -> Shard:
        return Shard(f"'{file.file}'", size, lambda: cached(file), lambda: np.asarray([size], np.int64))

    return Documents([of(file, size) for file, size in zip(files, sizes, strict=True)], BYTES)


def _whole_folder(config: Config, path: str) -> Split:
    """Return all documents of a folder of tokens, both for training and for validation."""
    folder, index = token_files.read_index(path, "data.path")
    if token_files.is_folder(str(data_of(config).path)) and os.path.exists(
        str(data_of(config).path)
    ):  # otherwise the run's tokenizer is unknown
        its = token_files.read_index(str(data_of(config).path), "data.path")[1]
        _check_same_tokenizer(its, index, str(data_of(config).path), "data.path")
    documents = token_files.documents(folder, index, [*index.train, *index.validation])
    tokenizer = _tokenizer(folder, index) if data_of(config).objective == "masked" else None
    return Split(documents, documents, f"'{path}'", functools.partial(token_files.digest, folder, index), tokenizer)


def check_tokenizers(paths: Sequence[str]) -> None:
    """Check that all folders of tokens among several sources have the same tokenizer."""
    first: tuple[str, token_files.Index] | None = None
    for number, path in enumerate(paths):
        if not token_files.is_folder(path):
            continue
        index = token_files.read_index(path, where := f"data.sources.{number}.path")[1]
        first = first or (path, index)
        if (index.vocab_size, index.tokenizer_sha256) != (first[1].vocab_size, first[1].tokenizer_sha256):
            raise InputError(
                where=where,
                expected=f"tokens of the same tokenizer as in '{first[0]}'",
                found=f"tokens of another tokenizer in '{path}'",
                change="prepare the folder with the same --tokenizer",
            )


def _check_same_tokenizer(index: token_files.Index, other: token_files.Index, path: str, where: str) -> None:
    """Check that the tokens of `other` have the kind and tokenizer of the tokens at `path`, which `index` describes."""
    is_same = (other.vocab_size, other.tokenizer_sha256) == (index.vocab_size, index.tokenizer_sha256)
    if not is_same or other.kind != index.kind:
        raise InputError(
            where=where,
            expected=f"{index.kind} of the same tokenizer as in '{path}'",
            found=f"{other.kind} of {'the same' if is_same else 'another'} tokenizer",
            change="prepare the folder with the same --tokenizer and --format",
        )


def _tokenizer(folder: Path, index: token_files.Index) -> tokenizers.Tokenizer:
    """Load the tokenizer in a folder of tokens, after checking that it has made the tokens."""
    tokenizer = tokenizers.load(folder / tokenizers.FILE, "data.path", None)
    if tokenizer.sha256 != index.tokenizer_sha256:
        raise InputError(
            f"'{folder / tokenizers.FILE}' is not the tokenizer that made the tokens", where="data.path", change="copy it again"
        )
    return tokenizer


def _of_token_files(config: Config) -> Split:
    """Read a folder that `jpipe data prepare` wrote."""
    path = str(data_of(config).path)
    for key in ("validation_fraction", "tokens_key"):
        if getattr(config.data, key) != DataConfig.model_fields[key].default:
            raise InputError(f"data.{key} has no effect with '{path}', which is a folder of tokens, not a file of rows; remove data.{key}")
    folder, index = token_files.read_index(path, "data.path")
    train, held_out = token_files.documents(folder, index, index.train), (folder, index, index.validation)
    digests = [functools.partial(token_files.digest, folder, index)]
    if (validation_path := data_of(config).validation_path) is not None:
        other, its = token_files.read_index(validation_path, "data.validation_path")
        _check_same_tokenizer(index, its, path, "data.validation_path")
        held_out = other, its, [*its.train, *its.validation]
        digests.append(functools.partial(token_files.digest, other, its))
    elif not index.validation:
        raise InputError(
            f"'{path}' has no tokens for validation",
            where="data.path",
            change="name a folder with such tokens in data.validation_path, or prepare it with --validation-fraction",
        )
    tokenizer = _tokenizer(folder, index) if data_of(config).objective == "masked" else None
    return Split(train, token_files.documents(*held_out), f"'{path}'", lambda: "".join(each() for each in digests), tokenizer)


class _Memory:
    """A sink that keeps documents and their places in memory."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._tokens: list[np.ndarray] = []
        self._size = 0
        self._ends: list[int] = []
        self._answers: list[int] = []
        self._answer_ends: list[int] = []
        self._places: list[FilePlace] = []  # the places of documents with answers

    def add(self, tokens: np.ndarray) -> None:
        self._tokens.append(tokens.astype(self._dtype))
        self._size += tokens.size

    def end(self, answers: Answers | None, place: FilePlace) -> None:
        begin = self._ends[-1] if self._ends else 0
        if answers is not None:
            self._answers += [begin + first for first, _ in answers]
            self._answer_ends += [begin + stop for _, stop in answers]
            self._places.append(place)
        self._ends.append(self._size)

    @property
    def largest(self) -> int:
        """The largest token; 0 if there are no tokens."""
        return max((int(tokens.max()) for tokens in self._tokens), default=0)

    def documents(self, vocab_size: int) -> Documents:
        whole = np.concatenate([np.zeros(0, self._dtype), *self._tokens])
        answers = [np.asarray(positions, np.int64) if self._places else None for positions in (self._answers, self._answer_ends)]
        return Documents.of(whole, vocab_size, np.asarray(self._ends, np.int64), *answers)

    def place(self, example: int) -> str:
        return str(self._places[example])


def _of_files(config: Config, parts: Sequence[DataPath]) -> Split:
    """Read files of text, or rows of text, prompts, conversations or token ids, into memory.

    Args:
        config: the config of the run, which says what the files are.
    """
    data = data_of(config)
    form = data.format if data.format in ("prompts", "chat", "tokens") else "text"
    if form == "tokens" and data.objective == "masked":
        raise InputError(
            "data.objective: masked: expected a folder from jpipe data prepare, which includes the tokenizer of its tokens, found "
            f"'{data.path}'; prepare it with jpipe data prepare --format tokens"
        )
    tokenizer = None if form == "tokens" else tokenizers.load(str(data.tokenizer), "data.tokenizer", data.end_of_text)
    is_small = tokenizer is not None and tokenizer.vocab_size <= 2**16
    memory = [_Memory(np.dtype(np.uint16 if is_small else np.uint32)) for _ in range(2)]
    assembler = Assembler({False: memory[0], True: memory[1]}, *(() if tokenizer is None else (tokenizer.begin, tokenizer.end)))
    files = Files((), form, texts.Keys(data.text_key, data.prompt_key, data.answer_key, data.tokens_key), data.chat_template)
    for path, share, where in parts:
        with sources.readable(where):
            names, paths = sources.find_files(path, where)
            for tokens in read_documents(files, names, paths, 0.0 if share == 1 else share, where, tokenizer):
                assembler.add(tokens._replace(held_out=tokens.held_out or share == 1))
    vocab_size = 1 + max(part.largest for part in memory) if tokenizer is None else tokenizer.vocab_size
    train, validation = (part.documents(vocab_size) for part in memory)
    return Split(
        train,
        validation,
        sources.named(data.path),
        functools.partial(_digest, "" if tokenizer is None else tokenizer.sha256, train, validation),
        tokenizer,
        place=(memory[0].place, memory[1].place) if form in ("prompts", "chat") else (None, None),
        remarks=tuple(assembler.remarks()),
    )
