"""Load the data of a config for training and validation: find files, split them, read rows, and put the rows into batches.

Batch t depends only on the seed and t. So `batches[t]` may be read in any order, several times, or by another process. Its rows are read
when they are needed.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

import jpipe
from jpipe import InputError
from jpipe_train.config.config import Config
from jpipe_train.config.data_section import SourceConfig
from jpipe_train.config.functions import entry_point
from jpipe_train.config.section import MOST_ROWS
from jpipe_train.console.progress import Reporter
from jpipe_train.console.terminal import count
from jpipe_train.data import mixture, position, target_data
from jpipe_train.data.order import ordered
from jpipe_train.data.position import Ordered, Position
from jpipe_train.data.rows import Batch, BatchesOfRows, Divisible, Elements


@runtime_checkable
class Batches(Protocol):
    """A number of batches that have an index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Batch: ...


class HeldOut(NamedTuple):
    """A batch of an evaluation and, if there are several sources, its source."""

    batch: Batch
    source: SourceConfig | None = None


@runtime_checkable
class ElementsOfOneShape(Elements, Protocol):
    """Pairs of (inputs, labels) that have an index; all have the same shape."""

    @property
    def spec(self) -> Batch:
        """The shapes and dtypes of a pair."""
        ...


@dataclass(frozen=True)
class Examples:
    """The rows for training and for validation that a format of data reads.

    Attributes:
        train: the rows for training.
        validation: the held-out rows.
        source: a phrase that describes where the rows come from.
        digest: a function that returns a hash; it is equal in two processes only if their rows are equal.
        remarks: lines that say what was cut or left out.
        largest_class: the largest label and the name of its row, if labels are classes and the largest is known.
        unfinished: the rows of either part, if their labels lack numbers of the initial model.
    """

    train: ElementsOfOneShape
    validation: ElementsOfOneShape
    source: str
    digest: Callable[[], str]
    remarks: tuple[str, ...] = ()
    largest_class: tuple[int, str] | None = None
    unfinished: "tuple[Unfinished, ...]" = ()


@runtime_checkable
class Unfinished(Protocol):
    """Rows with labels that also have numbers of the initial model, such as the log-probabilities of a reference.

    A new run computes them before its first step, and keeps them in its folder.
    """

    def read(self, folder: Path) -> bool:
        """Read the numbers from the folder of a run. Return False if it has none for these rows."""
        ...

    def compute(self, pipe: jpipe.Pipeline, state: jpipe.State, batch_size: int, folder: Path | None, reporter: Reporter) -> None:
        """Compute the numbers with the weights of a state, and keep them in the folder of a run, if it is given."""
        ...


@dataclass(frozen=True)
class Data:
    """Batches for training, `train[t]` for any t, and for validation, `validation[i]` for i < len(validation).

    A batch is (inputs, labels). Its arrays have a shape, a dtype and slices of rows (`jpipe_train.data.rows.Rows`); only sliced rows are
    read.
    """

    train: Batches  # the batches for training
    validation: Batches  # the held-out batches
    source: str  # a phrase that describes where the data come from
    amount: str  # a phrase that describes how many data there are
    digest: Callable[[], str]  # a function that returns a hash of a sample of the data, to compare the data of two processes
    remarks: tuple[str, ...] = ()  # lines that say what was left out
    vocab_size: int | None = None  # the number of tokens or classes, if the loader knows it; otherwise each batch is checked as it is read
    shapes: tuple[Batch, ...] = ()  # the shapes and dtypes of the batches, if there are several; the largest first
    first: int = 0  # the first training batch that can be read. Earlier batches belong to an earlier part of a resumed run.
    rows: int | None = None  # the number of rows in an epoch, if the loader knows it
    steps: int | None = None  # the number of steps in the run's `train.epochs`, if it is set
    # the largest label of all rows and the name of its row, if labels are classes and the loader knows it
    largest_class: tuple[int, str] | None = None
    # the sources of a mixture, each with its data; `validation` joins their validation batches, one source after the other
    parts: "tuple[tuple[SourceConfig, Data], ...]" = ()
    unfinished: tuple[Unfinished, ...] = ()  # the rows that lack numbers of the initial model in their labels

    @property
    def like(self) -> Batch:
        """A batch with the shapes and dtypes of all batches, or of the largest batch if they differ."""
        return self.shapes[0] if self.shapes else self.train[self.first]

    def held_out(self, most: int) -> list[HeldOut]:
        """Return at most `most` validation batches of each source. A source without a full batch gives smaller batches instead."""
        if self.parts:
            ends = np.cumsum([len(part.validation) for _, part in self.parts]).tolist()
            return [
                HeldOut(self.validation[end - len(part.validation) + i], source)
                for end, (source, part) in zip(ends, self.parts, strict=True)
                for i in range(len(part.held_out(most)))
            ]
        takes_all = isinstance(self.validation, Divisible) and self.validation.has_remainder
        number = len(self.validation) if takes_all else min(most, len(self.validation))
        return [HeldOut(self.validation[i]) for i in range(number)]

    def with_some_validation(self) -> "Data":
        """Return these data. If the validation rows do not fill a batch, put them all into smaller batches."""
        if self.parts:
            parts = tuple((source, part.with_some_validation()) for source, part in self.parts)
            return replace(self, parts=parts, validation=mixture.Joined(tuple(part.validation for _, part in parts)))
        if len(self.validation) or not isinstance(self.validation, Divisible):
            return self
        return replace(self, validation=self.validation.with_remainder())


@contextmanager
def _memory_errors_reported() -> Iterator[None]:
    try:
        yield
    except MemoryError:
        raise InputError(
            "data: expected data that fit into memory, found more; use fewer data, or prepare text with jpipe data prepare, because "
            "a folder of tokens (data.format: tokens) is not read into memory"
        ) from None


@_memory_errors_reported()
def load(config: Config, position: Position | None = None) -> Data:
    """Read the data that `config.data` names and put them into batches, or call `data.target`.

    `position` is where batches of a new size begin, in a run that resumes with another batch size. Raise InputError if the path does not
    exist, cannot be read, or has too few rows for training or validation; tokens are out of the model's vocabulary; a `data.target` has
    fewer batches than the run has steps, or has no length although the run has `train.epochs`.
    """
    data = _read(config)
    if position is not None:
        assert isinstance(data.train, Ordered)
        data = replace(data, train=data.train.continued(position), first=position.batch)
    if config.train.epochs is not None:
        data = _with_epochs(config, config.train.epochs, data)
    if isinstance(data.train, target_data.UserBatches):
        data.train.check_length(data.steps or config.train.length, "train.steps" if config.train.epochs is None else "train.epochs")
    return data


def _with_epochs(config: Config, epochs: float, data: Data) -> Data:
    """Return data for a run of `epochs` epochs, with the number of steps.

    The last batch may have rows of the next epoch. If padding is possible, they become padding; otherwise they stay. Raise InputError if
    the number of rows in an epoch is unknown, or the run would be too long.
    """
    if (rows := data.rows) is None:
        raise InputError(
            f"train.epochs: expected training data with a known length, found {data.source} with training batches of unknown length; give "
            "them a len(), the number of batches in an epoch, or set train.steps and train.epochs=null"
        )
    train = data.train.repeated() if isinstance(data.train, target_data.UserBatches) else data.train
    first = train.first_position if isinstance(train, Ordered) else position.start(config.train.batch_size)
    data = with_steps_of(replace(data, train=train), epochs, first, config.train.batch_size, "train.epochs")
    if isinstance(train, BatchesOfRows) and config.data.may_be_padded and config.loss_name == "cross_entropy":
        return replace(data, train=replace(train, end=position.rows_in(epochs, rows)))
    return data


def with_steps_of(data: Data, epochs: float, first: Position, batch_size: int, where: str) -> Data:
    """Return the data of a run of `epochs` epochs, with its number of steps from `first` on. Raise InputError if these are too many."""
    assert data.rows is not None
    steps = position.steps_until(position.rows_in(epochs, data.rows), first, batch_size)
    if steps > MOST_ROWS:
        raise InputError(
            f"{where}: expected at most {MOST_ROWS:,} steps, found {steps:,} with {data.rows:,} rows in an epoch; lower {where.split()[-1]}"
        )
    return replace(data, steps=steps)


def _read(config: Config) -> Data:
    if config.data.target is not None:
        return _from_target(config)
    if config.data.sources is not None:
        return _mixture(config, config.data.sources, _read)
    loaded = config.data.load_batches(config)
    return _of_examples(config, config.data.read_examples(config)) if loaded is None else loaded


@_memory_errors_reported()
def held_out(config: Config, path: str | None = None) -> Data:
    """Load all validation data of a run, or all data at another path, as `validation`, even if they fill less than a batch.

    `train` must not be used for training. Raise the InputErrors of `load`, except for too few rows, or one if there is no row.
    """
    _check_has_path(config, path)
    if config.data.target is not None:
        return _read(config)
    if config.data.sources is not None and path is None:
        return _mixture(config, config.data.sources, held_out)
    if config.data.sources is not None:
        config = _of_source(config, config.data.sources[0])
    loaded = config.data.load_held_out(config, path)
    return _held_out_examples(config, config.data.read_examples(config, path)) if loaded is None else loaded


def _check_has_path(config: Config, path: str | None) -> None:
    if config.data.target is not None and path is not None:
        raise InputError(
            f"the data come from '{config.data.target}' (data.target), found the path '{path}'",
            where="data.path",
            change="change data.arguments",
        )


def _mixture(config: Config, sources: Sequence[SourceConfig], read: Callable[[Config], Data]) -> Data:
    """Return the data of several sources, which `read` reads, mixed in proportion to their weights.

    Raise InputError if the rows of the sources differ in form or tokenizer.
    """
    config.data.check_sources()
    parts = []
    for number, source in enumerate(sources):
        with _errors_name_source(number):
            parts.append(read(_of_source(config, source, number)))
    trains = [part.train for part in parts if isinstance(part.train, BatchesOfRows)]
    assert len(trains) == len(parts)
    for number, train in enumerate(trains):
        if train.spec != trains[0].spec:
            raise InputError(f"data.sources.{number}.path: {_differing(config, sources[0].path, trains[0].spec, train.spec)}")
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
        unfinished=tuple(rows for part in parts for rows in part.unfinished),
    )


def _differing(config: Config, path: str, first: Batch, other: Batch) -> str:
    """Describe how the rows of a source differ from the rows of the first source, at `path`, and what to change."""
    expected = f"expected rows like in '{path}', found"
    if config.data.has_tokens:
        return f"{expected} that only one of the two marks ends of documents; set data.boundaries: ignore, or prepare both in the same way"
    one, two = (" and ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(spec)) for spec in (first, other))
    return f"{expected} inputs and targets {two} in place of {one}; make them equal"


def _of_source(config: Config, source: SourceConfig, number: int = 0) -> Config:
    """Return the config for a single source, with another seed for each source, so that their rows have different orders."""
    seed = int(np.random.SeedSequence((config.seed, number)).generate_state(1)[0]) if number else config.seed
    return config.model_copy(update={"seed": seed, "data": config.data.of_source(source)})


@contextmanager
def _errors_name_source(number: int) -> Iterator[None]:
    try:
        yield
    except InputError as error:
        keys = {f"data.{key}": f"data.sources.{number}.{key}" for key in ("path", "validation_path")}
        raise error.renamed(keys) from error.__cause__


def _from_target(config: Config, **optional: bool) -> Data:
    """Call `data.target` and return its data.

    Raise InputError as in `load`.
    """
    target, batch_size = str(config.data.target), config.train.batch_size
    supplied = {"seed": config.seed, "batch_size": batch_size}
    result = entry_point.call(target, "data.target", config.data.arguments, supplied, optional)
    if isinstance(result, Data):
        return result
    train, validation = target_data.checked(result, target, batch_size)
    amount = f"{count(len(validation), 'batch', 'es')} for validation"
    return Data(train, validation, target, amount, lambda: target_data.digest(train, validation), rows=train.rows)


def check_files(config: Config, path: str | None = None) -> None:
    """Check the files that `config.data` names, its tokenizer and its chat template, without reading any data."""
    data = config.data
    _check_has_path(config, path)
    if data.target is not None:
        entry_point.checked(data.target, "data.target", data.arguments, ("seed", "batch_size"))
    elif data.sources is not None and path is not None:
        check_files(_of_source(config, data.sources[0]), path)
    elif data.sources is not None:
        for number, source in enumerate(data.sources):
            with _errors_name_source(number):
                check_files(_of_source(config, source, number))
    else:
        data.check_files(config, path)


def unread(config: Config) -> Data:
    """Load data only for the shapes of a batch. A `data.target` with a parameter `shapes_only` then need not read anything.

    Raise InputError as in `load`.
    """
    return load(config) if config.data.target is None else _from_target(config, shapes_only=True)


def portion(config: Config) -> tuple[int, str]:
    """Return the amount of data that a step processes, and its unit: tokens for text, samples for other data."""
    return config.data.amount_of_step(config)


def loss_unit(config: Config) -> str:
    """Return the unit that follows a loss in messages, or "" if it is unknown."""
    return (config.model.loss_unit or config.data.loss_unit) if config.loss_name == "cross_entropy" else ""


def _of_examples(config: Config, read: Examples) -> Data:
    """Put the rows for training and for validation into batches. Raise InputError if there are too few rows."""
    have, need = (len(read.train), len(read.validation)), config.train.batch_size
    expected = f"expected at least {need} examples for training (train.batch_size) and 1 for validation"
    if config.data.content == "numbers" and config.data.validation_path is None and 0 in have and sum(have) > need:
        raise InputError(
            f"{expected}, found {have[0]:,} and {have[1]:,} in {read.source}",
            where="data.path",
            change="add rows with other inputs, change data.validation_fraction, or name validation rows in data.validation_path "
            "(rows with equal inputs always stay together)",
        )
    if have[0] < need:
        raise InputError(
            f"{expected}, found {have[0]:,} and {have[1]:,} in {read.source}",
            where="data.path",
            change="give more data, or lower train.batch_size",
        )
    if not have[1]:
        more = "" if config.data.validation_path is not None else ", or raise data.validation_fraction"
        raise InputError(f"{expected}, found {have[0]:,} and none in {read.source}", where="data.path", change=f"give more data{more}")
    train, validation = _batched(config, read.train, 0), _batched(config, read.validation, 1)
    amount = f"{have[0]:,} examples for training, {have[1]:,} for validation"
    return Data(
        train,
        validation,
        read.source,
        amount,
        read.digest,
        read.remarks,
        rows=have[0],
        largest_class=read.largest_class,
        unfinished=read.unfinished,
    )


def _held_out_examples(config: Config, read: Examples) -> Data:
    """Put all held-out rows into batches."""
    if not len(read.validation):
        raise InputError(where="data.path", expected="at least 1 example", found=f"none in {read.source}", change="give more data")
    batches, amount = _batched(config, read.validation, 1), count(len(read.validation), "example")
    remarks, largest = read.remarks, read.largest_class
    return Data(batches, batches, read.source, amount, read.digest, remarks, largest_class=largest, unfinished=read.unfinished)


def _batched(config: Config, examples: ElementsOfOneShape, part: int) -> BatchesOfRows:
    return BatchesOfRows(ordered(config, examples, part), config.train.batch_size, examples.spec)
