"""The rule of every schedule applied directly: one microbatch after the other, every version kept, nothing overlapped, nothing donated."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

FLUSHING = ("naive", "gpipe", "pipedream_flush")


class Outcome(NamedTuple):
    """Loss and weight by batch; by stage: weights by version, optimizer state; by stage and replica: layer state."""

    losses: dict[int, Any]
    weights: dict[int, Any]
    versions: list[dict[int, Any]]
    optimizer: list[Any]
    layer_state: list[list[Any]]


def in_flight(plan, s: int) -> int:
    """How many forwards a replica of an asynchronous stage does before its first backward."""
    after = plan.replicas[s + 1 :]
    if plan.noam:
        return -(-(plan.replicas[s] + sum(after)) // plan.replicas[s])
    return 1 + -(-in_flight(plan, s + 1) * after[0] // plan.replicas[s]) + plan.extra_in_flight if after else 1


def every(plan, s: int) -> int:
    """How many microbatches an update of stage s sees."""
    return plan.replicas[s] if plan.update_every == "replicas" else plan.microbatches


def version(plan, s: int, k: int) -> int:
    """How many updates the weights have seen that microbatch k reads at stage s."""
    if plan.schedule in FLUSHING:
        return k // plan.microbatches
    if plan.schedule == "pipedream_2bw":
        return max(k // plan.microbatches - 1, 0)
    leader = 0 if plan.vertical_sync else s
    r = plan.replicas[leader]
    late = 1 if r > 1 and not plan.noam else 0
    return max(k // r - in_flight(plan, leader) + 1 - late, 0) * r // every(plan, leader)


def train(functions, calls, plan, start, batches, drained) -> Outcome:
    """Run `batches` with the stage functions (`calls`: jitted), from the `WorkerState`s `start` of a fresh pipeline.

    Only layer state that replicas average depends on when the pipeline was `drained` (after which batches).
    """
    m, d, last, replicas = plan.microbatches, plan.depth, plan.depth - 1, plan.replicas
    fused = plan.schedule != "gpipe" or m == replicas[last]  # the backward follows its forward at once at the last stage
    first = [start[workers[0]] for workers in plan.stage_workers]
    versions, optimizer = ([getattr(w, name) for w in first] for name in ("versions", "optimizer"))
    sums = [[start[w].sums for w in workers] for workers in plan.stage_workers]
    state = [[start[w].layer_state for w in workers] for workers in plan.stage_workers]
    seen = [[[start[w].layer_state] for w in workers] for workers in plan.stage_workers]  # after so many forwards of each replica
    losses, weights, found = {}, {}, {}
    for k in range(len(batches) * m):
        x, labels = jax.tree.map(lambda a: a.reshape(m, -1, *a.shape[1:])[k % m], batches[k // m])  # noqa: B023 - called at once
        read = [versions[s][version(plan, s, k)] for s in range(d)]
        draw = [(jnp.uint32(k), first[s].key) if f.specs.draw[1] is not None else (None, None) for s, f in enumerate(functions)]
        left = {}
        for s in range(d):
            average_states(calls[s], plan, s, k, state[s], seen[s], drained)
        for s in range(last if fused else d):
            r = k % replicas[s]
            arguments = state[s][r], x, labels if s == last else None
            x, state[s][r], saved = calls[s]["forward"](read[s], *arguments, draw[s])
            left[s] = functions[s].residuals.keep(arguments, (x, state[s][r])), saved
        r = k % replicas[last]
        if fused:
            arguments = read[last], state[last][r], x, labels, sums[last][r], draw[last]
            x, sums[last][r], state[last][r] = calls[last]["forward_backward"](*arguments)
        for s in range(d):
            seen[s][k % replicas[s]].append(state[s][k % replicas[s]])
        for s in reversed(left):
            x, sums[s][k % replicas[s]] = calls[s]["backward"](read[s], *left[s], x, sums[s][k % replicas[s]], draw[s])
        for s in range(d):
            if (k + 1) % every(plan, s) == 0:
                g, total = k // every(plan, s), sums[s][0]
                for part in sums[s][1:]:
                    total = calls[s]["add"](total, part)
                sums[s] = [jax.tree.map(jnp.zeros_like, part) for part in sums[s]]
                versions[s][g + 1], optimizer[s], _, mean = calls[s]["update"](versions[s][g], optimizer[s], total)
                found |= {g: mean} if s == last else {}
        if (k + 1) % m == 0:
            parts = [found[g] for g in range((k + 1 - m) // every(plan, last), (k + 1) // every(plan, last))]
            weights[k // m] = sum(weight for _, weight in parts)
            losses[k // m] = parts[0][0] if len(parts) == 1 else sum(loss * weight for loss, weight in parts) / weights[k // m]
    for s in range(d):
        for r in range(replicas[s]):
            average_states(calls[s], plan, s, len(batches) * m + r, state[s], seen[s], drained)
    return Outcome(losses, weights, versions, optimizer, state)


def average_states(calls, plan, s, k, state, seen, drained) -> None:
    """Before its forward k a replica moves to the means of those updates that it makes between this and its previous forward."""
    r = plan.replicas[s]
    if r == 1 or not plan.sync_state:
        return
    own, n = every(plan, s) // r, in_flight(plan, s)
    ends = [(t + 1) * plan.microbatches // r for t in sorted(drained)]  # forwards of a replica when the pipeline is empty
    past: dict[int, list] = {}  # while it is drained: all replicas after each update
    for g in range(k // r // own):
        done = own * (g + 1)  # forwards whose backwards make the update
        empty = min((end for end in ends if end >= done), default=done + n + 2 * own)
        read = next(j for j in range(done, done + n + 2 * own + 1) if j == empty or version(plan, s, j * r + k % r) > g)
        if min(read, done + own + n - 1, empty) != k // r:
            continue
        before = done + n - 1  # forwards when the last of these backwards is over, and when it is, update g - 1 is not made
        then = [replica[before] for replica in seen] if before < empty else past.get(g - 2, [replica[empty] for replica in seen])
        floats = [[leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)] for tree in then]
        total = [sum(column[1:], column[0]) for column in zip(*floats, strict=True)]
        if k // r < empty:
            state[k % r] = calls["average_state"](state[k % r], then[k % r], total)
        elif k % r == 0:  # for all replicas at once
            state[:] = past[g] = [calls["average_state"](now, own_then, total) for now, own_then in zip(state, then, strict=True)]
