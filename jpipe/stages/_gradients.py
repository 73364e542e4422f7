"""The stages and layers for which gradients are computed, and checks that the layers and the loss can be differentiated."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.errors import callers_code, cause
from jpipe.model._function_arguments import Loss, call_with_randomness
from jpipe.model._layer import LayerSpec, key_spec
from jpipe.model._stack import LayerStack
from jpipe.model._subset import EVERYTHING, Subset, floats_of, with_floats
from jpipe.stages.functions._effects import layer_backward
from jpipe.stages.functions._stage_functions import StageFunctions

Tree = Any

_REMEDY = "use operations that JAX differentiates in reverse (lax.scan, not while_loop), or define a jax.custom_vjp"


def has_gradient(trained: Subset, params: Mapping[str, Tree]) -> bool:
    """Return whether a gradient is computed for the output of layers with these parameters: not if there are any and all are frozen."""
    return trained.has_any(params) or not any(name in trained.chosen for name in params)


def with_gradients(functions: Sequence[StageFunctions], earlier: Mapping[str, Tree] = MappingProxyType({})) -> list[StageFunctions]:
    """Set for consecutive stages which gradients they compute: none if all earlier parameters are frozen."""
    results, before = [], dict(earlier)
    for f in functions:
        of_input = not f.first and has_gradient(f.trained, before)
        before |= f.specs.params
        results.append(replace(f, input_gradient=of_input, output_gradient=has_gradient(f.trained, before)))
    return results


def check_gradients(
    stack: LayerStack, layers: Mapping[str, LayerSpec], first_stage: int, loss: Loss, labels: Tree, trained: Subset = EVERYTHING
) -> None:
    """Check by tracing that the backward of the loss, and of each layer that needs one, can be computed.

    Layers that are the same object are checked once. Inputs of layers after the first `first_stage` ones have a gradient unless all earlier
    parameters are frozen. Raise InputError if a backward fails; the message names the layer, or the loss.
    """
    params = {layer_id: spec.params for layer_id, spec in layers.items()}
    in_layers, before = stack.ties.in_layers(trained, stack.ties.split(params), params), dict[str, Tree]()
    checked = set[Any]()
    for number, (layer_id, spec) in enumerate(layers.items()):
        moves = in_layers.has_any(before) or (number >= first_stage and has_gradient(in_layers, before))
        before[layer_id] = spec.params
        trained = in_layers.of(layer_id, spec.params)
        key = stack.like(layer_id, spec.x), moves, jax.tree.structure(trained)
        if (moves or jax.tree.leaves(trained)) and key not in checked:
            checked.add(key)
            with callers_code(lambda error, layer_id=layer_id: f"layer '{layer_id}': its backward fails: {cause(error)}; {_REMEDY}"):  # type: ignore[misc]  # layer_id has a default
                backward = partial(layer_backward, stack.layers[layer_id], moves, partial(in_layers.filled, layer_id))
                jax.eval_shape(backward, trained, spec.params, spec.state, spec.x, key_spec())
    outputs = layers[stack.ids[-1]].output
    with callers_code(lambda error: f"loss: its backward fails: {cause(error)}; {_REMEDY}"):
        jax.eval_shape(partial(_loss_backward, loss), outputs, labels, key_spec())


def _loss_backward(loss: Loss, outputs: Tree, labels: Tree, key: jax.Array) -> Any:
    total, vjp = jax.vjp(
        lambda floats: jnp.asarray(call_with_randomness(loss, with_floats(outputs, floats), labels, key)[0]), floats_of(outputs)
    )
    return vjp(jnp.ones_like(total))
