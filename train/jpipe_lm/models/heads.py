"""The last layer of a model that judges whole texts: it scores classes, predicts a number, or scores several choices.

Letters in shapes: b examples, k choices of each, s positions, w width.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import transformer
from jpipe_lm.models.transformer import Stream


class Head(nnx.Module):
    """Scores of each example, computed from one position of a row: the first for BERT, the last without padding for a decoder.

    Outputs are logits (b, classes) for `classification`, numbers (b) for `regression`, and logits (b, k) for `multiple_choice`, one from
    the row of each choice. BERT's position goes through its pooler and dropout, a decoder's through the last norm. With experts they are
    `{"tokens": scores, "experts": routing}`, like a language model's.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        is_bert = config.kind == "bert"
        outputs = config.label_count or 1 if config.head == "classification" else 1
        if is_bert:
            self.pooler = transformer.linear(config, rngs, True)(config.width, config.width, **transformer.axes("embed", None))
            self.dropout = transformer.dropout(config, rngs)
        else:
            self.norm = transformer.norm(config, rngs)
        init, names = nnx.initializers.normal(transformer.STD), transformer.axes("embed", None)
        dtype = jnp.dtype(transformer.dtype_of(config))
        self.score = nnx.Linear(config.width, outputs, use_bias=is_bert, dtype=dtype, kernel_init=init, rngs=rngs, **names)

    def __call__(self, stream: Stream) -> Any:
        x, segments = transformer.split_stream(stream)
        if self.config.kind == "bert":
            chosen = self.dropout(jnp.tanh(self.pooler(x[:, 0])))
        else:
            chosen = transformer.normed(self.norm, last(x, segments))
        scores, routing = self._in_shape(self.score(chosen)), transformer.routing_of(stream)
        return scores if routing is None else {"tokens": scores, "experts": routing}

    def _in_shape(self, scores: Float[Array, "r n"]) -> Float[Array, "*scores"]:
        if self.config.head == "classification":
            return scores
        return scores[:, 0] if self.config.head == "regression" else scores.reshape(-1, self.config.label_count or 1)


def last(x: Float[Array, "r s w"], segments: Int[Array, "r s"] | None) -> Float[Array, "r w"]:
    """Return the values at the last position of each row that is not padding, or at the first if all are padding."""
    if segments is None:
        return x[:, -1]
    at = jnp.max(jnp.where(segments > 0, jnp.arange(x.shape[1], dtype=jnp.int32)[None], 0), axis=1)
    return jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
