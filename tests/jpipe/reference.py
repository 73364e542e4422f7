"""The rule of every schedule applied directly: one microbatch after another, all versions stored, nothing overlapped or donated."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jpipe.capabilities.global_norm.runtime import norm_of
from jpipe.schedules import SCHEDULES

NORM = jax.jit(norm_of)
ASYNCHRONOUS = ("pipedream", "pipedream_2bw")  # all others flush


class Outcome(NamedTuple):
    """Loss, weight, norm and loss scale by batch; norms by batch and stage.

    By stage: weights by version, optimizer state; by stage and replica: layer state.
    """

    losses: dict[int, Any]
    weights: dict[int, Any]
    norms: dict[int, Any]
    scales: dict[int, Any]
    stage_norms: dict[tuple[int, int], Any]
    versions: list[dict[int, Any]]
    optimizer: list[Any]
    layer_state: list[list[Any]]


def in_flight(plan, s: int) -> int:
    """Return the number of forwards that a replica of an asynchronous stage computes before its first backward."""
    after = plan.replicas[s + 1 :]
    if plan.max_in_flight is not None:
        free = plan.model_copy(update={"max_in_flight": None})
        busy = [in_flight(free, stage) for stage in range(plan.depth)]
        before = math.inf if s == 0 else (in_flight(plan, s - 1) - 1) * plan.replicas[s - 1] // plan.replicas[s] + 1
        return min(busy[s], -(-busy[s] * plan.max_in_flight // max(busy)), before)
    return 1 + -(-in_flight(plan, s + 1) * after[0] // plan.replicas[s]) + plan.extra_in_flight if after else 1


def every(plan, s: int) -> int:
    """Return the number of microbatches of an update of stage s."""
    return plan.replicas[s] if plan.update_every == "replicas" else plan.microbatches


def version(plan, s: int, k: int) -> int:
    """Return the number of updates of the weights that microbatch k reads at stage s."""
    if plan.flush_first:
        batch, free = k // plan.microbatches, plan.model_copy(update={"flush_first": 0})
        return min(batch, plan.flush_first) + version(free, s, max(k - plan.flush_first * plan.microbatches, 0))
    if plan.schedule not in ASYNCHRONOUS:
        return k // plan.microbatches
    if plan.schedule == "pipedream_2bw":
        return max(k // plan.microbatches - 1, 0)
    leader = 0 if plan.vertical_sync else s
    r = plan.replicas[leader]
    delay = 1 if r > 1 else 0
    done = k // r - in_flight(plan, leader) + 1 if plan.depth == len(plan.pipeline_ranks) else done_interleaved(plan, leader, k // r)
    return max(done - delay, 0) * r // every(plan, leader)


def done_interleaved(plan, s: int, n: int) -> int:
    """Count the backwards that a rank of several chunks has done for stage s before its n-th forward there, by doing them all."""
    ranks = len(plan.pipeline_ranks)
    chunks, warm_up = plan.depth // ranks, (plan.depth // ranks - 1) * ranks + 2 * (ranks - 1 - s % ranks)
    forward = backward = done = 0
    while True:
        group, place = divmod(forward, ranks * chunks)
        if (place // ranks, group * ranks + place % ranks) == (s // ranks, n):
            return done
        forward += 1
        if forward > warm_up:  # from here on a backward follows each forward
            done += chunks - 1 - backward % (ranks * chunks) // ranks == s // ranks
            backward += 1


def train(functions, calls, plan, start, batches, drained) -> Outcome:
    """Run `batches` with the stage functions (`calls`: jitted), from the `WorkerState`s `start` of a fresh pipeline.

    Replicas average their layer state whenever the pipeline is empty: after each batch if it flushes, else after the batches `drained`.
    """
    m, d, last, replicas = plan.microbatches, plan.depth, plan.depth - 1, plan.replicas
    fused = (op := SCHEDULES[plan.schedule].first_op(plan, last)) in ("FB", "FI")  # one program or two round differently
    first = [start[workers[0]] for workers in plan.stage_workers]
    versions = [{v: w.weights.read(v) for v in w.weights.versions} for w in first]
    optimizer = [w.optimizer for w in first]
    sums = [[start[w].accumulators for w in workers] for workers in plan.stage_workers]
    state = [[start[w].layer_state for w in workers] for workers in plan.stage_workers]
    losses, weights, norms, means, scales, stage_norms = {}, {}, {}, {}, {}, {}
    dynamic = functions[0].precision.dynamic_scale
    if dynamic is not None:
        scales, growing = {0: dynamic.initial}, 0  # by version
    for k in range(len(batches) * m):
        x, labels = jax.tree.map(lambda a: a.reshape(m, -1, *a.shape[1:])[k % m], batches[k // m])  # noqa: B023 - called at once
        read = [versions[s][version(plan, s, k)] for s in range(d)]
        draw = [(jnp.uint32(k), first[s].key) if f.specs.rng[1] is not None else (None, None) for s, f in enumerate(functions)]
        scale = [jnp.float32(scales[version(plan, 0, k)])] if scales else []
        left = {}
        for s in range(last if fused else d):
            r = k % replicas[s]
            arguments = state[s][r], x, labels if s == last else None
            x, state[s][r], saved = forward(functions[s], calls[s], read[s], arguments, draw[s])
            left[s] = functions[s].residuals.keep(arguments, (x, state[s][r])), saved
        r = k % replicas[last]
        if op == "FI":
            before, loss_arguments = (state[last][r], x, labels), (draw[last], *scale)
            x, state[last][r], sums[last][r] = in_halves(functions[last], calls[last], read[last], before, sums[last][r], loss_arguments)
        if op == "FB":
            arguments = read[last], state[last][r], x, labels, sums[last][r], draw[last], *scale
            x, sums[last][r], changed = calls[last]["forward_backward"](*arguments)
            state[last][r] = functions[last].changed.joined(changed, state[last][r])
        for s in reversed(left):
            x, sums[s][k % replicas[s]] = calls[s]["backward"](read[s], *left[s], x, sums[s][k % replicas[s]], draw[s], *scale)
        totals, norm = {s: completed(calls[s], sums[s]) for s in range(d) if (k + 1) % every(plan, s) == 0}, None
        totals = with_shared_sums(functions[0].capabilities.get("shared_parameters", ()), totals)
        norms_used = functions[0].capabilities.get("global_norm")
        if norms_used is not None and norms_used.of_all and len(totals) == d:
            norm = NORM(tuple(calls[s]["sum_squares"](totals[s]) for s in range(d)))
            norms[k // m] = norm.norm
        if scales and len(totals) == d:
            scales[k // m + 1], growing = next_scale(dynamic, scales[k // m], growing, norm.nonfinite)
        for s, total in totals.items():
            g = k // every(plan, s)
            used = norm
            if norms_used is not None and norms_used.of_stage:
                used = calls[s]["stage_norm"](total, norm)
                stage_norms[k // m, s] = used.norm
            versions[s][g + 1], optimizer[s], mean = updated(functions[s], calls[s], versions[s][g], optimizer[s], total, used)
            means |= {g: mean} if s == last else {}
        if (k + 1) % m == 0 and k // m in drained and plan.sync_state:
            state = [mean_states(copies) if len(copies) > 1 else copies for copies in state]
        if (k + 1) % m == 0:
            parts = [means[g] for g in range((k + 1 - m) // every(plan, last), (k + 1) // every(plan, last))]
            weights[k // m] = sum(weight for _, weight in parts)
            losses[k // m] = parts[0][0] if len(parts) == 1 else sum(loss * weight for loss, weight in parts) / weights[k // m]
    by_batch = {t - 1: jnp.float32(scales[t]) for t in scales if t}
    return Outcome(losses, weights, norms, by_batch, stage_norms, versions, optimizer, state)


def completed(calls, sums):
    """Return the sum over all replicas of a stage, and begin that of the next update."""
    total = sums[0]
    for part in sums[1:]:
        total = calls["add"](total, part)
    sums[:] = [jax.tree.map(jnp.zeros_like, part) for part in sums]
    return total


def forward(f, calls, params, arguments, draw):
    """Run a forward and return (output, layer state, residuals)."""
    x, changed, saved = calls["forward"](params, *arguments, draw)
    return x, f.changed.joined(changed, arguments[0]), saved


def with_shared_sums(groups, totals):
    """Replace the gradient of each parameter that several stages hold by its sum over them, in the order of the stages."""
    totals = {s: {**total, "gradients": dict(total["gradients"])} for s, total in totals.items()}
    for stages, names in groups if totals else ():
        for name in names:
            first, *others = (totals[s]["gradients"][name] for s in stages)
            for s in stages:
                totals[s]["gradients"][name] = sum(others, first)
    return totals


def updated(f, calls, params, optimizer, total, norm):
    """Update the weights and return (the next version, the next optimizer state, (mean loss, weight)).

    The parameters that other stages hold, too, are updated by a program of their own, which is the same at all of these stages.
    """
    trained, new, states, others = f.trained.part(params), {}, {}, {} if norm is None else {"global_norm": norm}
    for names in (names for stages, names in f.capabilities.get("shared_parameters", ()) if f.number in stages):
        arguments = ({name: tree[name] for name in names} for tree in (trained, optimizer, total["gradients"]))
        changed, state, _ = calls["update_entries"](*arguments, total["weight"], others)
        new, states = new | changed, states | state
    local, local_optimizer, gradients = map(f.without_apart, (trained, optimizer, total["gradients"]))
    changed, state, _, mean = calls["update"](local, local_optimizer, {**total, "gradients": gradients}, others)
    return f.trained.joined(new | changed, params), states | state, mean


def next_scale(dynamic, scale, growing, nonfinite):
    """Return the loss scale after a batch, and the number of batches since it last changed."""
    if nonfinite:
        return max(scale * 0.5, 1.0), 0
    return (max(scale * 2.0, 1.0), 0) if growing + 1 == dynamic.growth_every else (scale, growing + 1)


def in_halves(f, calls, params, arguments, sums, loss_arguments):
    """Run a forward and a backward in two halves at the last stage. Returns (gradient message, new state, accumulators)."""
    message, changed, extra = calls["forward_backward_input"](params, *arguments, *loss_arguments)
    state = f.changed.joined(changed, arguments[0])
    return message, state, calls["backward_weight"](params, *f.halves.stash_of(arguments, state, extra), sums, *loss_arguments)


def mean_states(state: list[Any]) -> list[Any]:
    """Replace the floats in each replica's layer state by their mean over all replicas."""

    def mean(first: Any, *all_: Any) -> Any:
        return sum(all_[1:], all_[0]) * (1 / len(all_)) if jnp.issubdtype(first.dtype, jnp.inexact) else first

    return [jax.tree.map(mean, replica, *state) for replica in state]
