"""Messages that name the layers of a stage with side effects, such as host callbacks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.model._layer import Layer, LayerSpec, key_spec
from jpipe.model._stack import LayerStack
from jpipe.model._subset import floats_of, with_floats

Tree = Any


def describe_effects(stack: LayerStack, layer_ids: Sequence[str], x: Tree) -> str:
    """For a message, name the layers of a stage with side effects in forward or backward, or the stage if there are none."""

    def has_effects(layer_id: str, spec: LayerSpec) -> bool:
        def traced(moves: bool) -> Any:
            backward = partial(layer_backward, stack.layers[layer_id], moves, lambda trained, params: trained)
            return jax.make_jaxpr(backward)(spec.params, spec.params, spec.state, spec.x, key_spec())

        try:
            return bool(traced(True).effects)
        except Exception:  # a layer of the first stage may not be differentiable in its input
            return bool(traced(False).effects)

    names = ", ".join(f"'{layer_id}'" for layer_id, spec in stack.specs(x, layer_ids).items() if has_effects(layer_id, spec))
    return f"layer {names}" if names else f"the stage of layer '{layer_ids[0]}'"


def layer_backward(
    layer: Layer, moves: bool, filled: Callable[[Tree, Tree], Tree], trained: Tree, params: Tree, state: Tree, x: Tree, key: jax.Array
) -> Any:
    """Return the gradients of a layer's trained parameters and, if it `moves`, of its input; all output gradients are ones.

    `filled` makes the complete tree from (trained parameters, parameters).
    """

    def forward(trained: Tree, floats: list[jax.Array]) -> list[jax.Array]:
        return floats_of(layer.apply(filled(trained, params), state, with_floats(x, floats) if moves else x, key, True)[0])

    y, vjp = jax.vjp(forward, trained, floats_of(x))
    return vjp(jax.tree.map(jnp.ones_like, y))
