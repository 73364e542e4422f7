"""Built-in models run as one function, or trained through a pipeline."""

from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jpipe
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_train.losses.cross_entropy import loss

SMALL = {"depth": 2, "width": 16, "heads": 2, "seq_len": 8}
LLAMA = {"positions": "rope", "norm": "rms", "activation": "silu", "gated_mlp": True, "bias": False, "kv_heads": 1, "init": "normal"}


def outputs_of(config: ModelConfig, inputs: Any, params: Any = None, chunk: int | None = None) -> Any:
    """Return the output of the whole model in evaluation."""
    stack = layers(config, chunk)
    return applied(stack, params_of(stack, inputs) if params is None else params, inputs)


def applied(stack: jpipe.LayerStack, params: Any, inputs: Any) -> Any:
    """Return the output of a model with these parameters in evaluation."""
    return forward_of(stack)(params, inputs)


@lru_cache(maxsize=2)
def forward_of(stack: jpipe.LayerStack) -> Any:
    """Return the function `(parameters, inputs) -> outputs` of a model in evaluation, which is compiled once for inputs of a shape."""

    @jax.jit
    def forward(params: Any, inputs: Any) -> Any:
        whole = {layer_id: stack.ties.whole(layer_id, params) for layer_id in stack.ids}
        state: dict[str, Any] = {layer_id: {} for layer_id in stack.ids}
        return stack.apply(stack.ids, whole, state, inputs, key=None, microbatch=None, train=False)[0]

    return forward


def params_of(stack: jpipe.LayerStack, inputs: Any, seed: int = 0) -> Any:
    """Return the initial parameters of a pipeline, in which shared ones are separate entries."""
    specs = stack.specs(inputs)

    @jax.jit
    def init(key: jax.Array) -> Any:
        examples = {i: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), spec.x) for i, spec in specs.items()}
        return {i: stack.init_layer(i, key, x)[0] for i, x in examples.items()}

    whole = init(jax.random.key(seed))
    return stack.ties.split(whole)


def trained(stack: jpipe.LayerStack, plan: jpipe.Plan, batches: Any, **options: Any) -> tuple[list[float], Any]:
    """Train by plain SGD and return (loss of each batch, final parameters)."""
    pipe = jpipe.Pipeline(stack, plan, loss, optax.sgd(0.5), **options)
    state, losses = pipe.init(jax.random.key(0), batches[0]), []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        losses += metrics.losses.values()
    state, metrics = pipe.drain(state, with_metrics=True)
    losses += metrics.losses.values()
    return [float(value) for value in losses], pipe.params(state)
