"""Layers that the recurrent models share: an LSTM over the positions of a row, and embeddings with dropout of whole rows.

Written in Flax Linen, whose modules learn the sizes of their inputs, and of the rows of a microbatch, when they are initialized.

The letters in the shapes: b rows, s positions, w width of the input, h hidden width, g = 4h gates, v symbols.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen
from jaxtyping import Array, Bool, Float, Int

Carry = tuple[Float[Array, "b h"], Float[Array, "b h"]]
"""(cell, hidden)."""


def lstm(
    x: Float[Array, "b s w"],
    kernel: Float[Array, "w g"],
    recurrent: Float[Array, "h g"],
    bias: Float[Array, " g"],
    mask: Bool[Array, "b s"] | None = None,
    carry: Carry | None = None,
    *,
    reverse: bool = False,
) -> tuple[Carry, Float[Array, "b s h"]]:
    """Run an LSTM over all positions.

    The gates are, in this order, input, forget, cell, output. All products with the input are one, before the loop.

    Reference: Hochreiter and Schmidhuber 1997, "Long Short-Term Memory", with the forget gate of Gers et al. 2000.

    Args:
        x: the input.
        kernel: from the input to the gates.
        recurrent: from the hidden state to the gates.
        bias: of the gates.
        mask: where there is something to read; elsewhere the state stays as it is.
        carry: the state to begin with; None: zeros.
        reverse: from the last position to the first.

    Returns:
        The last (cell, hidden), and the hidden state at each position.
    """
    zeros = jnp.zeros((x.shape[0], recurrent.shape[0]), x.dtype)
    gates = jnp.moveaxis(x @ kernel + bias[None, None], 1, 0)

    def step(before: Carry, now: Any) -> tuple[Carry, Float[Array, "b h"]]:
        (cell, hidden), (from_input, is_present) = before, now
        into, forget, new, out = jnp.split(from_input + hidden @ recurrent, 4, axis=-1)
        cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(out) * jnp.tanh(cell)
        if is_present is not None:
            cell, hidden = (jnp.where(is_present[:, None], *pair) for pair in ((cell, before[0]), (hidden, before[1])))
        return (cell, hidden), hidden

    after, y = jax.lax.scan(step, (zeros, zeros) if carry is None else carry, (gates, None if mask is None else mask.T), reverse=reverse)
    return after, jnp.moveaxis(y, 0, 1)


class LSTM(linen.Module):
    """An LSTM whose weights begin as in Flax: input weights normal of variance 1/w, recurrent weights orthogonal, biases zero.

    Attributes:
        hidden: numbers of its state.
        reverse: it reads from the last position to the first.
        dropout_weights: the share of the recurrent weights that is dropped in training, the same at all positions (Merity et al. 2017).
    """

    hidden: int
    reverse: bool = False
    dropout_weights: float = 0.0

    @linen.compact
    def __call__(
        self, x: Float[Array, "b s w"], mask: Bool[Array, "b s"] | None = None, carry: Carry | None = None, *, train: bool = False
    ) -> tuple[Carry, Float[Array, "b s h"]]:
        """Run the LSTM, see `lstm`."""
        init = linen.initializers
        kernel = self.param("kernel", init.lecun_normal(), (x.shape[-1], 4 * self.hidden))
        recurrent = self.param("recurrent", init.orthogonal(), (self.hidden, 4 * self.hidden))
        bias = self.param("bias", init.zeros, (4 * self.hidden,))
        recurrent = linen.Dropout(self.dropout_weights, deterministic=not train)(recurrent)
        return lstm(x, kernel, recurrent, bias, mask, carry, reverse=self.reverse)


class Embedding(linen.Module):
    """An embedding table, initialized with normal numbers.

    Attributes:
        vocab_size: symbols.
        width: numbers of a vector.
        std: of these numbers.
        dropout: the share of symbols whose vectors are zero in training, the same ones in all rows (Gal and Ghahramani 2016).
    """

    vocab_size: int
    width: int
    std: float = 1.0
    dropout: float = 0.0

    @linen.compact
    def __call__(self, tokens: Any, *, train: bool = False) -> Float[Array, "b s w"]:
        """Look up the vectors of tokens (b, s)."""
        table = self.param("embedding", linen.initializers.normal(self.std), (self.vocab_size, self.width))
        return jnp.take(linen.Dropout(self.dropout, broadcast_dims=(1,), deterministic=not train)(table), tokens, axis=0)


def below(length: Int[Array, " b"], positions: int) -> Bool[Array, "b s"]:
    """Return which positions of each row come before its length."""
    return jnp.arange(positions)[None] < length[:, None]
