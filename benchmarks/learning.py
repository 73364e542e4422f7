"""PipeDream with and without weight stashing, one microbatch after the other, with the stage functions of a pipeline."""

from typing import Any

import jax
import jax.numpy as jnp

import jpipe

Tree = Any


def emulate(pipe: jpipe.Pipeline, key: jax.Array, batches: list[Any], *, stashing: bool) -> tuple[list[float], list[Tree]]:
    """Train as PipeDream does.

    With weight stashing the backward of a microbatch reads the weights that its forward read. Without, it reads the newest
    weights, with the activations of its forward: then its gradient belongs to no one set of weights.

    Args:
        pipe: a pipeline with schedule `pipedream`, one replica a stage and no vertical sync.
        key: for the parameters.
        batches: (inputs, labels) of each batch.
        stashing: whether the backward reads the weights of the forward.

    Returns:
        The mean loss of each update, and the newest weights of each stage.
    """
    plan = pipe.plan
    if plan.schedule != "pipedream" or plan.vertical_sync or set(plan.replicas) != {1} or plan.extra_in_flight:
        raise ValueError("expected a plan of pipedream with one replica a stage and no vertical sync, and no extra microbatches in flight")
    functions = pipe._functions(batches[0])
    names = ("forward", "backward", "forward_backward", "update")
    calls = [{name: jax.jit(getattr(f, name)) for name in names} for f in functions]
    workers = pipe.init(key, batches[0]).workers
    start = [jax.device_put(workers[own[0]], jax.devices()[0]) for own in plan.stage_workers]
    m, d, last = plan.microbatches, plan.depth, plan.depth - 1
    every = 1 if plan.update_every == "replicas" else m
    versions, optimizer = [dict(w.versions) for w in start], [w.optimizer for w in start]
    sums, state, losses = [w.accumulators for w in start], [w.layer_state for w in start], []
    for k in range(len(batches) * m):
        x, labels = jax.tree.map(lambda a: a.reshape(m, -1, *a.shape[1:])[k % m], batches[k // m])  # noqa: B023 - called at once
        draw = [(jnp.uint32(k), w.key) if f.specs.rng[1] is not None else (None, None) for f, w in zip(functions, start, strict=True)]
        read = [max(k - (d - s) + 1, 0) // every for s in range(d)]
        left = []
        for s in range(last):
            arguments = state[s], x, None
            x, state[s], saved = calls[s]["forward"](versions[s][read[s]], *arguments, draw[s])
            left.append((functions[s].residuals.keep(arguments, (x, state[s])), saved))
        arguments = versions[last][read[last]], state[last], x, labels, sums[last], draw[last]
        x, sums[last], state[last] = calls[last]["forward_backward"](*arguments)
        for s in reversed(range(last)):
            weights = versions[s][read[s] if stashing else k // every]
            x, sums[s] = calls[s]["backward"](weights, *left[s], x, sums[s], draw[s])
        if (k + 1) % every == 0:
            for s in range(d):
                g = k // every
                versions[s][g + 1], optimizer[s], _, mean = calls[s]["update"](versions[s][g], optimizer[s], sums[s])
                sums[s] = jax.tree.map(jnp.zeros_like, sums[s])
                versions[s] = {v: w for v, w in versions[s].items() if v > g - d - 1}
            losses.append(float(mean[0]))
    return losses, [own[max(own)] for own in versions]
