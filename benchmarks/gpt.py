"""The benchmarks' GPT as pure functions, used as a plain jitted train step and as a `jpipe.LayerStack`.

The letters in the shapes: b sequences, s positions, w width, v tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

import jpipe
from benchmarks.sizes import Sizes

Tree = Any


def optimizer() -> optax.GradientTransformation:
    """Return the optimizer of all programs."""
    return optax.adamw(1e-4)


def data(sizes: Sizes, microbatches: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw inputs and labels of one batch: random tokens, and the token after each."""
    tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, (sizes.rows * microbatches, sizes.sequence + 1)).astype(np.int32)
    return tokens[:, :-1], tokens[:, 1:]


# The model ---------------------------------------------------------------------------------------------------------------


def init_embedding(sizes: Sizes, key: Array) -> Tree:
    """Initialize the first layer."""
    return {"vectors": jax.random.normal(key, (sizes.vocabulary, sizes.width))}


def embed(sizes: Sizes, p: Tree, tokens: Int[Array, "b s"]) -> Float[Array, "b s w"]:
    """Embed tokens."""
    return p["vectors"][tokens].astype(sizes.compute_dtype)


def init_block(sizes: Sizes, key: Array) -> Tree:
    """Initialize one block."""
    keys, w = jax.random.split(key, 4), sizes.width
    return {
        "attention_norm": _init_norm(w),
        "qkv": _init_linear(keys[0], w, 3 * w),
        "project": _init_linear(keys[1], w, w),
        "mlp_norm": _init_norm(w),
        "expand": _init_linear(keys[2], w, 4 * w),
        "contract": _init_linear(keys[3], 4 * w, w),
    }


def block(sizes: Sizes, p: Tree, x: Float[Array, "b s w"]) -> Float[Array, "b s w"]:
    """Compute x + attention(norm(x)), then x + mlp(norm(x))."""
    b, s, w = x.shape
    q, k, v = jnp.moveaxis(_linear(p["qkv"], _norm(p["attention_norm"], x)).reshape(b, s, 3, sizes.heads, w // sizes.heads), 2, 0)
    x = x + _linear(p["project"], jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=sizes.attention).reshape(b, s, w))
    return x + _linear(p["contract"], jax.nn.gelu(_linear(p["expand"], _norm(p["mlp_norm"], x))))


def init_head(sizes: Sizes, key: Array) -> Tree:
    """Initialize the last layer."""
    return {"norm": _init_norm(sizes.width), "logits": _init_linear(key, sizes.width, sizes.vocabulary)}


def head(sizes: Sizes, p: Tree, x: Float[Array, "b s w"]) -> Float[Array, "b s v"]:
    """Apply the last norm and project to logits."""
    return _linear(p["logits"], _norm(p["norm"], x))


def mean_loss(logits: Float[Array, "*b v"], labels: Int[Array, "*b"]) -> Float[Array, ""]:
    """Compute the cross-entropy per token."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def _init_norm(width: int) -> Tree:
    return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}


def _norm(p: Tree, x: Array) -> Array:
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return (scaled * _over_last(p["scale"], x) + _over_last(p["bias"], x)).astype(x.dtype)


def _init_linear(key: Array, inputs: int, outputs: int) -> Tree:
    return {"kernel": jax.random.normal(key, (inputs, outputs)) * inputs**-0.5, "bias": jnp.zeros(outputs)}


def _linear(p: Tree, x: Array) -> Array:
    return x @ p["kernel"].astype(x.dtype) + _over_last(p["bias"].astype(x.dtype), x)


def _over_last(vector: Array, x: Array) -> Array:
    return jnp.expand_dims(vector, range(x.ndim - 1))


# As a plain program, and as layers ---------------------------------------------------------------------------------------


def init(sizes: Sizes, key: Array) -> Tree:
    """Initialize the whole model."""
    blocks = [init_block(sizes, jax.random.fold_in(key, i)) for i in range(sizes.layers)]
    return {"embedding": init_embedding(sizes, key), "blocks": blocks, "head": init_head(sizes, key)}


class PlainStep:
    """A train step without a pipeline: one jitted function that scans over microbatches, sums gradients and updates.

    Args:
        sizes: sizes of the model.
        microbatches: microbatches per batch.
        batch: (inputs, labels) on the device, the same for each step.
    """

    def __init__(self, sizes: Sizes, microbatches: int, batch: Tree) -> None:
        self.params = init(sizes, jax.random.key(0))
        self._optimizer_state = optimizer().init(self.params)
        self._batch = jax.tree.map(lambda leaf: leaf.reshape(microbatches, -1, *leaf.shape[1:]), batch)
        self._step = jax.jit(partial(_plain_step, sizes, microbatches), donate_argnums=(0, 1))

    def __call__(self) -> float:
        """Run one step, wait for it, and return the mean loss."""
        self.params, self._optimizer_state, loss = self._step(self.params, self._optimizer_state, self._batch)
        jax.block_until_ready(self.params)
        return float(loss)


def _plain_step(sizes: Sizes, microbatches: int, params: Tree, optimizer_state: Tree, batch: Tree) -> tuple[Tree, Tree, Array]:
    def add(total: Tree, microbatch: Tree) -> tuple[Tree, Array]:
        value, gradients = jax.value_and_grad(partial(_plain_loss, sizes))(params, *microbatch)
        return jax.tree.map(jnp.add, total, gradients), value

    total, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batch)
    gradients = jax.tree.map(lambda leaf: leaf / microbatches, total)
    updates, optimizer_state = optimizer().update(gradients, optimizer_state, params)
    return optax.apply_updates(params, updates), optimizer_state, losses.mean()


def _plain_loss(sizes: Sizes, params: Tree, tokens: Array, labels: Array) -> Array:
    x = embed(sizes, params["embedding"], tokens)
    for layer in params["blocks"]:
        x = block(sizes, layer, x)
    return mean_loss(head(sizes, params["head"], x), labels)


def stack(sizes: Sizes) -> jpipe.LayerStack:
    """Return the same model as the layers `embed`, `block_0` …, `head`."""
    blocks = {f"block_{i}": _layer(sizes, init_block, block) for i in range(sizes.layers)}
    return jpipe.LayerStack({"embed": _layer(sizes, init_embedding, embed), **blocks, "head": _layer(sizes, init_head, head)})


def summed_loss(logits: Float[Array, "*b v"], labels: Int[Array, "*b"]) -> tuple[Array, Array]:
    """Compute the loss for jpipe.

    Returns:
        The sum, and the number of tokens.
    """
    return mean_loss(logits, labels) * labels.size, jnp.asarray(labels.size, jnp.float32)


def count_parameters(stack: jpipe.LayerStack, inputs: Any) -> int:
    """Count the parameters of all layers.

    Args:
        stack: the model.
        inputs: arrays of the shapes that it takes.
    """
    params = {layer_id: spec.params for layer_id, spec in stack.specs(inputs).items()}
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _layer(sizes: Sizes, init: Callable[[Sizes, Array], Tree], apply: Callable[[Sizes, Tree, Array], Array]) -> jpipe.Layer:
    forward = partial(apply, sizes)
    return jpipe.Layer(lambda key, x: (init(sizes, key), {}), lambda p, state, x, key, train: (forward(p, x), state))
