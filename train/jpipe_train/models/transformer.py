"""The layers of a decoder: GPT-2, Llama, the GPT over bytes. The block is BERT's, too. Written in Flax NNX.

The letters in the shapes: b rows, s positions, w width, v symbols.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jpipe import InputError
from jpipe_train.config.model_config import ModelConfig
from jpipe_train.models.attention import attend, attend_so_far, positions_of, rotated
from jpipe_train.models.cross_entropy import Unprojected, wider

Stream = Any  # x, or {"x": x, "segments": segments}
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {"gelu": nnx.gelu, "gelu_exact": partial(nnx.gelu, approximate=False), "silu": nnx.silu}
STD = 0.02  # of weights as in GPT-2 and BERT


class Embed(nnx.Module):
    """Symbols to vectors: one vector a symbol, and with learned positions plus one a position."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        is_scaled = config.init == "scaled"
        # Of order one, as are the blocks' outputs: much smaller ones make gradients that a delayed update (2BW, PipeDream) overshoots with.
        # Where they also make the logits, these would be too large.
        size = 1.0 if is_scaled and not config.tied else STD
        token = nnx.initializers.normal(size)
        self.token = table(config.vocab_size, config, token, rngs, "vocab")
        if config.positions == "learned":
            position = partial(waves, size) if is_scaled else nnx.initializers.normal(STD)
            self.position = table(config.max_positions_used, config, position, rngs)
        self.dropout = dropout(config, rngs)

    def __call__(self, inputs: Any) -> Stream:
        tokens, segments = split_inputs(inputs, self.config)
        return joined(self.dropout(self.vectors(tokens, positions(tokens, segments))), segments)

    def vectors(self, tokens: Any, at: Int[Array, "#b s"]) -> Float[Array, "b s w"]:
        """Of tokens at these positions."""
        x = look_up(self.token, tokens, dtype_of(self.config))
        return x + look_up(self.position, at, x.dtype) if self.config.positions == "learned" else x


class Block(nnx.Module):
    """One transformer block: x + attention(norm(x)), then x + mlp(norm(x)); BERT's norms come after the sums instead."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, inner, size = config.width, config.mlp_width_used, config.head_size_used
        into = linear(config, rngs)
        # The two projections back into the residual stream start smaller, so that its variance does not grow with depth (GPT-2).
        scaled = nnx.initializers.variance_scaling(0.5 / config.depth, "fan_in", "normal")
        smaller = scaled if config.init == "scaled" else nnx.initializers.normal(STD / (2 * config.depth) ** 0.5)
        back = partial(into, kernel_init=smaller)
        self.attention_norm = norm(config, rngs)
        self.qkv = into(width, (config.heads + 2 * config.kv_heads_used) * size, **axes("embed", "heads"))
        self.project = back(config.heads * size, width, **axes("heads", "embed"))
        self.mlp_norm = norm(config, rngs)
        self.expand = into(width, inner, **axes("embed", "mlp"))
        if config.gated_mlp:
            self.gate = into(width, inner, **axes("embed", "mlp"))
        self.contract = back(inner, width, **axes("mlp", "embed"))
        self.dropout = dropout(config, rngs)

    def __call__(self, stream: Stream) -> Stream:
        x, segments = split_stream(stream)
        if self.config.kind == "bert":
            x = normed(self.attention_norm, x + self.dropout(self._attention(x, segments)))
            x = normed(self.mlp_norm, x + self.dropout(self._mlp(x)))
        else:
            x = x + self.dropout(self._attention(self.attention_norm(x), segments))
            x = x + self.dropout(self._mlp(self.mlp_norm(x)))
        return joined(x, segments)

    def following(
        self, x: Float[Array, "b s w"], keys: Float[Array, "b t k d"], values: Float[Array, "b t k d"], at: Int[Array, "b s"]
    ) -> tuple[Float[Array, "b s w"], Float[Array, "b t k d"], Float[Array, "b t k d"]]:
        """A decoder's block, of positions whose earlier ones are kept as keys and values: x, and both with those of these positions.

        Args:
            x: what flows into the block.
            keys: of all t positions a row may have; those behind `at` are not looked at.
            values: likewise.
            at: the positions of x, which rise in each row.
        """
        b, s, _ = x.shape
        rows = jnp.arange(b)[:, None]
        q, k, v = self._heads(self.attention_norm(x), at)
        keys, values = keys.at[rows, at].set(k, mode="drop"), values.at[rows, at].set(v, mode="drop")
        x = x + self.project(attend_so_far(q, keys, values, at).reshape(b, s, -1))
        return x + self._mlp(self.mlp_norm(x)), keys, values

    def _attention(self, x: Float[Array, "b s w"], segments: Int[Array, "b s"] | None) -> Float[Array, "b s w"]:
        b, s, _ = x.shape
        q, k, v = self._heads(x, positions(x, segments))
        return self.project(attend(q, k, v, segments, self.config).reshape(b, s, -1))

    def _heads(self, x: Float[Array, "b s w"], at: Int[Array, "#b s"]) -> Any:
        """Queries, keys and values (b, s, heads, numbers), turned by their positions with RoPE."""
        config = self.config
        heads, others = config.heads, config.kv_heads_used
        found = self.qkv(x).reshape(*x.shape[:2], heads + 2 * others, config.head_size_used)
        q, k, v = jnp.split(found, (heads, heads + others), axis=2)
        return (rotated(q, at, config), rotated(k, at, config), v) if config.positions == "rope" else (q, k, v)

    def _mlp(self, x: Float[Array, "b s w"]) -> Float[Array, "b s w"]:
        activation = ACTIVATIONS[self.config.activation]
        expanded = self.expand(x)
        return self.contract(activation(self.gate(x)) * expanded if self.config.gated_mlp else activation(expanded))


class Head(nnx.Module):
    """The last norm and the projection to logits, by the embeddings of the symbols if they are tied.

    With a `chunk` the projection is left to the loss, which makes logits of so many positions at a time.
    """

    def __init__(self, config: ModelConfig, chunk: int | None, *, rngs: nnx.Rngs):
        self.config, self.chunk = config, chunk
        self.norm = norm(config, rngs)
        if config.tied:
            self.token = tied_embedding(config, rngs)
        else:
            init, names = nnx.initializers.normal(STD), axes("embed", "vocab")
            self.logits = nnx.Linear(config.width, config.vocab_size, use_bias=False, kernel_init=init, rngs=rngs, **names)

    def __call__(self, stream: Stream) -> Any:
        x, _ = split_stream(stream)
        hidden = normed(self.norm, x)
        tied = self.config.tied
        kernel = self.token.embedding if tied else self.logits.kernel
        return projected(hidden, kernel[...], None, tied, self.chunk, dtype_of(self.config))


# Parts that BERT has, too -------------------------------------------------------------------------------------------------


def dtype_of(config: ModelConfig) -> str:
    """Of the activations between and inside of layers."""
    return config.compute_dtype


def named(*names: str | None) -> dict[str, Any]:
    """The metadata that gives a parameter a logical axis, or None, for each dim; whoever places it on a mesh reads them."""
    return {"out_sharding": names, "eager_sharding": False}  # the latter: Flax by itself would refuse to make it without a mesh


def axes(inputs: str | None, outputs: str | None) -> dict[str, Any]:
    """The arguments of a linear layer for the logical axes of its kernel, the latter of its bias, too."""
    return {"kernel_metadata": named(inputs, outputs), "bias_metadata": named(outputs)}


def table(count: int, config: ModelConfig, init: Any, rngs: nnx.Rngs, rows: str | None = None) -> nnx.Embed:
    """A vector of the width for each of so many numbers; `rows` is the logical axis of these."""
    return nnx.Embed(count, config.width, embedding_init=init, rngs=rngs, embedding_metadata=named(rows, "embed"))


def linear(config: ModelConfig, rngs: nnx.Rngs) -> Callable[..., nnx.Linear]:
    """What makes linear layers as the config says."""
    options: dict[str, Any] = {} if config.init == "scaled" else {"kernel_init": nnx.initializers.normal(STD)}
    return partial(nnx.Linear, use_bias=config.bias, dtype=jnp.dtype(dtype_of(config)), rngs=rngs, **options)


def norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    """A norm of the width, computed in float32 at least."""
    kind = nnx.LayerNorm if config.norm == "layer" else nnx.RMSNorm
    return kind(config.width, epsilon=config.norm_epsilon, dtype=wider(dtype_of(config)), rngs=rngs)


def dropout(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Dropout:
    """Draws nothing where there is none."""
    return nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)


def normed(layer: Callable[[Any], Any], x: Float[Array, "b s w"]) -> Float[Array, "b s w"]:
    """Normalized, in the dtype of the activations again."""
    return layer(x).astype(x.dtype)


def look_up(embedding: nnx.Embed, numbers: Any, dtype: Any) -> Float[Array, "b s w"]:
    """Rows of an embedding; only they are cast, and gradients for one symbol at several positions are summed before they are."""
    return jnp.take(embedding.embedding[...], numbers, axis=0).astype(dtype)


def tied_embedding(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Embed:
    """The place of the embeddings of the symbols in the head; what stands there at first is dropped."""
    return table(config.vocab_size, config, nnx.initializers.zeros, rngs, "vocab")


def projected(hidden: Any, kernel: Any, bias: Any, by_symbol: bool, chunk: int | None, dtype: str) -> Any:
    """Logits, or with a `chunk` what they are to be made of."""
    found = Unprojected(hidden, kernel, bias, chunk or 1, by_symbol, dtype)
    return found.logits() if chunk is None else found


def split_inputs(inputs: Any, config: ModelConfig) -> tuple[Any, Any]:
    """(tokens, segments or None) of inputs.

    Raises:
        InputError: a sequence that is longer than the positions.
    """
    tokens, segments = (inputs["tokens"], inputs.get("segments")) if isinstance(inputs, dict) else (inputs, None)
    if tokens.shape[1] > (longest := config.max_positions_used):
        raise InputError(
            f"model: expected sequences of at most {longest} positions, found {tokens.shape[1]}; make them shorter, or raise "
            "model.max_positions"
        )
    return tokens, segments


def split_stream(stream: Stream) -> tuple[Any, Any]:
    """(x, segments or None) of what flows between layers."""
    return (stream["x"], stream["segments"]) if isinstance(stream, dict) else (stream, None)


def joined(x: Float[Array, "b s w"], segments: Int[Array, "b s"] | None) -> Stream:
    """What flows to the next layer."""
    return x if segments is None else {"x": x, "segments": segments}


def positions(tokens: Any, segments: Int[Array, "b s"] | None) -> Int[Array, "#b s"]:
    """The position of each token, counted from 0 in its row, or in its segment."""
    return jnp.arange(tokens.shape[1])[None] if segments is None else positions_of(segments)


def waves(size: float, key: Array, shape: tuple[int, int], dtype: DTypeLike, out_sharding: object = None) -> Float[Array, "s w"]:
    """Positions start as sines and cosines (the transformer's first encoding), half as large as the vectors of symbols, whose deviation is
    `size`: "the byte before" is then soon learned. Larger ones would drown the symbols.
    """
    count, width = shape
    angles = np.arange(count)[:, None] / 10_000 ** (np.arange(0, width, 2)[None] / width)
    return jnp.asarray(0.5 * size * np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :width], dtype)
