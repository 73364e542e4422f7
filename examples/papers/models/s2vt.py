"""S2VT, which describes a video in words with two stacked LSTMs, in Flax Linen.

Reference: Venugopalan et al. 2015, "Sequence to Sequence - Video to Text".

Both LSTMs first read the frames, then the words: the first one reads zeros at the positions of words, the second one
zeros in place of words at the positions of frames.

The letters in the shapes: b rows, n frames, s words, f features of a frame, w width, h hidden width, v words of the vocabulary.
"""

from typing import Any

import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

import jpipe
from examples.papers.arguments import MODEL, MOST_SYMBOLS, MOST_WIDTH, check_fields, check_fractions, check_integers
from examples.papers.models.recurrent import LSTM, Embedding

Stream = dict[str, Any]
"""What flows between layers: {"x", "tokens" (b, s)}, x (b, n, w) after `frames`, (b, n + s, h) after `lstm_0`; after `words` also "words",
(b, s, w); after `lstm_1` only (b, s, h)."""


def s2vt(vocab_size: int = 13010, width: int = 500, hidden: int = 1000, dropout: float = 0.5) -> jpipe.LayerStack:
    """Return the layers `frames`, `lstm_0`, `words`, `lstm_1`, `head`. Nothing is allocated here.

    Inputs are {"features": (b, n, f), zeros behind the last frame, "tokens": (b, s) the caption, from the token that starts it on}; outputs
    are the logits (b, s, v) of the caption shifted by one.

    Args:
        vocab_size: v.
        width: w, of embedded frames and words.
        hidden: h, of both LSTMs.
        dropout: of embedded frames and words, and of the outputs of the second LSTM.

    Raises:
        InputError: an argument is out of range.
    """
    check_integers(MODEL, 2, MOST_SYMBOLS, vocab_size=vocab_size)
    check_integers(MODEL, 1, MOST_WIDTH, width=width, hidden=hidden)
    check_fractions(MODEL, dropout=dropout)
    return jpipe.LayerStack(
        {
            "frames": Frames(width, dropout),
            "lstm_0": FrameLSTM(hidden),
            "words": Words(vocab_size, width, dropout),
            "lstm_1": WordLSTM(hidden, dropout),
            "head": linen.Dense(vocab_size),
        }
    )


class Frames(linen.Module):
    """Project the features of each frame to a smaller vector."""

    width: int
    dropout: float

    @linen.compact
    def __call__(self, inputs: dict[str, Any], train: bool = False) -> Stream:
        check_fields("s2vt", "examples.papers.data.captions:load", inputs, "features", "tokens")
        x = linen.Dense(self.width, name="embed")(inputs["features"])
        return {"x": linen.Dropout(self.dropout, deterministic=not train)(x), "tokens": inputs["tokens"]}


class FrameLSTM(linen.Module):
    """The first LSTM: over the frames, then over as many further positions as there are words."""

    hidden: int

    @linen.compact
    def __call__(self, stream: Stream) -> Stream:
        words = stream["tokens"].shape[1]
        _, y = LSTM(self.hidden, name="lstm")(jnp.pad(stream["x"], ((0, 0), (0, words), (0, 0))))
        return {**stream, "x": y}


class Words(linen.Module):
    """Embed the words."""

    vocab_size: int
    width: int
    dropout: float

    @linen.compact
    def __call__(self, stream: Stream, train: bool = False) -> Stream:
        words = Embedding(self.vocab_size, self.width, name="embedding")(stream["tokens"])
        return {"x": stream["x"], "words": linen.Dropout(self.dropout, deterministic=not train)(words)}


class WordLSTM(linen.Module):
    """The second LSTM: over the outputs of the first one, concatenated with the words; returns its outputs at the words."""

    hidden: int
    dropout: float

    @linen.compact
    def __call__(self, stream: Stream, train: bool = False) -> Float[Array, "b s h"]:
        words = stream["words"].shape[1]
        frames = stream["x"].shape[1] - words
        padded = jnp.pad(stream["words"], ((0, 0), (frames, 0), (0, 0)))
        _, y = LSTM(self.hidden, name="lstm")(jnp.concatenate([stream["x"], padded], axis=-1))
        dropped: Float[Array, "b s h"] = linen.Dropout(self.dropout, deterministic=not train)(y[:, frames:])
        return dropped
