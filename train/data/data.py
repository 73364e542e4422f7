"""Text for training: files found and read as bytes, split into train and validation, cut into windows, batched by index.

Batch t is a pure function of (seed, t): `batches[t]` may be asked for in any order, twice, or by another process, and its rows are
read when they are needed.
"""

import glob
import hashlib
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import grain
import numpy as np
from jaxtyping import Int32, UInt8

from jpipe import InputError
from train.config.config import Config
from train.console.terminal import count
from train.data import own_data
from train.data.rows import Batch, BatchesOfRows


@dataclass(frozen=True)
class Text:
    """The bytes for training and for validation, and a phrase that says where they come from."""

    train: UInt8[np.ndarray, " n"]
    validation: UInt8[np.ndarray, " k"]
    source: str

    def digest(self) -> str:
        """The same for the same bytes only."""
        return hashlib.sha256(self.train.tobytes() + self.validation.tobytes()).hexdigest()


@runtime_checkable
class Batches(Protocol):
    """Batches by index, and how many there are."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


@dataclass(frozen=True)
class Data:
    """Batches by index: `train[t]` without end, `validation[i]` for i < len(validation). A batch is (inputs, labels).

    Their arrays have shapes, types and slices of rows (`train.data.rows.Rows`): what is not sliced is not read.

    Attributes:
        train: batches to learn from.
        validation: batches that are held out.
        source: a phrase that says where they come from.
        amount: how much that is, in words.
        digest: what it gives is the same in two processes only if their data is, as far as that can be known without making all of it.
    """

    train: Batches
    validation: Batches
    source: str
    amount: str
    digest: Callable[[], str]


def load(config: Config) -> Data:
    """Read the text that `config.data` names and batch it as `config` says, or call what it names instead.

    Raises:
        InputError: the path does not exist, cannot be read, or holds less than one batch for training and one for validation.
    """
    if config.data.target is not None:
        sizes = config.seed, config.train.batch_size, config.train.steps
        train, validation = own_data.load(config.data.target, config.data.arguments, *sizes)
        amount = f"{count(len(validation), 'batch', 'es')} for validation"
        return Data(train, validation, config.data.target, amount, lambda: own_data.digest(train, validation))
    text = read_text(config.data.path, config.data.validation_fraction)
    seq_len, batch_size = config.model.seq_len, config.train.batch_size
    need = batch_size * seq_len + 1
    if min(text.train.size, text.validation.size) < need:
        raise InputError(
            f"data.path: expected at least {need} bytes for training and {need} for validation "
            f"(train.batch_size {batch_size} windows of model.seq_len {seq_len}, plus one), found {text.train.size} and "
            f"{text.validation.size} in {text.source}; give more text, raise data.validation_fraction, or lower "
            "train.batch_size or model.seq_len"
        )
    windows = grain.MapDataset.source(Windows(text.train, seq_len)).shuffle(seed=config.seed).repeat()
    held_out = grain.MapDataset.source(Windows(text.validation, seq_len)).shuffle(seed=0)  # spread over the files, never by config.seed
    batch = batch_size, (seq_len,), np.dtype(np.int32)
    amount = f"{text.train.size:,} tokens for training, {text.validation.size:,} for validation"
    return Data(BatchesOfRows(windows, *batch), BatchesOfRows(held_out, *batch), text.source, amount, text.digest)


def held_out(config: Config, path: str | None) -> Data:
    """What a config's run is validated on, all of it, as `validation`; there may be less than a batch. Nothing is there to learn from.

    Args:
        config: of the run.
        path: other data in its place, in the same form: all that is there.

    Raises:
        InputError: as `load`, but for the size; there is not a single row.
    """
    if config.data.target is not None:
        if path is not None:
            raise InputError(f"data.path: the data come from '{config.data.target}' (data.target), found a path; change data.arguments")
        return load(config)
    if path is None:
        text = read_text(config.data.path, config.data.validation_fraction)
    else:
        contents, source = _contents(path)[1:]
        text = Text(np.zeros(0, np.uint8), np.concatenate(contents), source)
    seq_len = config.model.seq_len
    if text.validation.size <= seq_len:
        raise InputError(
            f"data.path: expected at least {seq_len + 1} bytes (a window of model.seq_len {seq_len}, plus one), found "
            f"{text.validation.size} in {text.source}; give more text"
        )
    windows = grain.MapDataset.source(Windows(text.validation, seq_len)).shuffle(seed=0)
    batches = BatchesOfRows(windows, config.train.batch_size, (seq_len,), np.dtype(np.int32))
    return Data(batches, batches, text.source, f"{text.validation.size:,} tokens", text.digest)


def portion(config: Config) -> tuple[int, str]:
    """How much a step sees, and of what: tokens of a text, samples of other data."""
    if config.data.target is None:
        return config.train.batch_size * config.model.seq_len, "tokens"
    return config.train.batch_size, "samples"


def loss_unit(config: Config) -> str:
    """What follows a loss in words, if it is known what that is."""
    if config.loss.target is not None:
        return ""
    return " nats per byte" if config.data.target is None else " nats per label"


class Windows:
    """The text as windows of `seq_len` bytes, one after the other, each with itself moved on by one byte as labels."""

    def __init__(self, text: UInt8[np.ndarray, " n"], seq_len: int):
        self._text = text
        self._seq_len = seq_len

    def __len__(self) -> int:
        return (self._text.size - 1) // self._seq_len

    def __getitem__(self, index: int) -> tuple[Int32[np.ndarray, " s"], Int32[np.ndarray, " s"]]:
        start = index * self._seq_len
        window = self._text[start : start + self._seq_len + 1].astype(np.int32)
        return window[:-1], window[1:]


def read_text(path: str | None, validation_fraction: float) -> Text:
    """Read `path` (a file, a folder or a glob; None: the standard library's source) and split it."""
    names, contents, source = _contents(path)
    if len(contents) == 1:
        cut = round(contents[0].size * (1 - validation_fraction))
        return Text(contents[0][:cut], contents[0][cut:], source)
    held_out = validation_names(names, validation_fraction)
    train = [content for name, content in zip(names, contents, strict=True) if name not in held_out]
    validation = [content for name, content in zip(names, contents, strict=True) if name in held_out]
    return Text(np.concatenate(train), np.concatenate(validation), source)


def _contents(path: str | None) -> tuple[list[str], list[np.ndarray], str]:
    """Names and contents of the files at `path`, and a phrase that says where they come from."""
    source = f"'{path}'" if path is not None else "the standard library's source"
    try:
        names, files = find_files(path)
        contents = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
    except OSError as error:
        raise InputError(f"data.path: cannot read '{error.filename}': {error.strerror}; give files that can be read") from None
    return names, contents, source if len(files) == 1 else f"{source} ({len(files)} files)"


def validation_names(names: Sequence[str], fraction: float) -> frozenset[str]:
    """Which of two or more files are for validation: those whose hashed name falls under `fraction`, so that other files change nothing.

    At least one, and never all.
    """
    rank = {name: int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8]) / 2**64 for name in names}
    ordered = sorted(names, key=lambda name: rank[name])
    held_out = sum(rank[name] < fraction for name in names)
    return frozenset(ordered[: min(max(held_out, 1), len(names) - 1)])


def find_files(path: str | None) -> tuple[list[str], list[Path]]:
    """The files to read in a fixed order, and their names relative to the folder searched (names decide the split)."""
    if path is None:
        return _walk(Path(sysconfig.get_path("stdlib")), suffix=".py", leave_out=_NOT_LIBRARY)
    root = Path(path).expanduser()
    if root.is_dir():
        names, files = _walk(root)
    elif root.exists():
        names, files = [root.name], [root] if root.is_file() else []
    elif glob.has_magic(path):
        names, files = _match(str(root))
    else:
        raise InputError(f"data.path: '{path}' does not exist; give a file, a folder or a glob, or null for the standard library's source")
    if not files:
        raise InputError(f"data.path: found no regular file at '{path}', so 0 bytes; give a file, a folder or a glob that holds text")
    return names, files


_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def _walk(root: Path, suffix: str = "", leave_out: frozenset[str] = frozenset()) -> tuple[list[str], list[Path]]:
    """Every regular file under `root`, hidden ones and symbolic links (loops, doubles) left out."""
    found = {}
    for folder, subfolders, files in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if name not in leave_out and not name.startswith(".")]
        for name in files:
            file = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and file.is_file() and not file.is_symlink():
                found[file.relative_to(root).as_posix()] = file
    return sorted(found), [found[name] for name in sorted(found)]


def _raise(error: OSError) -> None:
    raise error


def _match(pattern: str) -> tuple[list[str], list[Path]]:
    """Every regular file that matches, named relative to the part of the pattern before its first wildcard."""
    parts = Path(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    found = {Path(match).relative_to(root).as_posix(): Path(match) for match in glob.glob(pattern, recursive=True) if Path(match).is_file()}
    return sorted(found), [found[name] for name in sorted(found)]
