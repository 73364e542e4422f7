"""GNMT, a translator of LSTMs with attention, in Flax Linen.

References: Wu et al. 2016, "Google's Neural Machine Translation System"; Bahdanau et al. 2015, "Neural Machine Translation by Jointly
Learning to Align and Translate", for the attention, normalized as in Salimans and Kingma 2016, "Weight Normalization".

The encoder reads the source, its first layer in both directions. The decoder's first layer attends to the outputs of the encoder at all
positions, and the result flows into each decoder layer. Layers whose input is as wide as their output add it (residual).

The letters in the shapes: b rows, s positions of the source, t of the target, w width, v symbols.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Bool, Float

import jpipe
from examples.papers.arguments import (
    MODEL,
    MOST_LAYERS,
    MOST_SYMBOLS,
    MOST_WIDTH,
    check_choice,
    check_fields,
    check_fractions,
    check_integers,
)
from examples.papers.models.recurrent import LSTM, Embedding, below

Stream = dict[str, Any]
"""What flows between layers: first {"x" (b, s, w) the source, "length" (b) its tokens, "target" (b, t) tokens}, from `decoder_embed` on
{"context" (b, s, w), "length", "x" (b, t, w)}, from `decoder_0` on {"x", "attention" (b, t, w)}."""


def gnmt(
    vocab_size: int = 32320, depth: int = 8, width: int = 1024, dropout: float = 0.2, share_embeddings: bool = False
) -> jpipe.LayerStack:
    """Return the layers `embed`, `encoder_0` …, `decoder_embed`, `decoder_0` …, `head`. Nothing is allocated here.

    Inputs are {"source": tokens (b, s), "source_length": (b), "target": tokens (b, t)}, where the target begins with the token that starts
    a sentence; outputs are the logits (b, t, v) of the target shifted by one.

    Args:
        vocab_size: v, symbols of both languages together.
        depth: LSTM layers, an even number: half of them are in the encoder.
        width: w, of the embeddings and of each LSTM.
        dropout: of the inputs of each LSTM but the first of encoder and decoder.
        share_embeddings: both languages have the same vectors.

    Raises:
        InputError: an argument is out of range; the depth is odd, or less than 4.
    """
    check_integers(MODEL, 2, MOST_SYMBOLS, vocab_size=vocab_size)
    check_integers(MODEL, 1, MOST_WIDTH, width=width)
    check_integers(MODEL, 1, MOST_LAYERS, depth=depth)
    check_fractions(MODEL, dropout=dropout)
    check_choice(MODEL, (True, False), share_embeddings=share_embeddings)
    if depth < 4 or depth % 2:
        raise jpipe.InputError(f"model.arguments.depth: expected an even number from 4 on, half of it for the encoder, found {depth}")
    half = depth // 2
    encoder = {f"encoder_{i}": Encoder(width, dropout, first=i == 0) for i in range(half)}
    decoder = {f"decoder_{i}": Decoder(width, dropout, residual=i > 1) for i in range(1, half)}
    tie = jpipe.Tie(("embed", "embedding/embedding"), ("decoder_embed", "embedding/embedding"))
    return jpipe.LayerStack(
        {
            "embed": EmbedSource(vocab_size, width),
            **encoder,
            "decoder_embed": EmbedTarget(vocab_size, width),
            "decoder_0": AttendingDecoder(width),
            **decoder,
            "head": Head(vocab_size),
        },
        [tie] if share_embeddings else (),
    )


class EmbedSource(linen.Module):
    """Embed the source, and pass the target on."""

    vocab_size: int
    width: int

    @linen.compact
    def __call__(self, inputs: dict[str, Any]) -> Stream:
        check_fields("gnmt", "examples.papers.data.translation:load", inputs, "source", "source_length", "target")
        x = Embedding(self.vocab_size, self.width, name="embedding")(inputs["source"])
        return {"x": x, "length": inputs["source_length"], "target": inputs["target"]}


class Encoder(linen.Module):
    """One layer of the encoder: the first reads in both directions, and layers from the third on add their input."""

    width: int
    dropout: float
    first: bool

    @linen.compact
    def __call__(self, stream: Stream, train: bool = False) -> Stream:
        x, mask = stream["x"], below(stream["length"], stream["x"].shape[1])
        if self.first:
            _, forward = LSTM(self.width, name="forward")(x, mask)
            _, backward = LSTM(self.width, reverse=True, name="backward")(x, mask)
            return {**stream, "x": jnp.concatenate([forward, backward], axis=-1)}
        _, y = LSTM(self.width, name="lstm")(linen.Dropout(self.dropout, deterministic=not train)(x), mask)
        return {**stream, "x": x + y if x.shape == y.shape else y}


class EmbedTarget(linen.Module):
    """Embed the target, and pass the output of the encoder on as its context."""

    vocab_size: int
    width: int

    @linen.compact
    def __call__(self, stream: Stream) -> Stream:
        x = Embedding(self.vocab_size, self.width, name="embedding")(stream["target"])
        return {"x": x, "context": stream["x"], "length": stream["length"]}


class AttendingDecoder(linen.Module):
    """The first layer of the decoder: an LSTM, and attention from its state at each position to the context."""

    width: int

    @linen.compact
    def __call__(self, stream: Stream) -> Stream:
        _, y = LSTM(self.width, name="lstm")(stream["x"])
        context = stream["context"]
        attention = Attention(self.width, name="attention")(y, context, below(stream["length"], context.shape[1]))
        return {"x": y, "attention": attention}


class Attention(linen.Module):
    """Bahdanau's attention, normalized: the score of a query q and a key k is g · v/‖v‖ · tanh(q Wq + k Wk + b)."""

    width: int

    @linen.compact
    def __call__(self, queries: Float[Array, "b t w"], keys: Float[Array, "b s w"], mask: Bool[Array, "b s"]) -> Float[Array, "b t w"]:
        init = linen.initializers
        q, k = (linen.Dense(self.width, use_bias=False, name=name)(x) for name, x in (("query", queries), ("key", keys)))
        v = self.param("v", init.normal(1.0), (self.width,))
        g = self.param("g", init.ones, ())
        bias = self.param("bias", init.zeros, (self.width,))
        scores = jnp.tanh(q[:, :, None] + k[:, None] + bias[None, None, None]) @ (v * (g / jnp.linalg.norm(v)))
        return jax.nn.softmax(jnp.where(mask[:, None], scores, jnp.finfo(scores.dtype).min), axis=-1) @ keys


class Decoder(linen.Module):
    """A further layer of the decoder, whose input is joined with the attention; layers from the third on add their input."""

    width: int
    dropout: float
    residual: bool

    @linen.compact
    def __call__(self, stream: Stream, train: bool = False) -> Stream:
        x, attention = stream["x"], stream["attention"]
        dropped = linen.Dropout(self.dropout, deterministic=not train)(x)
        _, y = LSTM(self.width, name="lstm")(jnp.concatenate([dropped, attention], axis=-1))
        return {"x": x + y if self.residual else y, "attention": attention}


class Head(linen.Module):
    """Project to logits."""

    vocab_size: int

    @linen.compact
    def __call__(self, stream: Stream) -> Float[Array, "b t v"]:
        logits: Float[Array, "b t v"] = linen.Dense(self.vocab_size, name="logits")(stream["x"])
        return logits
