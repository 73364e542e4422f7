"""The first and the last layer of BERT, in Flax NNX. The blocks of BERT are in `jpipe_lm.models.transformer`.

Reference: Devlin et al. 2018, "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding".

The letters in the shapes: b rows, s positions, w width, v symbols.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import transformer
from jpipe_lm.models.experts.activations import activated
from jpipe_lm.models.metadata import named
from jpipe_lm.models.transformer import Stream


class Embed(nnx.Module):
    """Adds the embeddings of the symbol, the position and the sentence type (0 or 1) of each token, and normalizes the sum."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(transformer.STD)
        self.token = transformer.table(config.vocab_size, config, init, rngs, "vocab")
        position = partial(transformer.waves, transformer.STD) if config.init == "scaled" else init
        self.position = transformer.table(config.max_positions_used, config, position, rngs)
        self.type = transformer.table(2, config, init, rngs)
        self.norm = transformer.norm(config, rngs)
        self.dropout = transformer.dropout(config, rngs)

    def __call__(self, inputs: Any) -> Stream:
        tokens, segments = transformer.split_inputs(inputs, self.config)
        types = transformer.in_rows(inputs["types"]) if isinstance(inputs, dict) and "types" in inputs else jnp.zeros_like(tokens)
        numbered = (self.token, tokens), (self.position, transformer.positions(tokens, segments)), (self.type, types)
        token, position, of_type = (transformer.look_up(table, numbers, transformer.dtype_of(self.config)) for table, numbers in numbered)
        return transformer.joined(self.dropout(transformer.normed(self.norm, token + position + of_type)), segments)


class Head(nnx.Module):
    """Computes {"tokens": logits of the symbol at each position, "next": logits of whether the second sentence follows the first}.

    "next" has two logits for each row, computed from the first position of the row. With a `chunk`, the loss computes the logits of the
    symbols, for that many positions at a time.
    """

    def __init__(self, config: ModelConfig, chunk: int | None, *, rngs: nnx.Rngs):
        self.dtype, self.chunk, self.activation = transformer.dtype_of(config), chunk, config.activation
        linear = transformer.linear(config, rngs, True)
        names = transformer.axes("embed", None)
        self.pooler = linear(config.width, config.width, **names)
        self.next_sentence = linear(config.width, 2, **names)
        self.transform = linear(config.width, config.width, **names)
        self.norm = transformer.norm(config, rngs)
        self.token = transformer.tied_embedding(config, rngs)
        self.logits = _Bias(config.vocab_size)

    def __call__(self, stream: Stream) -> dict[str, Any]:
        x, _ = transformer.split_stream(stream)
        following = self.next_sentence(jnp.tanh(self.pooler(x[:, 0])))
        hidden = transformer.normed(self.norm, activated(self.activation, self.transform(x)))
        kernel, bias = self.token.embedding[...], self.logits.bias[...]
        return {"tokens": transformer.projected(hidden, kernel, bias, True, self.chunk, self.dtype), "next": following}


class _Bias(nnx.Module):
    """A bias for the logit of each symbol."""

    def __init__(self, size: int):
        self.bias = nnx.Param(jnp.zeros(size, jnp.float32), **named("vocab"))
