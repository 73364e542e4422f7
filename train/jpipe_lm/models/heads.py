"""The last layer of a model that classifies whole texts, predicts a number for a text, or scores several choices.

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
    """Computes the scores of each example from one position of a row.

    For BERT this is the first position, after the pooler and dropout. For a decoder it is the last position that is not padding, after the
    last norm. The outputs are logits (b, classes) for `classification`, numbers (b) for `regression`, and logits (b, k) for
    `multiple_choice`, where each choice has its own row. With experts, the outputs are `{"tokens": scores, "experts": routing}`.
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
    """Return the values at the last position of each row that is not padding. A row of padding gives its first position."""
    if segments is None:
        return x[:, -1]
    at = jnp.max(jnp.where(segments > 0, jnp.arange(x.shape[1], dtype=jnp.int32)[None], 0), axis=1)
    return jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
