"""Parallel text: pairs of lines of two aligned files, for GNMT. All rows have one shape, because a pipeline is compiled for one: each
sentence is padded to the length that it may have.
"""

from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Int32

from jpipe import InputError
from jpipe.files import expanded
from train.config.targets.sequence_config import TranslationData
from train.data import tokenizer as tokenizers
from train.data.data import Data
from train.data.targets.sentences import FOLDER, data_of, in_order, lines_of, shifted, shown, usable

Inputs = dict[str, Int32[np.ndarray, "..."]]


@dataclass(frozen=True)
class Pairs:
    """Row i: sentence i and its translation.

    Attributes:
        sources: tokens of each sentence, its end not included.
        targets: of its translation, likewise.
        lengths: of a row, of sources and of targets.
        end: the token that ends a sentence, and starts a translation.
    """

    sources: list[np.ndarray]
    targets: list[np.ndarray]
    lengths: tuple[int, int]
    end: int

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> tuple[Inputs, Int32[np.ndarray, " t"]]:
        target, labels = shifted(self.targets[index], self.end, self.lengths[1])
        return source_row(self.sources[index], self.end, self.lengths[0]) | {"target": target}, labels


def source_row(tokens: np.ndarray, end: int, length: int) -> Inputs:
    """A sentence with its end, and the length of both, padded."""
    row = np.full(length, end, np.int32)
    row[: tokens.size] = tokens
    return {"source": row, "source_length": np.asarray(tokens.size + 1, np.int32)}


def load(arguments: TranslationData, seed: int, batch_size: int) -> Data:
    """Read both parts of a folder.

    Args:
        arguments: the folder, and how long sentences may be.
        seed: of the order of the pairs.
        batch_size: rows of a batch.

    Raises:
        InputError: a file is missing or is no text, two of them have not the same number of lines, or pairs that cannot be used are
            refused; there is less than a batch for validation.
    """
    tokenizer = load_tokenizer(arguments)
    found = [_pairs(arguments, tokenizer, part) for part in ("train", "validation")]
    (train, said), (validation, also_said) = found
    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), _like(arguments, tokenizer))
    amount = f"{len(train):,} pairs of sentences for training, {len(validation):,} for validation"
    arrays = [np.concatenate(part) for pairs in (train, validation) for part in (pairs.sources, pairs.targets) if part]
    parts = in_order(train, seed, epochs=True), in_order(validation, 0, epochs=False)
    return data_of(parts, spec, batch_size, shown(arguments.folder), amount, arrays, tokenizer.vocab_size, (said, also_said))


def load_tokenizer(arguments: TranslationData) -> tokenizers.Tokenizer:
    """The tokenizer of both languages.

    Raises:
        InputError: it is missing, or has no token that ends a text.
    """
    tokenizer = tokenizers.load(expanded(arguments.folder, FOLDER) / tokenizers.FILE, FOLDER)
    if tokenizer.end is None:
        raise InputError(f"{tokenizer.where}: expected a token that ends a text, such as <|endoftext|>, found none; add one")
    return tokenizer


def _pairs(arguments: TranslationData, tokenizer: tokenizers.Tokenizer, part: str) -> tuple[Pairs, str | None]:
    names = f"{part}.source", f"{part}.target"
    texts = [lines_of(arguments.folder, name) for name in names]
    if len(texts[0]) != len(texts[1]):
        fewer = names[len(texts[0]) > len(texts[1])]
        raise InputError(
            f"{FOLDER}: expected as many lines in '{names[0]}' as in '{names[1]}', found {len(texts[0]):,} and {len(texts[1]):,}; "
            f"is '{fewer}' truncated?"
        )
    lengths = arguments.source_length, arguments.target_length
    tokens = [[each.astype(np.int32) for each in tokenizer.encoded(lines)] for lines in texts]
    sizes = [np.asarray([each.size for each in sentences], np.int64) for sentences in tokens]
    kept, remark = usable(sizes, lengths, names, arguments.unusable)
    sources, targets = ([sentences[i] for i in kept] for sentences in tokens)
    assert tokenizer.end is not None
    return Pairs(sources, targets, lengths, tokenizer.end), remark


def _like(arguments: TranslationData, tokenizer: tokenizers.Tokenizer) -> tuple[Inputs, Int32[np.ndarray, " t"]]:
    """A row."""
    nothing = np.zeros(0, np.int32)
    assert tokenizer.end is not None
    pairs = Pairs([nothing], [nothing], (arguments.source_length, arguments.target_length), tokenizer.end)
    return pairs[0]
