"""AWD-LM, a language model of LSTMs with strong dropout that carries their state from batch to batch, in Flax Linen.

References: Merity et al. 2017, "Regularizing and Optimizing LSTM Language Models"; Gal and Ghahramani 2016, "A Theoretically Grounded
Application of Dropout in Recurrent Neural Networks". The penalties on activations (AR, TAR), the averaged SGD and the drawn lengths of the
first are left out.

Row i of microbatch j continues where row i of microbatch j of the batch before ended. So each layer keeps one state for each microbatch
of a batch, as layer state, and uses them in turn. Gradients end at the beginning of a row (truncated backpropagation through time). In
evaluation each row begins with zeros, and in training too if `carries` is false.

The letters in the shapes: b rows, s positions, w width, h hidden width, v words.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Float

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
from examples.papers.models.recurrent import LSTM, Embedding

Stream = dict[str, Any]
"""What flows between layers: {"x" (b, s, w or h), "continues" (b), 0 where a row begins anew}."""


def awd_lm(
    batch_size: int,
    vocab_size: int = 10000,
    depth: int = 6,
    width: int = 400,
    hidden: int = 1600,
    *,
    tied: bool = True,
    dropout_words: float = 0.1,
    dropout_input: float = 0.4,
    dropout_hidden: float = 0.3,
    dropout_output: float = 0.4,
    dropout_weights: float = 0.5,
    carries: bool = True,
) -> jpipe.LayerStack:
    """Return the layers `embed`, `lstm_0` …, `head`. Nothing is allocated here.

    Inputs are {"tokens": words (b, s), "continues": (b) 1 where the row continues from the batch before, otherwise 0}; outputs are the
    logits (b, s, v) of the next words.

    Args:
        batch_size: rows of a batch, all its microbatches together; jpipe gives it.
        vocab_size: v.
        depth: LSTM layers.
        width: w, of the embeddings, and of the last LSTM if they are tied.
        hidden: h, of the other LSTMs.
        tied: logits are made with the embeddings of the words.
        dropout_words: the share of whole words that is dropped among the embeddings.
        dropout_input: of the embedded words. This dropout and the next two drop the same numbers at all positions of a row.
        dropout_hidden: between LSTMs.
        dropout_output: after the last LSTM.
        dropout_weights: of the weights from hidden state to hidden state.
        carries: each row continues from the state in which that row of the batch before ended; otherwise rows begin with zeros, and stages
            may have replicas.

    Raises:
        InputError: an argument is out of range.
    """
    check_integers(MODEL, 2, MOST_SYMBOLS, vocab_size=vocab_size)
    check_integers(MODEL, 1, MOST_WIDTH, width=width, hidden=hidden)
    check_integers(MODEL, 1, MOST_LAYERS, depth=depth)
    check_fractions(MODEL, dropout_words=dropout_words, dropout_input=dropout_input, dropout_hidden=dropout_hidden)
    check_fractions(MODEL, dropout_output=dropout_output, dropout_weights=dropout_weights)
    check_choice(MODEL, (True, False), tied=tied, carries=carries)
    sizes = [hidden] * (depth - 1) + [width if tied else hidden]
    dropped = [dropout_hidden] * (depth - 1) + [dropout_output]
    recurrent = {
        f"lstm_{i}": DroppedLSTM(size, dropout, dropout_weights, batch_size if carries else None)
        for i, (size, dropout) in enumerate(zip(sizes, dropped, strict=True))
    }
    return jpipe.LayerStack(
        {"embed": Embed(vocab_size, width, dropout_words, dropout_input), **recurrent, "head": Head(vocab_size, tied)},
        [jpipe.Tie(("embed", "words/embedding"), ("head", "embedding"))] if tied else (),
        carries_rows=carries,
    )


class Embed(linen.Module):
    """Embed words, dropping some words entirely, and some components at all positions of a row."""

    vocab_size: int
    width: int
    dropout_words: float
    dropout_input: float

    @linen.compact
    def __call__(self, inputs: dict[str, Any], train: bool = False) -> Stream:
        check_fields("awd_lm", "examples.papers.data.words:load", inputs, "tokens", "continues")
        x = Embedding(self.vocab_size, self.width, self.width**-0.5, self.dropout_words, name="words")(inputs["tokens"], train=train)
        return {"x": variational(self.dropout_input, train)(x), "continues": inputs["continues"]}


class DroppedLSTM(linen.Module):
    """An LSTM with dropout that continues from its state at the end of the same microbatch of the previous batch, or from zeros.

    Attributes:
        hidden: numbers of its state.
        dropout: of its output.
        dropout_weights: of its recurrent weights.
        batch_size: rows of a batch; divided by those of a microbatch it is the number of states that are kept. None: none is.
    """

    hidden: int
    dropout: float
    dropout_weights: float
    batch_size: int | None

    @linen.compact
    def __call__(self, stream: Stream, train: bool = False) -> Stream:
        x = stream["x"]
        lstm = LSTM(self.hidden, dropout_weights=self.dropout_weights, name="lstm")
        y = lstm(x, train=train)[1] if self.batch_size is None else self._going_on(lstm, x, stream["continues"], self.batch_size, train)
        return {**stream, "x": variational(self.dropout, train)(y)}

    def _going_on(self, lstm: LSTM, x: Any, continues: Any, batch_size: int, train: bool) -> Any:
        rows = x.shape[0]
        shape = max(batch_size // rows, 1), rows, self.hidden
        carries = [self.variable("carry", name, jnp.zeros, shape, x.dtype) for name in ("cell", "hidden")]
        turn = self.variable("carry", "turn", jnp.zeros, (), jnp.int32)
        carry = None
        if train:
            keep = (continues > 0)[:, None]
            states = (jax.lax.dynamic_index_in_dim(each.value, turn.value, keepdims=False) for each in carries)
            cell, hidden = (jax.lax.stop_gradient(jnp.where(keep, state, jnp.zeros_like(state))) for state in states)
            carry = cell, hidden
        after, y = lstm(x, None, carry, train=train)
        if train and not self.is_initializing():
            for each, state in zip(carries, after, strict=True):
                each.value = jax.lax.dynamic_update_index_in_dim(each.value, state, turn.value, 0)
            turn.value = (turn.value + 1) % shape[0]
        return y


class Head(linen.Module):
    """Project to logits, with the embeddings of the words if they are tied."""

    vocab_size: int
    tied: bool

    @linen.compact
    def __call__(self, stream: Stream) -> Float[Array, "b s v"]:
        x = stream["x"]
        name, shape = ("embedding", (self.vocab_size, x.shape[-1])) if self.tied else ("kernel", (x.shape[-1], self.vocab_size))
        init = linen.initializers
        weights = self.param(name, init.zeros if self.tied else init.lecun_normal(), shape)  # shared ones begin as in the first layer
        bias = self.param("bias", init.zeros, (self.vocab_size,))
        return x @ (weights.T if self.tied else weights) + bias[None, None]


def variational(rate: float, train: bool) -> linen.Dropout:
    """Return a dropout layer that drops the same components at all positions of a row."""
    return linen.Dropout(rate, broadcast_dims=(1,), deterministic=not train)
