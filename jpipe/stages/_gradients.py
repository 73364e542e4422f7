"""Checks by tracing that all layers and the loss can be differentiated; nothing is computed."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.errors import callers_code, cause
from jpipe.model._layer import Layer, LayerSpec, key_spec
from jpipe.model._stack import LayerStack
from jpipe.stages._functions import Loss, called, floats_of

Tree = Any

_REMEDY = "use operations that JAX differentiates in reverse (lax.scan, not while_loop), or give it a jax.custom_vjp"


def check_gradients(stack: LayerStack, layers: Mapping[str, LayerSpec], first_stage: int, loss: Loss, labels: Tree) -> None:
    """Refuse a layer or a loss whose backward fails.

    Args:
        stack: the model.
        layers: from `LayerStack.specs`, all of them.
        first_stage: number of layers of the first stage: for the inputs of all later layers, gradients are always computed.
        loss: as in `Pipeline`.
        labels: shapes and dtypes of the labels of a microbatch.

    Raises:
        InputError: names the layer, or the loss.
    """
    trained = False  # whether an earlier layer has parameters, so that gradients for the input of this one are computed
    for number, (layer_id, spec) in enumerate(layers.items()):
        moves = trained or number >= first_stage
        trained = trained or bool(jax.tree.leaves(spec.params))
        if moves or jax.tree.leaves(spec.params):
            with callers_code(lambda error, layer_id=layer_id: f"layer '{layer_id}': its backward fails: {cause(error)}; {_REMEDY}"):  # type: ignore[misc]  # layer_id has a default
                jax.eval_shape(partial(_backward, stack.layers[layer_id], moves), spec.params, spec.state, spec.x, key_spec())
    outputs = layers[stack.ids[-1]].output
    with callers_code(lambda error: f"loss: its backward fails: {cause(error)}; {_REMEDY}"):
        jax.eval_shape(partial(_loss_backward, loss), outputs, labels, key_spec())


def _backward(layer: Layer, moves: bool, params: Tree, state: Tree, x: Tree, key: jax.Array) -> Any:
    def forward(params: Tree, floats: list[jax.Array]) -> list[jax.Array]:
        return floats_of(layer.apply(params, state, _filled(x, floats) if moves else x, key, True)[0])

    y, vjp = jax.vjp(forward, params, floats_of(x))
    return vjp(jax.tree.map(jnp.ones_like, y))


def _loss_backward(loss: Loss, outputs: Tree, labels: Tree, key: jax.Array) -> Any:
    total, vjp = jax.vjp(lambda floats: jnp.asarray(called(loss, _filled(outputs, floats), labels, key)[0]), floats_of(outputs))
    return vjp(jnp.ones_like(total))


def _filled(tree: Tree, floats: list[jax.Array]) -> Tree:
    """The tree with these as its floating-point leaves."""
    rest = iter(floats)
    return jax.tree.map(lambda leaf: next(rest) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, tree)
