"""The layers of the built-in decoders, such as GPT-2, Llama and Gemma, in Flax NNX. BERT uses the same block.

Letters in shapes: b rows, s positions, w width, v symbols.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jpipe import InputError
from jpipe.context import traced_positions
from jpipe_lm.config.model_config import ModelConfig, has_bias
from jpipe_lm.models.attention import attend, attend_after, attend_cached, cached_positions
from jpipe_lm.models.experts import Experts, Routing, no_routing
from jpipe_lm.models.experts.activations import activated
from jpipe_lm.models.float8 import float8_product
from jpipe_lm.models.metadata import named
from jpipe_lm.models.mixers import GatedDelta, Latents, carry_of
from jpipe_lm.models.rope import Ended, lengths_of, positions_of, rotated
from jpipe_train.losses.cross_entropy import Unprojected, wider

Stream = Any  # x, or {"x": x, "segments": segments, "experts": Routing}, without segments or experts if there are none
STD = 0.02  # the standard deviation of initial weights in GPT-2 and BERT


class Embed(nnx.Module):
    """Embeds symbols. Learned position embeddings are added, if the model has them."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        is_scaled = config.init == "scaled"
        # Of order one, like the blocks' outputs: much smaller embeddings have gradients with which delayed updates (2BW, PipeDream)
        # overshoot. Tied embeddings are smaller, because otherwise the logits would be too large.
        size = 1.0 if is_scaled and not config.tied else STD
        token = nnx.initializers.normal(size)
        self.token = table(config.vocab_size, config, token, rngs, "vocab")
        if config.positions == "learned":
            position = partial(waves, size) if is_scaled else nnx.initializers.normal(STD)
            self.position = table(config.max_positions_used, config, position, rngs)
        self.dropout = dropout(config, rngs)

    def __call__(self, inputs: Any) -> Stream:
        return self.carried(inputs, None)[0]

    def carried(self, inputs: Any, before: Ended | None) -> tuple[Stream, Ended | None]:
        """Embed a slice of the rows, given where the segments of the slice before have ended (`jpipe.Layer.carried`)."""
        tokens, segments = split_inputs(inputs, self.config)
        at = positions(tokens, segments, before)
        x = self.dropout(self.vectors(tokens, at))
        ended = None if segments is None else (segments[:, -1:], at[:, -1:])
        if self.config.experts is None:
            return joined(x, segments), ended
        with_experts = sum(block.experts is not None for block in self.config.blocks)
        return joined(x, segments, no_routing(self.config.experts, len(tokens), with_experts, wider(x.dtype))), ended

    def vectors(self, tokens: Any, at: Int[Array, "#b s"]) -> Float[Array, "b s w"]:
        """Embed tokens at these positions."""
        x = look_up(self.token, tokens, dtype_of(self.config))
        x = x * jnp.asarray(self.config.width**0.5, x.dtype) if self.config.embed_scale else x
        return x + look_up(self.position, at, x.dtype) if self.config.positions == "learned" else x


class Block(nnx.Module):
    """One transformer block: x + attention(norm(x)), then x + mlp(norm(x)). In BERT the norms are applied after the sums instead.

    Args:
        config: the config of the block, an element of `ModelConfig.blocks`.
        rngs: initializes the parameters.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, inner, size = config.width, config.mlp_width_used, config.head_size_used
        into = linear(config, rngs, has_bias(config.bias, "mlp"))
        if config.products == "float8":
            into = partial(into, dot_general=float8_product)
        # The two projections into the residual stream have smaller initial values, so that its variance does not grow with depth (GPT-2).
        scaled = nnx.initializers.variance_scaling(0.5 / config.depth, "fan_in", "normal")
        smaller = scaled if config.init == "scaled" else nnx.initializers.normal(STD / (2 * config.depth) ** 0.5)
        back = partial(into, kernel_init=smaller)
        without_bias = partial(into, use_bias=False), partial(back, use_bias=False)
        self.attention_norm = norm(config, rngs)
        if config.delta is not None:
            self.delta = GatedDelta(config, *without_bias, rngs=rngs)
        elif config.latent is not None:
            self.latents = Latents(config, without_bias[0], rngs=rngs)
        else:
            self.qkv = into(width, sum(config.qkv_sizes), use_bias=has_bias(config.bias, "qkv"), **axes("embed", "heads"))
        if config.qk_norm not in (None, "after_rope") and config.delta is None:
            for_all = config.qk_norm == "all"
            self.query_norm = norm(config, rngs, size * config.heads if for_all else size)
            self.key_norm = norm(config, rngs, size * config.kv_heads_used if for_all else size)
        if config.sinks:
            self.sinks = nnx.Param(jnp.zeros(config.heads), **named("heads"))
        if config.delta is None:
            outputs = config.heads * config.value_size
            self.project = back(outputs, width, use_bias=has_bias(config.bias, "project"), **axes("heads", "embed"))
        self.mlp_norm = norm(config, rngs)
        if config.experts is None:
            self.expand = into(width, inner, **axes("embed", "mlp"))
            if config.gated_mlp:
                self.gate = into(width, inner, **axes("embed", "mlp"))
            self.contract = back(inner, width, **axes("mlp", "embed"))
        else:
            self.experts = Experts(config.experts, config, *without_bias, rngs=rngs)
        if config.post_norms:
            self.attention_post_norm, self.mlp_post_norm = norm(config, rngs), norm(config, rngs)
        if config.layer_scale:
            self.scale = nnx.Param(jnp.ones(1), **named(None))
        self.dropout = dropout(config, rngs)

    def __call__(self, stream: Stream) -> Stream:
        x, segments = split_stream(stream)
        if self.config.kind == "bert":
            x = normed(self.attention_norm, x + self.dropout(self._attention(x, segments)))
            return joined(normed(self.mlp_norm, x + self.dropout(self._mlp(x)[0])), segments)
        x = self._plus_attention(x, self._attention(self.attention_norm(x), segments))
        x, routing = self._plus_mlp(x, segments, routing_of(stream))
        return joined(x, segments, routing)

    def carried(self, stream: Stream, carry: tuple[Any, ...] | None) -> tuple[Stream, tuple[Any, ...]]:
        """Apply a decoder's block to a slice of the rows, given the carries of the slices before (`jpipe.Layer.carried`), if any.

        These have keys and values, and with several documents in a row their segments and positions; or the last state of a gated delta
        rule. Raise InputError if rows of this kind of model cannot be cut into slices.
        """
        x, segments = split_stream(stream)
        self._check_slices(segments)
        if self.config.delta is not None:
            mixed, carry = self.delta(self.attention_norm(x), segments, carry)
            x, routing = self._plus_mlp(self._plus_attention(x, mixed), segments, routing_of(stream))
            return joined(x, segments, routing), carry
        before = (carry[-1][3][:, -1:], carry[-1][4][:, -1:]) if carry and segments is not None else None
        at = positions(x, segments, before)
        q, k, v, gate = self._heads(self.attention_norm(x), at, jnp.full((1, 1), row_length(x.shape[1]), jnp.int32))
        parts = self._parts(segments, at)
        entry = (k, v) if parts is None else (k, v, jnp.broadcast_to(parts, x.shape[:2]))
        carry = *(carry or ()), (entry if segments is None else (*entry, segments, at))
        x = self._plus_attention(x, self._projected(attend_after(q, carry, self.config), gate))
        x, routing = self._plus_mlp(x, segments, routing_of(stream))
        return joined(x, segments, routing), carry

    def _check_slices(self, segments: Int[Array, "b s"] | None) -> None:
        """Check that the block can compute rows slice by slice."""
        experts, scaling = self.config.experts, self.config.rope_scaling
        found = ""
        if self.config.kind == "bert":
            found = "BERT, where positions attend to later ones"
        elif experts is not None and max(experts.balance_loss, experts.z_loss) > 0:
            found = (
                f"experts with balance_loss {experts.balance_loss:g} and z_loss {experts.z_loss:g}, which count the tokens of whole rows"
            )
        elif segments is not None and scaling is not None and scaling.kind == "longrope":
            found = "longrope with several documents in a row: it depends on the length of a document, which may end in a later slice"
        if found:
            expected, change = "a model that computes rows slice by slice", "set balance_loss and z_loss to 0, or " if experts else ""
            raise InputError(where="plan", key="slices", expected=expected, found=found, change=f"{change}remove slices")

    def following(
        self, x: Float[Array, "b s w"], cache: tuple[Any, ...], at: Int[Array, "b s"], lengths: Int[Array, " b"]
    ) -> tuple[Float[Array, "b s w"], tuple[Any, ...]]:
        """Apply a decoder's block to further positions `at`, consecutive in each row, and add them to the cache, which `new_cache` begins.

        `lengths` has the number of known positions of each row, with the further ones. Return the output and the new cache.
        """
        if self.config.delta is not None:
            counts = jnp.clip(lengths - at[:, 0], 0, at.shape[1])
            mixed, cache = self.delta(self.attention_norm(x), None, cache, counts)
            return self._plus_mlp(self._plus_attention(x, mixed))[0], cache
        q, k, v, gate = self._heads(self.attention_norm(x), at, lengths[:, None])
        attention, cache = attend_cached(q, k, v, cache, at, lengths, self.config)
        x = self._plus_attention(x, self._projected(attention, gate))
        return self._plus_mlp(x)[0], cache

    def _plus_attention(self, x: Float[Array, "b s w"], attention: Float[Array, "b s w"]) -> Float[Array, "b s w"]:
        """Add the output of attention to the residual stream."""
        return x + self.dropout(normed(self.attention_post_norm, attention) if self.config.post_norms else attention)

    def _plus_mlp(
        self, x: Float[Array, "b s w"], segments: Int[Array, "b s"] | None = None, routing: Routing | None = None
    ) -> tuple[Float[Array, "b s w"], Routing | None]:
        """Add the output of the MLP to the residual stream. Return the sum, and the routers' choices so far."""
        out, routing = self._mlp(self.mlp_norm(x), segments, routing)
        x = x + self.dropout(normed(self.mlp_post_norm, out) if self.config.post_norms else out)
        return x * jax.lax.stop_gradient(self.scale[...]).astype(x.dtype)[None, None] if self.config.layer_scale else x, routing

    def _attention(self, x: Float[Array, "b s w"], segments: Int[Array, "b s"] | None) -> Float[Array, "b s w"]:
        if self.config.delta is not None:
            return self.delta(x, segments, None)[0]
        lengths = jnp.full((1, 1), x.shape[1], jnp.int32) if segments is None else lengths_of(segments)
        at = positions(x, segments)
        q, k, v, gate = self._heads(x, at, lengths)
        parts = self._parts(segments, at)
        parts = parts if parts is None else jnp.broadcast_to(parts, x.shape[:2])
        return self._projected(attend(q, k, v, parts, self.config), gate)

    def _parts(self, segments: Int[Array, "b s"] | None, at: Int[Array, "#b s"]) -> Int[Array, "#b s"] | None:
        """Return numbers of the parts of rows that do not attend to each other: segments, or their chunks; None for whole rows."""
        if self.config.window is None or self.config.sliding_window is not None:
            return segments
        chunks = at // self.config.window
        return chunks if segments is None else segments * (row_length(at.shape[1]) // self.config.window + 1) + chunks

    def _projected(self, attention: Float[Array, "b s h d"], gate: Float[Array, "b s h d"] | None) -> Float[Array, "b s w"]:
        """Project the outputs of all heads, times the gates, and without the padding of values, to the width of the residual stream."""
        attention = attention[..., : self.config.value_size]
        gated = attention if gate is None else attention * nnx.sigmoid(gate)
        return self.project(gated.reshape(*attention.shape[:2], -1))

    def _heads(self, x: Float[Array, "b s w"], at: Int[Array, "#b s"], lengths: Int[Array, "#b #s"]) -> Any:
        """Compute queries, keys, values and, if the model has them, gates (b, s, heads, numbers), with norms and rotary positions.

        With sinks, the last number of a query is the logit of its head's sink.
        """
        config = self.config
        if config.latent is not None:
            return *self.latents(x, at, lengths), None
        size, (of_queries, of_keys, *of_values) = config.head_size_used, config.qkv_sizes
        q, k, v = jnp.split(self.qkv(x), (of_queries, of_queries + of_keys), axis=-1)
        if config.qk_norm == "all":
            q, k = normed(self.query_norm, q), normed(self.key_norm, k)
        q, k, v = (part.reshape(*x.shape[:2], -1, size) for part in (q, k, v if of_values else k))
        gate = None
        if config.attention_gate:
            q, gate = (part.reshape(*x.shape[:2], -1, size) for part in jnp.split(q.reshape(*x.shape[:2], config.heads, -1), 2, axis=-1))
        if config.qk_norm in ("head", "head_and_values"):
            q, k = normed(self.query_norm, q), normed(self.key_norm, k)
        if config.qk_norm == "head_and_values":
            v = unit(v, config.norm_epsilon)
        if config.positions == "rope":
            q, k = rotated(q, at, lengths, config), rotated(k, at, lengths, config)
        if config.qk_norm == "after_rope":
            q, k = unit(q, config.norm_epsilon), unit(k, config.norm_epsilon)
        if (temperature := config.attention_temperature) is not None:
            growth = jnp.log1p(((at + 1) // temperature.positions).astype(wider(q.dtype)))
            q = q * (1 + temperature.scale * growth).astype(q.dtype)[:, :, None, None]
        if config.sinks:
            q = jnp.concatenate([q, jnp.broadcast_to(self.sinks[...].astype(q.dtype)[None, None, :, None], (*q.shape[:3], 1))], axis=-1)
        return q, k, v, gate

    def _mlp(
        self, x: Float[Array, "b s w"], segments: Int[Array, "b s"] | None = None, routing: Routing | None = None
    ) -> tuple[Float[Array, "b s w"], Routing | None]:
        """Compute the MLP or the experts. Return the output, and the routers' choices so far."""
        if self.config.experts is not None:
            y, choices = self.experts(x, None if segments is None else segments > 0)
            return y, None if routing is None else routing.followed_by(*choices)
        gate = self.gate(x) if self.config.gated_mlp else None
        return self.contract(activated(self.config.activation, self.expand(x), gate)), routing


def new_cache(block: ModelConfig, rows: int, room: int) -> tuple[Any, ...]:
    """Return the cache of a block before the first position: keys and values for `room` positions, or the carry of a gated delta rule."""
    if block.delta is not None:
        return carry_of(block, rows)
    shape = rows, cached_positions(block.window, room), block.kv_heads_used, block.head_size_used
    return jnp.zeros(shape, dtype_of(block)), jnp.zeros(shape, dtype_of(block))


class Head(nnx.Module):
    """Applies the last norm and projects to logits. If embeddings are tied, the projection uses the symbol embeddings.

    With a `chunk`, the loss applies the projection, for that many positions at a time.
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
        logits = projected(hidden, kernel[...], None, tied, self.chunk, dtype_of(self.config), self.config.logits_soft_cap)
        routing = routing_of(stream)
        return logits if routing is None else {"tokens": logits, "experts": routing}


# Parts that BERT also uses ------------------------------------------------------------------------------------------------


def dtype_of(config: ModelConfig) -> str:
    """Return the dtype of activations between and inside layers."""
    return config.compute_dtype


def axes(inputs: str | None, outputs: str | None) -> dict[str, Any]:
    """Return the arguments of a linear layer that name the logical axes of its kernel and bias. The axis of the bias is `outputs`."""
    return {"kernel_metadata": named(inputs, outputs), "bias_metadata": named(outputs)}


def table(count: int, config: ModelConfig, init: Any, rngs: nnx.Rngs, rows: str | None = None) -> nnx.Embed:
    """Create an embedding table of `count` vectors with the model's width. `rows` names the logical axis of the first dimension."""
    return nnx.Embed(count, config.width, embedding_init=init, rngs=rngs, embedding_metadata=named(rows, "embed"))


def linear(config: ModelConfig, rngs: nnx.Rngs, bias: bool) -> Callable[..., nnx.Linear]:
    """Return a constructor of linear layers with the initialization and the dtype of the config."""
    options: dict[str, Any] = {} if config.init == "scaled" else {"kernel_init": nnx.initializers.normal(STD)}
    return partial(nnx.Linear, use_bias=bias, dtype=jnp.dtype(dtype_of(config)), rngs=rngs, **options)


class RowDropout(nnx.Dropout):
    """Dropout that draws the same numbers for a slice of the rows as for the whole rows. Positions are in the second dim."""

    def __call__(self, inputs: Array, **options: Any) -> Array:
        """Apply dropout."""
        if (at := traced_positions()) is None:
            return super().__call__(inputs, **options)
        around = [(0, 0), (at.start, at.length - at.stop), *[(0, 0)] * (inputs.ndim - 2)]
        return super().__call__(jnp.pad(inputs, around), **options)[:, at.start : at.stop]


class RMSNormPlusOne(nnx.RMSNorm):
    """RMSNorm that multiplies by 1 plus its parameter. The parameter is initialized with zeros (Gemma)."""

    def __call__(self, x: Array, mask: Array | None = None) -> Array:
        """Normalize the last axis, in the norm's dtype."""
        assert self.scale is not None
        dtype = wider(x.dtype)
        wide = x.astype(dtype)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scale = jnp.asarray(1, dtype) + self.scale[...].astype(dtype)
        return wide * jax.lax.rsqrt(mean + jnp.asarray(self.epsilon, dtype)) * scale.reshape((1,) * (x.ndim - 1) + (-1,))


def norm(config: ModelConfig, rngs: nnx.Rngs, size: int | None = None) -> nnx.LayerNorm | nnx.RMSNorm:
    """Create a norm over `size` numbers, by default over the model's width. It computes in float32 at least."""
    options: dict[str, Any] = {"epsilon": config.norm_epsilon, "dtype": wider(dtype_of(config)), "rngs": rngs}
    features = config.width if size is None else size
    if config.norm == "rms_plus_one":
        return RMSNormPlusOne(features, scale_init=nnx.initializers.zeros, **options)
    return (nnx.LayerNorm if config.norm == "layer" else nnx.RMSNorm)(features, **options)


def dropout(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Dropout:
    """Create a dropout layer. If the rate is zero, it draws no random numbers."""
    return RowDropout(config.dropout, rngs=rngs if config.dropout else None)


def normed(layer: Callable[[Any], Any], x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """Apply a norm, and cast the result back to the dtype of `x`."""
    return layer(x).astype(x.dtype)


def unit(x: Float[Array, "*n d"], epsilon: float) -> Float[Array, "*n d"]:
    """Divide by the root of the mean square of the last axis, as an RMSNorm without a scale does."""
    wide = x.astype(wider(x.dtype))
    mean = jnp.square(wide).mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + jnp.asarray(epsilon, wide.dtype))).astype(x.dtype)


def look_up(embedding: nnx.Embed, numbers: Any, dtype: Any) -> Float[Array, "b s w"]:
    """Look up rows of an embedding table.

    Only the rows that are looked up are cast. Gradients of a symbol at several positions are summed in the dtype of the table.
    """
    return jnp.take(embedding.embedding[...], numbers, axis=0).astype(dtype)


def tied_embedding(config: ModelConfig, rngs: nnx.Rngs) -> nnx.Embed:
    """Create the head's copy of the symbol embeddings. The tied parameter of the layer `embed` replaces its initial values."""
    return table(config.vocab_size, config, nnx.initializers.zeros, rngs, "vocab")


def projected(hidden: Any, kernel: Any, bias: Any, by_symbol: bool, chunk: int | None, dtype: str, soft_cap: float | None = None) -> Any:
    """Project to logits. With a `chunk`, return the inputs of the projection instead."""
    unprojected = Unprojected(hidden, kernel, bias, chunk or 1, by_symbol, dtype, soft_cap)
    return unprojected.logits() if chunk is None else unprojected


def split_inputs(inputs: Any, config: ModelConfig) -> tuple[Any, Any]:
    """Return the tokens of inputs, and their segments or None. The choices of examples (b, k, s) become rows (b·k, s).

    Raise InputError if the sequences are longer than the model's positions.
    """
    inputs = inputs if isinstance(inputs, dict) else {"tokens": inputs}
    tokens, segments = in_rows(inputs["tokens"]), in_rows(inputs.get("segments"))
    if tokens.shape[1] > (longest := config.max_positions_used):
        raise InputError(
            f"model: expected sequences of at most {longest} positions, found {tokens.shape[1]}; make the sequences shorter, or raise "
            "model.max_positions"
        )
    return tokens, segments


def in_rows(numbers: Any) -> Any:
    """Reshape an array (…, s) to rows (b, s). For None, return None."""
    return numbers if numbers is None or numbers.ndim == 2 else numbers.reshape(-1, numbers.shape[-1])


def split_stream(stream: Stream) -> tuple[Any, Any]:
    """Return x and the segments, or None, from the values that flow between layers."""
    return (stream["x"], stream.get("segments")) if isinstance(stream, dict) else (stream, None)


def routing_of(stream: Stream) -> Routing | None:
    """Return the routers' choices from the values that flow between layers; None if the model has no experts."""
    return stream.get("experts") if isinstance(stream, dict) else None


def joined(x: Float[Array, "b s w"], segments: Int[Array, "b s"] | None, routing: Routing | None = None) -> Stream:
    """Join x, segments and the routers' choices into the values that flow between layers."""
    parts = {"segments": segments, "experts": routing}
    present = {name: part for name, part in parts.items() if part is not None}
    return {"x": x, **present} if present else x


def positions(tokens: Any, segments: Int[Array, "b s"] | None, before: Ended | None = None) -> Int[Array, "#b s"]:
    """Return the position of each token, counted from 0 in its row or segment."""
    if segments is not None:
        return positions_of(segments, before)
    numbers = jnp.arange(tokens.shape[1])[None]
    return numbers if (at := traced_positions()) is None else at.start + numbers


def row_length(length: int) -> int:
    """Return the number of positions of whole rows, given the number of those that are computed."""
    return length if (at := traced_positions()) is None else at.length


def waves(size: float, key: Array, shape: tuple[int, int], dtype: DTypeLike, out_sharding: object = None) -> Float[Array, "s w"]:
    """Initialize position embeddings with sines and cosines, as in the original transformer (Vaswani et al. 2017).

    Their amplitude is half of `size`, the standard deviation of the symbol embeddings. So attention to the previous position is learned
    soon, while larger position embeddings would hide the symbols.
    """
    count, width = shape
    angles = np.arange(count)[:, None] / 10_000 ** (np.arange(0, width, 2)[None] / width)
    return jnp.asarray(0.5 * size * np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :width], dtype)
