"""The rule of every schedule applied directly: one microbatch after the other, every version kept, nothing overlapped, nothing donated."""

from typing import Any, NamedTuple

import jax

FLUSHING = ("naive", "gpipe", "pipedream_flush")


class Outcome(NamedTuple):
    """Loss and weight by batch; by stage: weights by version, optimizer state, layer state."""

    losses: dict[int, Any]
    weights: dict[int, Any]
    versions: list[dict[int, Any]]
    optimizer: list[Any]
    layer_state: list[Any]


def version(plan, s: int, k: int) -> int:
    """How many updates the weights have seen that microbatch k reads at stage s."""
    m, ahead = plan.microbatches, lambda stage: 1 + (1 + plan.extra_in_flight) * (plan.depth - 1 - stage)
    if plan.schedule in FLUSHING:
        return k // m
    return {
        "pipedream": max(k - (ahead(0 if plan.vertical_sync else s) - 1), 0) // m,
        "pipedream_2bw": max(k // m - 1, 0),
    }[plan.schedule]


def train(functions, calls, plan, start, batches) -> Outcome:
    """Run `batches` with the stage functions (`calls`: jitted), from the `WorkerState`s `start` of a fresh pipeline."""
    m, d, last = plan.microbatches, plan.depth, plan.depth - 1
    fused = m == 1 or plan.schedule != "gpipe"  # the backward follows its forward at once at the last stage
    versions, optimizer, state, sums = ([getattr(w, name) for w in start] for name in ("versions", "optimizer", "layer_state", "sums"))
    losses, weights = {}, {}
    for k in range(len(batches) * m):
        x, labels = jax.tree.map(lambda a: a.reshape(m, -1, *a.shape[1:])[k % m], batches[k // m])  # noqa: B023 - called at once
        read = [versions[s][version(plan, s, k)] for s in range(d)]
        draw = [(jax.numpy.uint32(k), start[s].key) if f.specs.draw[1] is not None else (None, None) for s, f in enumerate(functions)]
        left = {}
        for s in range(last if fused else d):
            arguments = state[s], x, labels if s == last else None
            x, state[s], saved = calls[s]["forward"](read[s], *arguments, draw[s])
            left[s] = functions[s].residuals.keep(arguments, (x, state[s])), saved
        if fused:
            x, sums[last], state[last] = calls[last]["forward_backward"](read[last], state[last], x, labels, sums[last], draw[last])
        for s in reversed(left):
            x, sums[s] = calls[s]["backward"](read[s], *left[s], x, sums[s], draw[s])
        for s in range(d if (k + 1) % m == 0 else 0):
            t = k // m
            weights[t] = sums[last].pop("weight") if s == 0 else weights[t]
            versions[s][t + 1], optimizer[s], sums[s], losses[t] = calls[s]["update"](versions[s][t], optimizer[s], sums[s], weights[t])
    return Outcome(losses, weights, versions, optimizer, state)
