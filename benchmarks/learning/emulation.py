"""Emulate PipeDream with and without weight stashing, one microbatch after the other, with the stage functions of a pipeline."""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jpipe
from jpipe.stages import update

Tree = Any


class Updated(NamedTuple):
    """The results of an update.

    Attributes:
        loss: mean loss of its batch.
        params: the newest parameters, by layer id.
        state: layer state, by layer id.
    """

    loss: float
    params: dict[str, Tree]
    state: dict[str, Tree]


class Emulation:
    """A trainer that updates as PipeDream does.

    With weight stashing the backward of a microbatch reads the weights that its forward read. Without, it reads the newest
    weights, with the activations of its forward: then its gradient belongs to no one set of weights.

    Args:
        pipe: a pipeline with schedule `pipedream`, one replica a stage and no vertical sync.
        batch: (inputs, labels) like those of the run.
        stashing: whether the backward reads the weights of the forward.
    """

    def __init__(self, pipe: jpipe.Pipeline, batch: Any, *, stashing: bool) -> None:
        plan = pipe.plan
        if plan.schedule != "pipedream" or plan.vertical_sync or set(plan.replicas) != {1} or plan.extra_in_flight:
            raise ValueError(
                "expected a plan of pipedream with one replica a stage and no vertical sync, and no extra microbatches in flight"
            )
        self._pipe, self._batch, self._stashing = pipe, batch, stashing
        self._functions = pipe.stage_functions(batch)
        names = ("forward", "backward", "forward_backward")
        calls = [{name: getattr(f, name) for name in names} | {"update": partial(update, f)} for f in self._functions]
        self._calls = [{name: jax.jit(call) for name, call in of_stage.items()} for of_stage in calls]

    def run(self, key: jax.Array, batches: Iterable[Any]) -> Iterator[Updated]:
        """Train from fresh weights, one item per update.

        Args:
            key: for the parameters.
            batches: (inputs, labels) of each batch.
        """
        plan, functions, calls = self._pipe.plan, self._functions, self._calls
        workers = self._pipe.init(key, self._batch).workers
        start = [jax.device_put(workers[layers[0]], jax.devices()[0]) for layers in plan.stage_workers]
        m, d, last = plan.microbatches, plan.depth, plan.depth - 1
        every = 1 if plan.update_every == "replicas" else m
        versions, optimizer = [{v: w.weights.read(v) for v in w.weights.versions} for w in start], [w.optimizer for w in start]
        sums, state = [w.accumulators for w in start], [w.layer_state for w in start]
        for k, (x, labels) in enumerate(_microbatches(batches, m)):
            draw = [(jnp.uint32(k), w.key) if f.specs.rng[1] is not None else (None, None) for f, w in zip(functions, start, strict=True)]
            read = [max(k - (d - s) + 1, 0) // every for s in range(d)]
            residuals = []
            for s in range(last):
                arguments = state[s], x, None
                x, state[s], saved = calls[s]["forward"](versions[s][read[s]], *arguments, draw[s])
                residuals.append((functions[s].residuals.keep(arguments, (x, state[s])), saved))
            arguments = versions[last][read[last]], state[last], x, labels, sums[last], draw[last]
            x, sums[last], state[last] = calls[last]["forward_backward"](*arguments)
            for s in reversed(range(last)):
                weights = versions[s][read[s] if self._stashing else k // every]
                x, sums[s] = calls[s]["backward"](weights, *residuals[s], x, sums[s], draw[s])
            if (k + 1) % every:
                continue
            g, mean = k // every, None
            for s in range(d):
                versions[s][g + 1], optimizer[s], sums[s], mean = calls[s]["update"](versions[s][g], optimizer[s], sums[s])
                versions[s] = {v: w for v, w in versions[s].items() if v > g - d - 1}
            yield Updated(float(mean[0]), merged(layers[g + 1] for layers in versions), merged(state))


def merged(stages: Iterable[dict[str, Tree]]) -> dict[str, Tree]:
    """Merge the layers of all stages into one dict."""
    return {layer_id: tree for stage in stages for layer_id, tree in stage.items()}


def _microbatches(batches: Iterable[Any], m: int) -> Iterator[Any]:
    for batch in batches:
        split = jax.tree.map(lambda a: a.reshape(m, -1, *a.shape[1:]), batch)
        yield from (jax.tree.map(lambda a, i=i: a[i], split) for i in range(m))
