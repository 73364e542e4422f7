"""Compressed messages: the numbers are those of the model with the same rounding in place, whatever the schedule is."""

from functools import partial

import jax
import numpy as np
import pytest

from jpipe import LayerStack, Pipeline, Plan
from jpipe.plan import Links
from jpipe.stages.messages._compress import compress, decompress
from jpipe.stages.messages._messages import compress_message
from tests.jpipe import models, reference, running

WIDTH = 40
STACK = LayerStack({"first": models.dense(WIDTH), "second": models.noisy(0.1, WIDTH), "mix": models.dense(WIDTH), "out": models.dense()})
LINKS = {
    "bfloat16": {"activations": "bfloat16", "gradients": "bfloat16"},
    "int8": {"activations": "int8", "gradients": "int8"},
    "fp8": {"activations": "fp8", "gradients": "fp8"},
    "mixed": {"activations": "int8", "gradients": "bfloat16"},
    "activations": {"activations": "int8"},
    "gradients": {"gradients": "fp8"},
}
CASES: dict[str, dict] = {
    "gpipe": {},
    "pipedream_flush": {"recompute": "full"},
    "pipedream": {"num_stages": 3},
    "pipedream_2bw": {"replicas": [2, 1]},
    "zb_h1": {},
    "interleaved_1f1b": {"num_stages": 4, "chunks_per_rank": 2},
    "zb_v": {"num_stages": 4},
    "replicas": {"schedule": "pipedream_flush", "replicas": 2},
    "early": {"schedule": "pipedream", "split_backward": "early"},
    "parts": {"schedule": "pipedream_flush", "replicas": 2, "sum_parts": 2},
    "one rank": {"schedule": "gpipe", "num_stages": 4, "ranks": [[0, 1, 2, 3]]},
}


def plan_of(name, links, **fields) -> Plan:
    fields = {"num_stages": 2, "microbatches": 4, "schedule": name, **CASES.get(name, {}), **fields}
    return Plan.even(STACK.ids, links=None if links is None else Links(**links), **fields)


def pipeline(plan, stack=STACK, **options) -> Pipeline:
    return Pipeline(stack, plan, models.masked_squares, models.momentum(), jax.devices()[:1] * len(plan.rank_workers), **options)


def batches_of(plan, count=5):
    return models.masked_batches(count, plan.microbatches, dtype=np.float64)


def rounded(links, stage, rng, x):
    """Round what a stage sends forward, and the gradient that comes back to it."""

    def both_ways(tree, message, sender):
        return decompress(compress_message(links, tree, message, sender, rng), links.kind(message), tree)

    @jax.custom_vjp
    def identity(x):
        return both_ways(x, "activations", stage)

    identity.defvjp(lambda x: (identity(x), None), lambda _, g: (both_ways([g], "gradients", stage + 1)[0],))
    return identity(x)


def rule(pipe, batches, params, key):
    """Apply the rule, microbatch after microbatch: return the losses and the weights at the end."""
    plan, optimizer, m = pipe.plan, pipe.optimizer, pipe.plan.microbatches
    stage_of = {layer_id: s for s, stage in enumerate(plan.stages) for layer_id in stage.layers}

    @partial(jax.grad, has_aux=True)
    def gradient_of(read, x, labels, k):
        for i in STACK.ids:
            x, _ = STACK.apply([i], {i: read[i]}, {i: {}}, x, key=key, microbatch=k, train=True)
            if (s := stage_of[i]) < plan.depth - 1 and i == plan.stages[s].layers[-1]:
                x = rounded(plan.links, s, (k, key), x)
        total, weight = pipe.loss(x, labels)
        return total, (total, weight)

    gradient_of, updated = jax.jit(gradient_of), jax.jit(lambda g, state, p: optimizer.update(g, state, p))
    versions, state, losses = [params], optimizer.init(params), []
    for t, batch in enumerate(batches):
        parts = []
        for k in range(t * m, (t + 1) * m):
            x, labels = jax.tree.map(lambda a, k=k: a.reshape(m, -1, *a.shape[1:])[k % m], batch)
            read = {i: versions[reference.version(plan, stage_of[i], k)][i] for i in STACK.ids}
            parts.append(gradient_of(read, x, labels, np.uint32(k)))
        total, weight = (sum(float(numbers[j]) for _, numbers in parts) for j in range(2))
        mean = jax.tree.map(lambda *g, weight=weight: sum(g) / weight, *(gradient for gradient, _ in parts))
        changes, state = updated(mean, state, versions[-1])
        versions.append(jax.tree.map(np.add, versions[-1], changes))
        losses.append(total / weight)
    return losses, versions[-1]


def check_rule(plan):
    pipe, batches = pipeline(plan), batches_of(plan)
    state = running.fresh(pipe, batches)
    expected = rule(pipe, batches, jax.tree.map(np.asarray, pipe.params(state)), jax.random.key(running.KEY))
    found = running.train(pipe, batches, state)
    running.check_close((found.losses, found.params), expected)
    return found


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(most=6)
def test_equals_the_rule(name, kind, rounding):
    check_rule(plan_of(name, {**LINKS[kind], "rounding": rounding}))
