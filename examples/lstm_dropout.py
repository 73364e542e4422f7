"""Train two LSTMs with dropout to write bytes of text, in Flax NNX.

With a config: `jpipe train examples/lstm_dropout.yaml --allow-code`. From Python, as in `main` below: `python examples/lstm_dropout.py`.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jpipe


class LSTM(nnx.Module):
    """An LSTM over the positions of a sequence, followed by dropout."""

    def __init__(self, inputs: int, width: int, dropout: float, *, rngs: nnx.Rngs):
        self.lstm = nnx.RNN(nnx.OptimizedLSTMCell(inputs, width, rngs=rngs), rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.lstm(x))


def model(width: int = 64, dropout: float = 0.1) -> jpipe.LayerStack:
    """Return a byte model as layers: bytes [b, s] in, logits of the next byte out, [b, s, 256]."""
    return jpipe.LayerStack(
        {
            "embed": lambda rngs: nnx.Embed(256, width, rngs=rngs),
            "lstm_0": lambda rngs: LSTM(width, width, dropout, rngs=rngs),
            "lstm_1": lambda rngs: LSTM(width, width, dropout, rngs=rngs),
            "logits": lambda rngs: nnx.Linear(width, 256, rngs=rngs),
        }
    )


def main(steps: int = 100) -> None:
    """Train without a config, on the text of this file."""
    stack = model()
    plan = jpipe.Plan.even(stack.ids, num_stages=4, schedule="gpipe", microbatches=4)

    def loss(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum(), jnp.asarray(labels.size)

    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8).astype(np.int32)[: 32 * 64 + 1]
    batch = text[:-1].reshape(32, 64), text[1:].reshape(32, 64)
    pipe = jpipe.Pipeline(stack, plan, loss, optax.adam(1e-2))
    state = pipe.init(jax.random.key(0), batch)
    for _ in range(steps):
        state, _ = pipe.step(state, batch)
    print("loss", float(pipe.evaluate(state, batch).loss), "nats per byte")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)  # a laptop has one; before JAX is used
    main()
