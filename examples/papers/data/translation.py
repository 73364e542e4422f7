"""Parallel text for GNMT: pairs of lines of two aligned files.

Each sentence is padded to the length of its bucket. The last bucket has the greatest allowed length, and a pipeline is compiled for each.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from examples.papers.arguments import DATA, MOST_POSITIONS, check_choice, check_integers
from examples.papers.data.buckets import batches_of, bucket_of, shapes_of
from examples.papers.data.sentences import FOLDER, Unusable, digest_of, lines_of, present, shifted, shown, usable
from jpipe import InputError
from jpipe.files import expanded
from jpipe_lm.data import tokenizer as tokenizers
from jpipe_train.data.data import Data

Inputs = dict[str, Int32[np.ndarray, "..."]]
Row = tuple[Any, Any]


@dataclass(frozen=True)
class Pairs:
    """Rows of sentence pairs: row i has sentence i and its translation.

    Attributes:
        sources: tokens of each sentence, its end not included.
        targets: tokens of its translation, its end not included.
        lengths: of a row, of sources and of targets.
        end: the token that ends a sentence, and starts a translation.
    """

    sources: list[np.ndarray]
    targets: list[np.ndarray]
    lengths: tuple[int, int]
    end: int

    def __len__(self) -> int:
        return len(self.sources)

    def split(self, lengths: Sequence[tuple[int, int]]) -> list["Pairs"]:
        """Distribute the pairs over buckets: each pair goes into the first bucket that it fits into.

        Every pair fits into the last bucket.
        """
        sizes = [np.asarray([each.size for each in sentences], np.int64) + 1 for sentences in (self.sources, self.targets)]
        chosen = bucket_of(sizes, lengths)
        buckets = []
        for bucket, each in enumerate(lengths):
            sources, targets = ([part[i] for i in np.flatnonzero(chosen == bucket)] for part in (self.sources, self.targets))
            buckets.append(Pairs(sources, targets, each, self.end))
        return buckets

    @property
    def spec(self) -> Row:
        """The shapes and dtypes of a row."""
        source, target = (jax.ShapeDtypeStruct((length,), np.dtype(np.int32)) for length in self.lengths)
        number = jax.ShapeDtypeStruct((), np.dtype(np.int32))
        return {"source": source, "source_length": number, "target": target}, target

    def __getitem__(self, index: int) -> tuple[Inputs, Int32[np.ndarray, " t"]]:
        target, labels = shifted(self.targets[index], self.end, self.lengths[1])
        return source_row(self.sources[index], self.end, self.lengths[0]) | {"target": target}, labels


def source_row(tokens: np.ndarray, end: int, length: int) -> Inputs:
    """Pad a sentence, followed by its end, and return it with its length."""
    row = np.full(length, end, np.int32)
    row[: tokens.size] = tokens
    return {"source": row, "source_length": np.asarray(tokens.size + 1, np.int32)}


def load(
    seed: int,
    batch_size: int,
    folder: str,
    source_length: int = 50,
    target_length: int = 50,
    buckets: Sequence[int] = (),
    unusable: Unusable = "refuse",
) -> Data:
    """Read the training and the validation pairs of a folder.

    Args:
        seed: of the order of the pairs.
        batch_size: rows of a batch.
        folder: has `train.source`, `train.target`, `validation.source`, `validation.target` and a `tokenizer.json` for both languages.
        source_length: tokens of a sentence to translate, its end included.
        target_length: tokens of its translation, its end included.
        buckets: shorter lengths, from the shortest on. A pair is padded to the first that both of its sentences fit into, and batched
            with others of that length, so that batches have one more shape for each.
        unusable: raise an error for a sentence that is empty or longer ("refuse"), or drop the pair.

    Raises:
        InputError: an argument is out of range; a file is missing or is no text, two of them have not the same number of lines, or pairs
            that cannot be used, with `unusable` "refuse"; there is less than a batch for validation.
    """
    check_integers(DATA, 1, MOST_POSITIONS, source_length=source_length, target_length=target_length)
    check_choice(DATA, ("refuse", "drop"), unusable=unusable)
    longest = max(source_length, target_length)
    is_list = isinstance(buckets, list | tuple) and all(type(each) is int for each in buckets)
    if not is_list or any(later <= earlier for earlier, later in itertools.pairwise((0, *buckets, longest))):
        raise InputError(
            f"data.arguments.buckets: expected lengths that grow, below {longest} (the larger of source_length and target_length), found "
            f"{list(buckets) if isinstance(buckets, tuple) else buckets}"
        )
    tokenizer = load_tokenizer(folder)
    lengths = source_length, target_length
    (train, remark), (validation, other) = (_pairs(folder, lengths, unusable, tokenizer, part) for part in ("train", "validation"))
    arrays = [np.concatenate(part) for pairs in (train, validation) for part in (pairs.sources, pairs.targets) if part]
    shapes = [*((min(each, source_length), min(each, target_length)) for each in buckets), lengths]
    bucketed = [parts for parts in zip(train.split(shapes), validation.split(shapes), strict=True) if any(map(len, parts))]
    source = shown(folder)
    batches = batches_of(bucketed, seed, batch_size, source if len(bucketed) < 2 else f"the largest bucket of {source}")
    amount = f"{len(train):,} pairs of sentences for training, {len(validation):,} for validation"
    remarks = present((remark, other, _buckets_in_words(bucketed)))
    return Data(*batches, source, amount, digest_of(arrays), remarks, tokenizer.vocab_size, shapes_of(batches[0]))


def _buckets_in_words(buckets: Sequence[tuple[Pairs, Pairs]]) -> str | None:
    """Say how many training and validation pairs each bucket has, or None if there is only one bucket."""
    if len(buckets) < 2:
        return None
    each = (f"{len(train):,} and {len(validation):,} pairs of up to {max(train.lengths)} tokens" for train, validation in buckets)
    return f"buckets for training and validation: {', '.join(each)}"


def load_tokenizer(folder: str) -> tokenizers.Tokenizer:
    """Load the tokenizer of both languages.

    Raises:
        InputError: it is missing, or has no token that ends a text.
    """
    tokenizer = tokenizers.load(expanded(folder, FOLDER) / tokenizers.FILE, FOLDER)
    if tokenizer.end is None:
        raise InputError(f"{tokenizer.where}: expected a token that ends a text, such as <|endoftext|>, found none; add one")
    return tokenizer


def _pairs(
    folder: str, lengths: tuple[int, int], unusable: Unusable, tokenizer: tokenizers.Tokenizer, part: str
) -> tuple[Pairs, str | None]:
    """Read the pairs of one part, and say what was dropped."""
    names = f"{part}.source", f"{part}.target"
    texts = [lines_of(folder, name) for name in names]
    if len(texts[0]) != len(texts[1]):
        fewer = names[len(texts[0]) > len(texts[1])]
        raise InputError(
            f"{FOLDER}: expected as many lines in '{names[0]}' as in '{names[1]}', found {len(texts[0]):,} and {len(texts[1]):,}; "
            f"is '{fewer}' truncated?"
        )
    tokens = [[each.astype(np.int32) for each in tokenizer.encoded(lines)] for lines in texts]
    sizes = [np.asarray([each.size for each in sentences], np.int64) for sentences in tokens]
    used, remark = usable(sizes, lengths, names, unusable)
    sources, targets = ([sentences[i] for i in used] for sentences in tokens)
    assert tokenizer.end is not None
    return Pairs(sources, targets, lengths, tokenizer.end), remark
