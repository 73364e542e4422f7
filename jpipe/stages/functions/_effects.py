"""The layers of a stage that have side effects, such as host callbacks, for messages."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.model._layer import LayerSpec, key_spec
from jpipe.model._stack import LayerStack
from jpipe.model._subset import floats_of, with_floats

Tree = Any


def describe_effects(stack: LayerStack, layer_ids: Sequence[str], x: Tree) -> str:
    """Name the layers of a stage that have side effects, or else the stage, in the words of a message."""
    layers = _layers_with_effects(stack, stack.specs(x, layer_ids))
    names = ", ".join(f"'{layer_id}'" for layer_id in layers)
    return f"layer {names}" if layers else f"the stage of layer '{layer_ids[0]}'"


def _layers_with_effects(stack: LayerStack, layers: Mapping[str, LayerSpec]) -> list[str]:
    """Return the layers whose forward or backward has side effects."""

    def backward(layer_id: str, moves: bool, params: Tree, state: Tree, x: Tree, key: jax.Array) -> Any:
        def forward(params: Tree, floats: list[jax.Array]) -> list[jax.Array]:
            inputs = with_floats(x, floats) if moves else x
            return floats_of(stack.layers[layer_id].apply(params, state, inputs, key, True)[0])

        y, vjp = jax.vjp(forward, params, floats_of(x))
        return vjp(jax.tree.map(jnp.ones_like, y))

    def has_effects(layer_id: str, spec: LayerSpec) -> bool:
        arguments = spec.params, spec.state, spec.x, key_spec()
        try:
            return bool(jax.make_jaxpr(partial(backward, layer_id, True))(*arguments).effects)
        except Exception:  # a layer of the first stage need not have a gradient for its input
            return bool(jax.make_jaxpr(partial(backward, layer_id, False))(*arguments).effects)

    return [layer_id for layer_id, spec in layers.items() if has_effects(layer_id, spec)]
