"""Make rows from documents, and put them into batches. Rows are windows of a running text, packed examples, or masked windows."""

from jpipe import InputError
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.config.sections import data_of
from jpipe_lm.data import masked, splits, windows
from jpipe_lm.data.splits import Split
from jpipe_train.config.config import Config
from jpipe_train.console.terminal import count
from jpipe_train.data.data import Data
from jpipe_train.data.order import ordered, seed_of
from jpipe_train.data.rows import BatchesOfRows

Rows = windows.Windows | windows.Examples | masked.Masked
AnyRows = Rows | windows.Filled


def load(config: Config) -> Data:
    """Read documents, and put their rows into batches.

    Raise InputError if the documents cannot be read, are too few, or cannot be used with the model.
    """
    check_objective(config)
    split = splits.read(config)
    check_vocabulary(config, split.train.vocab_size)
    apart = keeps_apart(config, split)
    rows = [rows_of(config, split, part, apart=apart) for part in (0, 1)]
    check_amount(config, split, *rows)
    held_out = rows[1] if isinstance(rows[1], masked.Masked) else windows.Filled(rows[1], config.train.batch_size)
    batches = batches_of(config, rows[0], 0, apart=apart), batches_of(config, held_out, 1, apart=apart)
    remarks = *remarks_of(split, *rows), *few_rows(config, *rows)
    return Data(*batches, split.source, amount_of(split, *rows), split.digest, remarks, rows=len(rows[0]))


def load_held_out(config: Config, path: str | None) -> Data:
    """Read all held-out documents, or all of the data at another path, and put their rows into batches, or fewer rows than a batch.

    Raise the InputErrors of `load`, or one if there is no row.
    """
    check_objective(config)
    split = splits.read(config) if path is None else splits.read_whole(config, path)
    if path is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"path": path})})
    check_vocabulary(config, split.train.vocab_size)
    apart = keeps_apart(config, split)
    rows = rows_of(config, split, 1, apart=apart)
    check_some(config, split, rows)
    batches = batches_of(config, rows, 1, apart=apart)
    return Data(batches, batches, split.source, f"{split.validation.size:,} tokens", split.digest, remarks_of(split, rows))


def check_files(config: Config, path: str | None) -> None:
    """Check the text files, the tokenizer and the chat template, without reading data. `path` is the same as in `load_held_out`."""
    if config.data.has_tokens:
        check_objective(config)
    if (symbols := splits.check_files(config, path)) is not None:
        check_vocabulary(config, symbols)


def check_objective(config: Config) -> None:
    """Check that the built-in model and loss support the objective."""
    if not isinstance(config.model, ModelConfig) or config.loss.target is not None:
        return
    kind, objective = config.model.kind, data_of(config).objective
    if kind == "bert" and objective != "masked":
        raise InputError(
            f"data.objective: expected masked for model.kind bert, found {objective}; set data.objective to masked, with data.format text "
            "or tokens"
        )
    if kind != "bert" and objective == "masked":
        raise InputError(f"data.objective: expected next for model.kind {kind}, found masked; change one of them")


def check_vocabulary(config: Config, need: int) -> None:
    """Check that the built-in model has a symbol for every token."""
    if isinstance(config.model, ModelConfig) and need > (have := config.model.vocab_size):
        of_folder = f"the tokens of '{config.data.path}'"
        name = {"bytes": "bytes", "tokens": of_folder}.get(data_of(config).read_as, f"the tokens of '{data_of(config).tokenizer}'")
        raise InputError(f"model.vocab_size: expected at least {need}, for {name}, found {have}; set model.vocab_size to {need}")


def keeps_apart(config: Config, split: Split) -> bool:
    """Return whether the documents in a row are separate segments."""
    known = split.train.have_ends and split.validation.have_ends
    if data_of(config).boundaries == "keep" and not known:
        raise InputError(
            f"data.boundaries: keep needs the ends of documents, found a tokens.json without ends in '{config.data.path}'; prepare the "
            "folder again, or set data.boundaries: ignore"
        )
    default = "ignore" if data_of(config).read_as == "bytes" or data_of(config).objective == "masked" else "keep"
    return split.train.have_answers or ((data_of(config).boundaries or default) == "keep" and known)


def rows_of(config: Config, split: Split, part: int, *, apart: bool) -> Rows:
    """Return the rows of one part (0 for training, 1 for validation). Each row occurs once."""
    documents, data, seq_len = (split.train, split.validation)[part], data_of(config), config.model.seq_len
    if split.train.have_answers or data.format in ("prompts", "chat"):
        if data.objective == "masked":
            raise InputError("data.objective: masked: expected text, found prompts with answers; remove data.objective")
        return windows.Examples(documents, seq_len, cut=data.too_long == "cut", place=split.place[part])
    if data.objective == "masked":
        assert split.tokenizer is not None
        return masked.Masked(documents, split.tokenizer, seq_len, data.masked_fraction, seed_of(config, part))
    return windows.Windows(documents, seq_len, apart=apart)


def batches_of(config: Config, rows: AnyRows, part: int, *, apart: bool) -> BatchesOfRows:
    """Put the rows of one part into batches."""
    seq_len = config.model.seq_len
    spec = masked.row_spec(seq_len) if data_of(config).objective == "masked" else windows.row_spec(seq_len, segments=apart)
    elements = masked.Drawn(rows, epochs=part == 0) if isinstance(rows, masked.Masked) else ordered(config, rows, part)
    return BatchesOfRows(elements, config.train.batch_size, spec)


def check_amount(config: Config, split: Split, train: Rows, validation: Rows) -> None:
    """Check that training and validation have at least one row each. Masked rows cannot be padded, so at least one batch each is needed."""
    batch_size, seq_len = config.train.batch_size, config.model.seq_len
    if min(len(train), len(validation)) >= (batch_size if isinstance(train, masked.Masked) else 1):
        return
    need, unit, have, why = 2, split.unit, (split.train.size, split.validation.size), "one as input and one to predict"
    if isinstance(train, windows.Examples):
        need, unit, have = 1, "row of examples", (len(train), len(validation))
        why = "a row has whole examples with answers"
    elif isinstance(train, masked.Masked):
        each = seq_len - masked.SPECIAL
        need = batch_size * each
        why = f"train.batch_size {batch_size} windows of {each} tokens, model.seq_len {seq_len} without special tokens"
    more = "prepare more" if data_of(config).format == "tokens" else "give more text"
    if data_of(config).format != "tokens" and data_of(config).validation_path is None:
        more += ", raise data.validation_fraction"
    raise InputError(
        where="data.path",
        expected=f"at least {need} {unit} for training and {need} for validation ({why})",
        found=f"{have[0]} and {have[1]} in {split.source}",
        change=f"{more}{', or lower train.batch_size or model.seq_len' if isinstance(train, masked.Masked) else ''}",
    )


def check_some(config: Config, split: Split, rows: Rows) -> None:
    """Check that there is at least one row."""
    if len(rows):
        return
    seq_len = config.model.seq_len
    need, what, have = 2, f"{split.unit} (one as input and one to predict)", split.validation.size
    if isinstance(rows, masked.Masked):
        need, what = seq_len - masked.SPECIAL, f"{split.unit} (a window of model.seq_len {seq_len} without special tokens)"
    elif isinstance(rows, windows.Examples):
        need, what, have = 1, "example with an answer", 0
    raise InputError(where="data.path", expected=f"at least {need} {what}", found=f"{have} in {split.source}", change="give more data")


def amount_of(split: Split, train: Rows, validation: Rows) -> str:
    """Describe the amount of training data."""
    words = f"{split.train.size:,} tokens for training, {split.validation.size:,} for validation"
    if isinstance(train, windows.Examples):
        words += f"; {len(train):,} and {len(validation):,} rows of whole examples, {train.fill:.0%} full"
    return words


def few_rows(config: Config, train: Rows, validation: Rows) -> tuple[str, ...]:
    """Return remarks if there are fewer rows than in a batch."""
    size = config.train.batch_size
    in_training = f"{count(len(train), 'row')} for training: a batch of {size} repeats rows"
    in_validation = f"{count(len(validation), 'row')} for validation: a batch of {size} is filled with padding"
    return tuple(words for rows, words in ((train, in_training), (validation, in_validation)) if len(rows) < size)


def remarks_of(split: Split, *rows: Rows) -> tuple[str, ...]:
    """Return remarks about data that were left out."""
    left_out = sum(part.left_out for part in rows if isinstance(part, windows.Examples))
    too_long = f"{count(left_out, 'example')} left out, because the prompt leaves no room for the answer"
    return (*split.remarks, too_long) if left_out else split.remarks
