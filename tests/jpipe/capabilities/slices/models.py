"""A small decoder, and a sequential reference that computes it slice by slice."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jpipe import Layer, LayerStack, lower
from jpipe.context import traced_positions
from jpipe.model.jaxprs._cpu_products import with_swapped_products
from jpipe.schedules import SCHEDULES

WIDTH, VOCAB, LENGTH, ROWS = 6, 11, 10, 2


def _init(names):
    def init(key, x):
        draw = {name: jax.random.normal(jax.random.fold_in(key, i), shape) * 0.4 for i, (name, shape) in enumerate(names.items())}
        return draw, {}

    return init


def _mask(key, shape):
    """Draw dropout for whole rows, and return it for the positions that are computed."""
    at = traced_positions()
    length = shape[1] if at is None else at.length
    drawn = jax.random.bernoulli(key, 0.8, (shape[0], length, *shape[2:]))
    return drawn if at is None else drawn[:, at.start : at.stop]


def embed() -> Layer:
    def apply(params, state, x, key, train):
        at = traced_positions()
        number = jnp.arange(x.shape[1]) + (0 if at is None else at.start)
        y = params["token"][x] + params["position"][number][None]
        return (y if key is None else jnp.where(_mask(key, y.shape), y / 0.8, 0.0)), state

    return Layer(_init({"token": (VOCAB, WIDTH), "position": (32, WIDTH)}), apply, stochastic=True)


def attention() -> Layer:
    """Build causal attention, whose carry has the keys and values of each earlier slice."""

    def carried(params, state, x, carry, key, train):
        q, k, v = (x @ params[name] for name in "qkv")
        carry = *(carry or ()), (k, v)
        return x + attend(q, carry), state, carry

    @partial(jax.checkpoint, policy=lambda primitive, *_, **__: primitive.name not in ("concatenate", "transpose"), prevent_cse=False)
    def attend(q, carry):
        """Compute attention. The keys and values of all slices are joined again in the backward, not kept for each slice."""
        keys, values = (jnp.concatenate(parts, 1) for parts in zip(*carry, strict=True))
        before = keys.shape[1] - q.shape[1]
        seen = jnp.arange(keys.shape[1])[None] <= before + jnp.arange(q.shape[1])[:, None]
        return jax.nn.softmax(jnp.where(seen[None], q @ keys.swapaxes(1, 2), -1e30)) @ values

    def apply(params, state, x, key, train):
        return carried(params, state, x, None, key, train)[:2]

    return Layer(_init(dict.fromkeys("qkv", (WIDTH, WIDTH))), apply, carried=carried)


def recurrent() -> Layer:
    """Build a recurrence, whose carry is its last state."""

    def carried(params, state, x, carry, key, train):
        def step(h, now):
            h = jnp.tanh(now @ params["w"] + h @ params["u"])
            return h, h

        last, states = jax.lax.scan(step, jnp.zeros_like(x[:, 0]) if carry is None else carry, x.swapaxes(0, 1))
        return x + states.swapaxes(0, 1), state, last

    def apply(params, state, x, key, train):
        return carried(params, state, x, None, key, train)[:2]

    return Layer(_init(dict.fromkeys("wu", (WIDTH, WIDTH))), apply, carried=carried)


def head() -> Layer:
    return Layer(_init({"w": (WIDTH, VOCAB)}), lambda params, state, x, key, train: (x @ params["w"], state))


def act(x):
    return jnp.tanh(x)


@functools.cache
def stack() -> LayerStack:
    return LayerStack({"embed": embed(), "attend": attention(), "act": act, "recur": recurrent(), "again": attention(), "head": head()})


def loss(logits, labels):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels["next"][..., None], -1)[..., 0]
    return -(chosen * labels["weight"]).sum(), labels["weight"].sum()


def batches(count, microbatches, length=LENGTH):
    random, size = np.random.default_rng(3), microbatches * ROWS
    return [
        (
            random.integers(0, VOCAB, (size, length)),
            {"next": random.integers(0, VOCAB, (size, length)), "weight": random.choice([0.0, 0.5, 1.0], (size, length))},
        )
        for _ in range(count)
    ]


def masked_batches(count, microbatches):
    """Return batches for `tests.jpipe.models.masked_squares`, with a target for each position."""
    random = np.random.default_rng(4)
    return [
        (
            inputs,
            {
                "target": random.normal(size=(*inputs.shape, VOCAB)).astype(np.float32),
                "mask": random.integers(0, 2, inputs.shape).astype(np.float32),
            },
        )
        for inputs, _ in batches(count, microbatches)
    ]


def in_sequence(slices, calls, update, start, plan, lengths, all_batches):
    """Train with the functions of slices, one computation after the other, and return the losses and the newest weights of each worker."""
    m, d = plan.microbatches, plan.depth
    halved = {plan.workers[i.worker][0] for i in lower(plan, 1).instructions if getattr(i, "op", "") == "I"}
    first = [start[workers[0]] for workers in plan.stage_workers]
    weights, optimizer = [[worker.weights.read(0)] for worker in first], [worker.optimizer for worker in first]  # weights: also by version
    sums, losses = [[start[w].accumulators for w in workers] for workers in plan.stage_workers], []
    ends = np.cumsum(lengths)
    for t, batch in enumerate(all_batches):
        for k in range(m):
            rows = jax.tree.map(lambda leaf: leaf[k * ROWS : (k + 1) * ROWS], batch)  # noqa: B023 - called at once
            carries, tape = [{} for _ in range(d)], []
            read = [weights[s][version(plan, s, t * m + k)] for s in range(d)]
            read_back = read if plan.stash else [weights[s][t] for s in range(d)]
            for j, functions in enumerate(slices):
                x, labels = jax.tree.map(lambda leaf: leaf[:, ends[j] - lengths[j] : ends[j]], rows)  # noqa: B023
                for s, f in enumerate(functions):
                    rng = (jnp.uint32(t * m + k), first[s].key) if f.specs.rng[1] is not None else (None, None)
                    arguments = {layer_id: {} for layer_id in f.stage.layers}, (x, carries[s]), labels if f.last else None
                    y, _, saved = calls[j][s]["forward"](read[s], *arguments, rng)
                    x, carries[s] = whole = f.with_passed(y, carries[s])
                    tape.append((j, s, f.residuals.keep(arguments, (whole, arguments[0])), saved, x, rng))
            of_carries, message = [[] for _ in range(d)], None
            for j, s, kept, saved, y, rng in reversed(tape):
                f = slices[j][s]
                flow, weight = ([y[0]], y[1]) if f.last else message
                message, r = ([*flow, *of_carries[s]], weight), k % len(sums[s])
                if s in halved:
                    (gradient, weight), stash = calls[j][s]["backward_input"](read_back[s], kept, saved, message, rng)
                    late = f.halves.late_inputs(kept, saved, message)
                    sums[s][r] = calls[j][s]["backward_weight"](read_back[s], late, stash, sums[s][r], rng)
                else:
                    (gradient, weight), sums[s][r] = calls[j][s]["backward"](read_back[s], kept, saved, message, sums[s][r], rng)
                count = len(gradient) - len(jax.tree.leaves(f.specs.input[1]))
                message, of_carries[s] = (gradient[:count], weight), gradient[count:]
        for s in range(d):
            total = functools.reduce(partial(jax.tree.map, jnp.add), sums[s])
            new, optimizer[s], zeros, mean = update[s](weights[s][t], optimizer[s], total)
            weights[s].append(new)
            sums[s] = [zeros] * len(sums[s])
        losses.append(mean[0])
    return losses, [weights[s][-1] for s, _ in plan.workers]


def version(plan, s, k):
    """Return the number of updates of the weights that the slices of microbatch k read at stage s, counted in slices."""
    slices, m, first = plan.counted.row_slices, plan.microbatches, plan.flush_first
    if k // m < first:
        return k // m
    k -= first * m
    match plan.schedule:
        case "pipedream" if len(plan.pipeline_ranks) < plan.depth:  # the newest version when the first slice of the rows begins
            order = SCHEDULES["pipedream"].computations(plan.counted, s % len(plan.pipeline_ranks), 0, first, first + k // m + 2)
            order = [entry for entry in order if entry.stage == s]
            begins = next(n for n, entry in enumerate(order) if entry.is_forward and entry.microbatch == (first * m + k) * slices)
            return first + sum(entry.finishes for entry in order[:begins]) // (m * slices)
        case "pipedream":
            ahead = plan.depth - (0 if plan.vertical_sync else s) + slices - 1
            return first + max(k * slices - (ahead - 1), 0) // (m * slices)
        case "pipedream_2bw":
            return first + max(k // m - 1, 0)
    return k // m


def jitted(slices):
    calls = ("forward", "backward", "backward_input", "backward_weight")
    return [[{name: jax.jit(with_swapped_products(getattr(f, name))) for name in calls} for f in functions] for functions in slices]


def updates(functions, update):
    return [jax.jit(partial(update, f)) for f in functions]
