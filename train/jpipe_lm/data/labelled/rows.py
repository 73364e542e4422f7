"""Tokenized examples in memory. Each is a padded row of tokens, or one such row per choice for multiple choice."""

import hashlib
from dataclasses import dataclass

import jax
import numpy as np
from jaxtyping import Int64

from jpipe_train.data.rows import Tree


@dataclass(frozen=True)
class LabelledRows:
    """Examples with `choices` rows each, or one row if `choices` is None."""

    tokens: np.ndarray  # the tokens of all rows, one after the other
    types: np.ndarray  # for each token, the number of the text that it belongs to
    ends: Int64[np.ndarray, " rows"]  # for each row, the position after its last token
    labels: np.ndarray  # the labels of the examples, integers or floats
    seq_len: int  # the number of positions in a row
    choices: int | None  # the number of rows in an example; None for one row without a dimension for choices
    padding: int  # the token that fills rows
    has_types: bool  # whether the model needs token types

    def __len__(self) -> int:
        return int(self.labels.size)

    def __getitem__(self, index: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        rows = self.choices or 1
        arrays = {name: np.full((rows, self.seq_len), fill, np.int32) for name, fill in self._fills.items()}
        for place, row in enumerate(range(index * rows, (index + 1) * rows)):
            start, end = int(self.ends[row - 1]) if row else 0, int(self.ends[row])
            arrays["tokens"][place, : end - start] = self.tokens[start:end]
            arrays["segments"][place, : end - start] = 1
            if self.has_types:
                arrays["types"][place, : end - start] = self.types[start:end]
        return {name: array if self.choices else array[0] for name, array in arrays.items()}, np.asarray(self.labels[index])

    @property
    def spec(self) -> tuple[Tree, Tree]:
        """The shapes and dtypes of an example."""
        shape = (self.seq_len,) if self.choices is None else (self.choices, self.seq_len)
        array = jax.ShapeDtypeStruct(shape, np.dtype(np.int32))
        return dict.fromkeys(self._fills, array), jax.ShapeDtypeStruct((), self.labels.dtype)

    def digest(self) -> str:
        """Return a hash of all examples."""
        hasher = hashlib.sha256(f"{self.seq_len} {self.choices} {self.padding}".encode())
        for array in (self.tokens, self.types, self.ends, self.labels):
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()

    @property
    def _fills(self) -> dict[str, int]:
        fills = {"segments": 0, "tokens": self.padding}
        return fills | {"types": 0} if self.has_types else fills
