"""The programs that initialize layers, compiled ahead of time."""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.meshes._place import Place
from jpipe.model._layer import Layer, LayerSpec, key_spec
from jpipe.model._stack import LayerStack
from jpipe.model.jaxprs._wanted import without_effects
from jpipe.stages._compile import compile_in_parallel

Tree = Any

_RUN_ONCE: Mapping[str, str | bool] = MappingProxyType({"xla_backend_optimization_level": "1"})
"""For programs that run once: they compile in half the time, and compute the same bits."""


def compile_initializers(
    stack: LayerStack, specs: Mapping[str, LayerSpec], layer_places: Iterable[tuple[str, Place]]
) -> dict[tuple[str, Place], jax.stages.Compiled]:
    """Compile `key -> (params, state)` for each (layer id, place), whole on the first device; equal layers of a device share one program.

    One program per layer, not per stage and not sharded, so that the bits of the weights depend on neither the cut nor the mesh.
    """
    distinct: dict[tuple[str, jax.Device], jax.stages.Lowered] = {}
    program_of = {}
    for layer_id, place in dict.fromkeys(layer_places):
        lowered = _lower_initializer(stack.layers[layer_id], specs[layer_id].x, place.first)
        program_of[layer_id, place] = lowered.as_text(), place.first
        distinct.setdefault(program_of[layer_id, place], lowered)
    compiled = dict(zip(distinct, compile_in_parallel(list(distinct.values()), _RUN_ONCE), strict=True))
    return {key: compiled[program] for key, program in program_of.items()}


def _initializer(init: Callable[[jax.Array, Tree], tuple[Tree, Tree]], x: Tree) -> Callable[[jax.Array], tuple[Tree, Tree]]:
    return lambda key: init(key, jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), x))


def _lower_initializer(layer: Layer, x: Tree, device: jax.Device) -> jax.stages.Lowered:
    key = Place((device,)).specs(key_spec())
    traced = jax.jit(_initializer(layer.init, x)).trace(key)
    if traced.jaxpr.effects:  # a Linen module runs its forward on the zeros
        traced = jax.jit(_initializer(without_effects(layer.init, (False, True)), x)).trace(key)
    return traced.lower()
