"""A train step of a whole model as one program, which tools compare with the programs of stages."""

from typing import Any

import jax

from jpipe.stages._arrays import Arrays
from jpipe.stages._calls import call_of

Tree = Any


def trace_whole_step(arrays: Arrays, microbatches: int) -> jax.stages.Traced:
    """Trace a step that scans over microbatches, sums their gradients and updates the weights, with the weights donated.

    What capabilities pass to an update, such as the norm of the gradients, is an argument here, too, and is not computed.
    """
    f = arrays.functions
    compute, update = call_of(arrays, "forward_backward"), call_of(arrays, "in_place")
    params, state, x, labels, _, (number, key), scale = compute.inputs
    _, optimizer, _, *others = update.inputs

    def train_step(params: Tree, state: Tree, optimizer: Tree, batch: Tree, key: Any, scale: Any, others: Tree) -> Tree:
        def add(carry: Tree, microbatch: Tree) -> tuple[Tree, None]:
            (accumulators, state), (x, labels, number) = carry, microbatch
            _, accumulators, changed = compute.function(params, state, x, labels, accumulators, (number, key), scale)
            return (accumulators, f.changed.joined(changed, state)), None

        (accumulators, state), _ = jax.lax.scan(add, (f.zero_accumulators(params), state), batch)
        trained, optimizer, _, loss = update.function(f.trained.part(params), optimizer, accumulators, *others)
        return f.trained.joined(trained, params), state, optimizer, loss

    def stacked(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((microbatches, *spec.shape), spec.dtype, sharding=spec.sharding)

    batch = jax.tree.map(stacked, (x, labels, number))
    return jax.jit(train_step, donate_argnums=(0, 1, 2)).trace(params, state, optimizer, batch, key, scale, others)
