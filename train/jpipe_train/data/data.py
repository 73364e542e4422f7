"""Load the data of a config for training and validation: find files, split them, make rows, and batch these by index.

Batch t is a pure function of (seed, t): `batches[t]` may be read in any order, twice, or by another process, and its rows are read when
they are needed.
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import grain
import numpy as np

from jpipe import InputError
from jpipe_train.config.config import Config
from jpipe_train.config.data_config import SourceConfig
from jpipe_train.config.functions import entry_point
from jpipe_train.config.section import MOST_ROWS
from jpipe_train.console.terminal import count
from jpipe_train.data import labelled, masked, mixture, position, splits, target_data, windows
from jpipe_train.data.position import Ordered, Position
from jpipe_train.data.rows import Batch, BatchesOfRows, Divisible, Elements
from jpipe_train.data.sources import OR_NULL
from jpipe_train.data.splits import Split

Rows = windows.Windows | windows.Examples | masked.Masked
AnyRows = Rows | windows.Filled | labelled.Examples


@runtime_checkable
class Batches(Protocol):
    """Batches by index, with their number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


class HeldOut(NamedTuple):
    """A batch of an evaluation, the number of copies of each of its rows, and the source of its rows, if there are several."""

    batch: Batch
    copies: int = 1
    source: SourceConfig | None = None


@dataclass(frozen=True)
class Data:
    """Batches by index: `train[t]` without end, `validation[i]` for i < len(validation). A batch is (inputs, labels).

    Their arrays have shapes, types and slices of rows (`jpipe_train.data.rows.Rows`): what is not sliced is not read.

    Attributes:
        train: batches to learn from.
        validation: batches that are held out.
        source: a phrase that says where they come from.
        amount: a phrase that says how much that is.
        digest: its result is the same in two processes only if their data is, up to what can be known without making all of it.
        remarks: lines that say what was left out.
        vocab_size: the number of tokens or classes, if the loader knows it; otherwise each batch is checked when it is read.
        shapes: where batches have several shapes, these, as shapes and dtypes; the largest first.
        first: the first batch to learn from that can be read; those before it are of an earlier part of a resumed run.
        copies: how many copies of each of its rows a batch of `validation` has, where that is not one.
        rows: the number of rows of an epoch, if the loader knows it.
        steps: the number of steps of the run's `train.epochs`, if these are given.
        parts: the sources of a mixture, each with its own data; their validation batches follow each other in `validation`.
    """

    train: Batches
    validation: Batches
    source: str
    amount: str
    digest: Callable[[], str]
    remarks: tuple[str, ...] = ()
    vocab_size: int | None = None
    shapes: tuple[Batch, ...] = ()
    first: int = 0
    copies: tuple[int, ...] = ()
    rows: int | None = None
    steps: int | None = None
    parts: "tuple[tuple[SourceConfig, Data], ...]" = ()

    @property
    def like(self) -> Batch:
        """A batch of which only shapes and dtypes are used, the largest one if they differ."""
        return self.shapes[0] if self.shapes else self.train[self.first]

    def held_out(self, most: int) -> list[HeldOut]:
        """Return the first batches of `validation`, of each source, up to `most`, or all if they are less than one."""
        if self.parts:
            ends = np.cumsum([len(part.validation) for _, part in self.parts]).tolist()
            return [
                HeldOut(self.validation[end - len(part.validation) + i], copies, source)
                for end, (source, part) in zip(ends, self.parts, strict=True)
                for i, (_, copies, _) in enumerate(part.held_out(most))
            ]
        if self.copies:
            return [HeldOut(self.validation[i], self.copies[i]) for i in range(len(self.validation))]
        return [HeldOut(self.validation[i]) for i in range(min(most, len(self.validation)))]

    def with_some_validation(self, microbatch: int) -> "Data":
        """Return these data; if they are held out for no batch, all rows of that part in smaller batches.

        Args:
            microbatch: rows of a microbatch.
        """
        if self.parts:
            parts = tuple((source, part.with_some_validation(microbatch)) for source, part in self.parts)
            return replace(self, parts=parts, validation=mixture.Joined(tuple(part.validation for _, part in parts)))
        if len(self.validation) or not isinstance(self.validation, Divisible):
            return self
        every = self.validation.with_remainder(microbatch)
        return replace(self, validation=every, copies=tuple(map(every.copies_of, range(len(every)))))


@contextmanager
def _memory_errors_reported() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise InputError(
            "data: expected data that fit into memory, found more than there is; take fewer, or prepare text with jpipe data prepare: "
            "a folder of tokens (data.format: tokens) is read where it is needed"
        ) from None


@_memory_errors_reported()
def load(config: Config, position: Position | None = None) -> Data:
    """Read what `config.data` names and batch it as `config` says, or call what it names instead.

    Args:
        config: of the run.
        position: where the order of the batches begins, in a run that resumes with another batch size; None: at the first row.

    Raises:
        InputError: the path does not exist, cannot be read, or holds less than one batch for training and one for validation; the
            tokens do not fit the model; a `data.target` has fewer batches than the run has steps, or no length where the run counts epochs.
    """
    data = _read(config)
    if position is not None:
        assert isinstance(data.train, Ordered)
        data = replace(data, train=data.train.continued(position), first=position.batch)
    if config.train.epochs is not None:
        data = _with_epochs(config, config.train.epochs, data)
    if isinstance(data.train, target_data.TargetBatches):
        data.train.check_length(data.steps or config.train.length, "train.steps" if config.train.epochs is None else "train.epochs")
    return data


def _with_epochs(config: Config, epochs: float, data: Data) -> Data:
    """Return data for a run of that many epochs, with its number of steps.

    Where rows may be padding, those of the last batch that belong to later epochs are; otherwise they stay.

    Raises:
        InputError: the number of rows of an epoch is not known, or the run would be too long.
    """
    if data.rows is None:
        raise InputError(
            f"train.epochs: expected training data of known length, found {data.source}, whose training batches have none; give them a "
            "len(), the number of batches in an epoch, or set train.steps and train.epochs=null"
        )
    train = data.train.repeated() if isinstance(data.train, target_data.TargetBatches) else data.train
    first = train.first_position if isinstance(train, Ordered) else position.start(config.train.batch_size)
    end = position.rows_in(epochs, data.rows)
    steps = position.steps_until(end, first, config.train.batch_size)
    if steps > MOST_ROWS:
        raise InputError(f"train.epochs: expected at most {MOST_ROWS:,} steps, found {steps:,} of {data.rows:,} rows an epoch; lower it")
    if isinstance(train, BatchesOfRows) and _may_be_padded(config):
        train = replace(train, end=end)
    return replace(data, train=train, steps=steps)


def _may_be_padded(config: Config) -> bool:
    """Return whether the loss ignores rows whose labels are below zero."""
    if config.data.target is not None or config.loss.target is not None or config.data.objective == "masked":
        return False
    return config.model.target is not None or config.model.head != "regression"


def _read(config: Config) -> Data:
    if config.data.target is not None:
        return _from_target(config)
    if config.data.sources is not None:
        return _mixture(config, config.data.sources, _read)
    if config.data.format == "labels":
        return _of_labels(config)
    _check_objective(config)
    split = splits.read(config)
    _check_vocabulary(config, split.train.vocab_size)
    apart = _apart(config, split)
    rows = [_rows(config, split, part, apart=apart) for part in (0, 1)]
    _check_amount(config, split, *rows)
    held_out = rows[1] if isinstance(rows[1], masked.Masked) else windows.Filled(rows[1], config.train.batch_size)
    batches = _batches(config, rows[0], 0, apart=apart), _batches(config, held_out, 1, apart=apart)
    remarks = *_remarks(split, *rows), *_few_rows(config, *rows)
    return Data(*batches, split.source, _amount(split, *rows), split.digest, remarks, rows=len(rows[0]))


@_memory_errors_reported()
def held_out(config: Config, path: str | None = None) -> Data:
    """Load all validation data of a run as `validation`, even if it is less than a batch; there is nothing to train on.

    Args:
        config: of the run.
        path: other data in its place, of the same format, all of it.

    Raises:
        InputError: as `load`, except for the size; there is no row.
    """
    target = config.data.target
    if target is not None and path is not None:
        raise InputError(f"data.path: the data come from '{target}' (data.target), found the path '{path}'; change data.arguments")
    if target is not None:
        return _read(config)
    if config.data.sources is not None and path is None:
        return _mixture(config, config.data.sources, held_out)
    if config.data.sources is not None:
        config = _of_source(config, config.data.sources[0])
    if config.data.format == "labels":
        return _held_out_labels(config, path)
    _check_objective(config)
    split = splits.read(config) if path is None else splits.read_whole(config, path)
    if path is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"path": path})})
    _check_vocabulary(config, split.train.vocab_size)
    apart = _apart(config, split)
    rows = _rows(config, split, 1, apart=apart)
    _check_some(config, split, rows)
    batches = _batches(config, rows, 1, apart=apart)
    return Data(batches, batches, split.source, f"{split.validation.size:,} tokens", split.digest, _remarks(split, rows))


def _mixture(config: Config, sources: Sequence[SourceConfig], read: Callable[[Config], Data]) -> Data:
    """Return the data of several sources, whose rows are in proportion to their weights.

    Args:
        config: of the run.
        sources: with their names.
        read: reads the data of one source.

    Raises:
        InputError: as `read`; the rows of the sources differ in form or tokenizer.
    """
    if config.data.format == "tokens":
        splits.check_tokenizers([source.path for source in sources])
    parts = []
    for number, source in enumerate(sources):
        with _errors_name_source(number):
            parts.append(read(_of_source(config, source, number)))
    trains = [part.train for part in parts if isinstance(part.train, BatchesOfRows)]
    assert len(trains) == len(parts)
    for number, train in enumerate(trains):
        if train.spec != trains[0].spec:
            raise InputError(
                f"data.sources.{number}.path: expected rows like those of '{sources[0].path}', found that only one of the two says where "
                "documents end; set data.boundaries: ignore, or prepare both in the same way"
            )
    shares = mixture.proportions([source.weight for source in sources])
    mixed = replace(trains[0], elements=mixture.Mixed(tuple(train.elements for train in trains), shares))
    return Data(
        mixed,
        mixture.Joined(tuple(part.validation for part in parts)),
        ", ".join(f"{share / sum(shares):.1%} {part.source}" for part, share in zip(parts, shares, strict=True)),
        "; ".join(f"{source.name}: {part.amount}" for source, part in zip(sources, parts, strict=True)),
        lambda: hashlib.sha256(" ".join(part.digest() for part in parts).encode()).hexdigest(),
        tuple(f"{source.name}: {remark}" for source, part in zip(sources, parts, strict=True) for remark in part.remarks),
        parts=tuple(zip(sources, parts, strict=True)),
    )


def _of_source(config: Config, source: SourceConfig, number: int = 0) -> Config:
    """Return the config for one source alone, with an order of its own."""
    seed = int(np.random.SeedSequence((config.seed, number)).generate_state(1)[0]) if number else config.seed
    return config.model_copy(update={"seed": seed, "data": config.data.of_source(source)})


@contextmanager
def _errors_name_source(number: int) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        lines = (re.sub(r"\bdata\.(path|validation_path)\b", rf"data.sources.{number}.\1", str(line)) for line in error.args)
        raise InputError(*(line.replace(OR_NULL, "") for line in lines)) from None


def _from_target(config: Config, **optional: bool) -> Data:
    """Call `data.target` and return its data.

    Raises:
        InputError: as `load`.
    """
    target, batch_size = str(config.data.target), config.train.batch_size
    supplied = {"seed": config.seed, "batch_size": batch_size}
    result = entry_point.call(target, "data.target", config.data.arguments, supplied, optional)
    if isinstance(result, Data):
        return result
    train, validation = target_data.checked(result, target, batch_size)
    amount = f"{count(len(validation), 'batch', 'es')} for validation"
    return Data(train, validation, target, amount, lambda: target_data.digest(train, validation), rows=train.rows)


def unread(config: Config) -> Data:
    """Load data if only the shapes of a batch are needed; a `data.target` with a parameter `shapes_only` then need not read anything.

    Raises:
        InputError: as `load`.
    """
    return load(config) if config.data.target is None else _from_target(config, shapes_only=True)


def portion(config: Config) -> tuple[int, str]:
    """Return how much a step processes, and in which unit: tokens of a text, or samples of other data."""
    if config.data.target is None and config.data.format != "labels":
        return config.train.batch_size * config.model.seq_len, "tokens"
    return config.train.batch_size, "samples"


def loss_unit(config: Config) -> str:
    """Return the unit that follows a loss in messages, or "" if it is unknown."""
    if config.loss.target is not None:
        return ""
    if config.model.target is None and config.model.head == "regression":
        return ""
    if config.model.has_router_loss:
        return " nats"  # per label, and of the routers
    if config.data.target is not None or config.data.format == "labels":
        return " nats per label"
    if config.data.objective == "masked":
        return " nats"  # the sum of two means: per masked token, and per row
    return " nats per byte" if config.data.read_as == "bytes" else " nats per token"


def _check_objective(config: Config) -> None:
    """Check that the built-in model and loss support the objective."""
    if config.model.target is not None or config.loss.target is not None:
        return
    kind, objective = config.model.kind, config.data.objective
    if kind == "bert" and objective != "masked":
        raise InputError(
            f"data.objective: expected masked, which model.kind bert learns, found {objective}; set it to masked, with data.format text "
            "or tokens"
        )
    if kind != "bert" and objective == "masked":
        raise InputError(f"data.objective: expected next, which model.kind {kind} learns, found masked; change one of them")


def _of_labels(config: Config) -> Data:
    """Read texts with labels.

    Raises:
        InputError: as `load`.
    """
    read = labelled.read(config)
    _check_vocabulary(config, read.vocab_size)
    have, need = (len(read.train), len(read.validation)), config.train.batch_size
    expected = f"expected at least {need} examples for training (train.batch_size) and 1 for validation"
    if have[0] < need:
        raise InputError(f"data.path: {expected}, found {have[0]:,} and {have[1]:,} in {read.source}; give more, or lower train.batch_size")
    if not have[1]:
        more = "" if config.data.validation_path is not None else ", or raise data.validation_fraction"
        raise InputError(f"data.path: {expected}, found {have[0]:,} and none in {read.source}; give more{more}")
    batches = [_batches_of_labels(config, part, number) for number, part in enumerate((read.train, read.validation))]
    amount = f"{have[0]:,} examples for training, {have[1]:,} for validation"
    return Data(batches[0], batches[1], read.source, amount, read.digest, read.remarks, rows=have[0])


def _held_out_labels(config: Config, path: str | None) -> Data:
    """Read all texts with labels that are held out."""
    read = labelled.read(config, path)
    _check_vocabulary(config, read.vocab_size)
    if not len(read.validation):
        raise InputError(f"data.path: expected at least 1 example, found none in {read.source}; give more")
    batches = _batches_of_labels(config, read.validation, 1)
    return Data(batches, batches, read.source, count(len(read.validation), "example"), read.digest, read.remarks)


def _batches_of_labels(config: Config, examples: labelled.Examples, part: int) -> BatchesOfRows:
    return BatchesOfRows(_ordered(config, examples, part), config.train.batch_size, examples.spec)


def _check_vocabulary(config: Config, need: int) -> None:
    """Check that the built-in model has a symbol for every token."""
    if config.model.target is None and need > (have := config.model.vocab_size):
        of_folder = f"the tokens of '{config.data.path}'"
        name = {"bytes": "bytes", "tokens": of_folder}.get(config.data.read_as, f"the tokens of '{config.data.tokenizer}'")
        raise InputError(f"model.vocab_size: expected at least {need}, for {name}, found {have}; set model.vocab_size to {need}")


def _apart(config: Config, split: Split) -> bool:
    """Return whether the documents in a row are kept apart, as segments."""
    known = split.train.have_ends and split.validation.have_ends
    if config.data.boundaries == "keep" and not known:
        raise InputError(
            f"data.boundaries: expected '{config.data.path}' to say where documents end, for keep, found a tokens.json that does not; "
            "prepare it again, or ignore them"
        )
    default = "ignore" if config.data.read_as == "bytes" or config.data.objective == "masked" else "keep"
    return split.train.have_answers or ((config.data.boundaries or default) == "keep" and known)


def _rows(config: Config, split: Split, part: int, *, apart: bool) -> Rows:
    """Return the rows of one part, each once."""
    documents, data, seq_len = (split.train, split.validation)[part], config.data, config.model.seq_len
    if split.train.have_answers or data.format in ("prompts", "chat"):
        if data.objective == "masked":
            raise InputError("data.objective: masked: expected text, found prompts with answers; leave it out")
        return windows.Examples(documents, seq_len, cut=data.too_long == "cut", place=split.place[part])
    if data.objective == "masked":
        assert split.tokenizer is not None
        return masked.Masked(documents, split.tokenizer, seq_len, data.masked_fraction, _seed(config, part))
    return windows.Windows(documents, seq_len, apart=apart)


def _batches(config: Config, rows: AnyRows, part: int, *, apart: bool) -> BatchesOfRows:
    """Batch the rows of one part."""
    seq_len = config.model.seq_len
    spec = masked.row_spec(seq_len) if config.data.objective == "masked" else windows.row_spec(seq_len, segments=apart)
    return BatchesOfRows(_ordered(config, rows, part), config.train.batch_size, spec)


def _ordered(config: Config, rows: AnyRows, part: int) -> Elements:
    """Return the rows in the order of their batches, endlessly for training."""
    if isinstance(rows, masked.Masked):
        return masked.Drawn(rows, epochs=part == 0)
    shuffled = grain.MapDataset.source(rows).shuffle(seed=_seed(config, part))
    return shuffled.repeat() if part == 0 else shuffled


def _seed(config: Config, part: int) -> int:
    return config.seed if part == 0 else 0  # validation is spread over the files, but never by config.seed


def _check_amount(config: Config, split: Split, train: Rows, validation: Rows) -> None:
    """Check that there is at least one row for training and one for validation, and a batch of masked ones, which cannot be padded.

    Raises:
        InputError: there are fewer rows.
    """
    batch_size, seq_len = config.train.batch_size, config.model.seq_len
    if min(len(train), len(validation)) >= (batch_size if isinstance(train, masked.Masked) else 1):
        return
    need, unit, have, why = 2, split.unit, (split.train.size, split.validation.size), "one that is read and one that is predicted"
    if isinstance(train, windows.Examples):
        need, unit, have = 1, "row of examples", (len(train), len(validation))
        why = "a row has whole examples with answers"
    elif isinstance(train, masked.Masked):
        each = seq_len - masked.SPECIAL
        need = batch_size * each
        why = f"train.batch_size {batch_size} windows of {each} tokens, model.seq_len {seq_len} without special tokens"
    more = "prepare more" if config.data.format == "tokens" else "give more text"
    if config.data.format != "tokens" and config.data.validation_path is None:
        more += ", raise data.validation_fraction"
    raise InputError(
        f"data.path: expected at least {need} {unit} for training and {need} for validation ({why}), found {have[0]} and {have[1]} in "
        f"{split.source}; {more}{', or lower train.batch_size or model.seq_len' if isinstance(train, masked.Masked) else ''}"
    )


def _check_some(config: Config, split: Split, rows: Rows) -> None:
    """Check that there is at least one row."""
    if len(rows):
        return
    seq_len = config.model.seq_len
    need, what, have = 2, f"{split.unit} (one that is read and one that is predicted)", split.validation.size
    if isinstance(rows, masked.Masked):
        need, what = seq_len - masked.SPECIAL, f"{split.unit} (a window of model.seq_len {seq_len} without special tokens)"
    elif isinstance(rows, windows.Examples):
        need, what, have = 1, "example with an answer", 0
    raise InputError(f"data.path: expected at least {need} {what}, found {have} in {split.source}; give more")


def _amount(split: Split, train: Rows, validation: Rows) -> str:
    """Describe how much there is to train on."""
    words = f"{split.train.size:,} tokens for training, {split.validation.size:,} for validation"
    if isinstance(train, windows.Examples):
        words += f"; {len(train):,} and {len(validation):,} rows of whole examples, {train.fill:.0%} full"
    return words


def _few_rows(config: Config, train: Rows, validation: Rows) -> tuple[str, ...]:
    """Say that there are fewer rows than a batch has."""
    size = config.train.batch_size
    in_training = f"{count(len(train), 'row')} for training: a batch of {size} has rows several times"
    in_validation = f"{count(len(validation), 'row')} for validation: a batch of {size} is filled with padding"
    return tuple(words for rows, words in ((train, in_training), (validation, in_validation)) if len(rows) < size)


def _remarks(split: Split, *rows: Rows) -> tuple[str, ...]:
    """Describe what was left out."""
    left_out = sum(part.left_out for part in rows if isinstance(part, windows.Examples))
    too_long = f"{count(left_out, 'example')} left out: prompts so long that nothing of the answer remains"
    return (*split.remarks, too_long) if left_out else split.remarks
