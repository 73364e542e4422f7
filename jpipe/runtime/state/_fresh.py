"""The state of a worker before the first batch."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jpipe.capabilities.registry import runtimes_for
from jpipe.meshes._place import Place
from jpipe.runtime.state._state import WorkerState
from jpipe.runtime.state._weights import WeightVersions
from jpipe.stages._arrays import shardings_of
from jpipe.stages._compile import compile_start
from jpipe.stages._compiled_stage import CompiledStage

Tree = Any


def fresh_worker(
    stage: CompiledStage,
    initializers: Mapping[tuple[str, Place], jax.stages.Compiled],
    key: jax.Array,
    initial: Mapping[str, Tree],
) -> WorkerState:
    """Return a worker before batch 0. `initializers` are the programs for the layers with fresh arrays.

    `initial` has (parameters, state) of each layer; arrays are copied, and specs stand for arrays to initialize.
    """
    f, first, a, params, state = stage.functions, stage.place.first, stage.arrays, {}, {}
    for layer_id in initialized_at(stage):
        fresh = arrays = initial[layer_id]
        if is_fresh(arrays):
            fresh = initializers[layer_id, stage.place](jax.device_put(f.stack.init_key(layer_id, key), first))
        params[layer_id], state[layer_id] = jax.tree.map(partial(_copied_or_fresh, first), arrays, fresh)
        if layer_id in a.fresh and not f.stack.ties.names([layer_id]):  # the first device of a mesh may not have memory for all layers
            params[layer_id] = jax.device_put(params[layer_id], shardings_of(a.fresh[layer_id]))
    entries = jax.device_put(f.stack.ties.split(params, f.stage.layers), shardings_of(a.fresh))
    version, optimizer, accumulators = compile_start(stage)(entries)
    state = jax.device_put({layer_id: state[layer_id] for layer_id in f.stage.layers}, shardings_of(a.state))
    dynamic = f.precision.dynamic_scale
    scales = {} if dynamic is None else jax.device_put({0: dynamic.first()}, stage.place.sharding())
    kept = {name: hooks.fresh(f, version, accumulators) for name, hooks in runtimes_for(f.capabilities).items() if hooks.fresh is not None}
    placed_key = jax.device_put(key, stage.place.sharding())
    return WorkerState(WeightVersions({0: version}), optimizer, state, accumulators, placed_key, loss_scales=scales, capabilities=kept)


def initialized_at(stage: CompiledStage) -> tuple[str, ...]:
    """Return the layers that a worker initializes: its own, and the layers that have the first places of its shared parameters."""
    ids, ties = stage.functions.stage.layers, stage.functions.stack.ties
    return tuple(dict.fromkeys((*ids, *(ties.first[name][0] for name in ties.names(ids)))))


def is_fresh(arrays: Tree) -> bool:
    """Return whether any array of a layer has to be initialized; a spec stands for such an array."""
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(arrays))


def _copied_or_fresh(device: jax.Device, initial: Any, fresh: Any) -> jax.Array:
    """Return a copy of the initial array, because updates write into the memory of the weights; if there is none, the fresh array."""
    return fresh if isinstance(initial, jax.ShapeDtypeStruct) else jnp.copy(jax.device_put(initial, device))
