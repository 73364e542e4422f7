"""In float64 replicated stages equal, to rounding, the rule of their schedule applied with one gradient of the whole model.

The microbatches weigh differently, and in one batch those of one replica weigh nothing: a mean of means, a part that is forgotten or
added twice would show.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import LayerStack, Pipeline, Plan
from tests.jpipe import models
from tests.jpipe.running import KEY, check_close, fresh, train, train_as_one_function

pytestmark = pytest.mark.usefixtures("float64")

# No layer state: what each replica's forwards make of it, or their mean, is not what one sequence of forwards makes.
STACK = LayerStack({"first": models.dense(), "noise": models.noisy(), "mix": models.dense(4), "out": models.dense()})


def plan_of(replicas, variant, times=1, **fields) -> Plan:
    return Plan.even(
        STACK.ids, len(replicas), microbatches=times * math.lcm(*replicas), replicas=replicas, **fields, **models.VARIANTS[variant]
    )


def batches_for(plan, count=6) -> list:
    """Return batches, one of which has weight zero in every second microbatch."""
    batches = models.masked_batches(count, plan.microbatches, dtype=np.float64)
    if plan.microbatches > 1:
        batches[2][1]["mask"].reshape(-1, models.ROWS)[1::2] = 0.0
    return batches


def pipeline(plan, **options) -> Pipeline:
    """Build a pipeline with all workers on one device, so that common programs of replicas compile once."""
    return Pipeline(STACK, plan, models.masked_squares, models.momentum(), jax.devices()[:1] * len(plan.workers), **options)


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(
    ("variant", "replicas", "times"),
    [
        ("naive", (2, 1), 2),
        ("gpipe", (1, 3), 1),
        ("pipedream_flush", (3,), 1),
        ("pipedream_flush", (2, 1, 1), 2),
        ("pipedream", (1, 3), 1),
        ("pipedream", (2, 1, 1), 1),
        ("pipedream", (2, 2), 2),
        ("pipedream_vertical_sync", (2, 1, 1), 1),
        ("pipedream_2bw", (2, 1), 2),
        ("pipedream_2bw", (3,), 1),
    ],
)
def test_equals_one_gradient_of_the_whole_model(variant, replicas, times):
    plan = plan_of(replicas, variant, times)
    pipe, batches = pipeline(plan), batches_for(plan)
    state = fresh(pipe, batches)
    expected = train_as_one_function(pipe, batches, state)
    check_close(train(pipe, batches, state), expected)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [pytest.param((2,), marks=pytest.mark.exhaustive), (2, 1, 2)])
def test_clipping_by_the_global_norm_equals_optax_on_the_whole_tree(replicas):
    plan = plan_of(replicas, "pipedream_flush", 2)
    pipe, batches, norms = pipeline(plan, clip_global_norm=2.5), batches_for(plan), []
    state = fresh(pipe, batches)
    expected = train_as_one_function(pipe, batches, state)
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        norms += [float(norm) for norm in metrics.norms.values()]
    check_close(pipe.params(state), expected.params)
    assert min(norms) < 2.5 < max(norms), "some batches are clipped, some are not"


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("variant", ["gpipe", "pipedream_flush", "pipedream_2bw"])
def test_parallel_pipelines_change_nothing(variant):
    replicated, straight = plan_of((2, 2), variant, 2), plan_of((1, 1), variant, 4)
    batches = batches_for(straight)
    check_close(train(pipeline(replicated), batches), train(pipeline(straight), batches))


@pytest.mark.slow
def test_stages_that_update_at_rates_of_their_own_equal_the_rule_written_out():
    """In 2-1-1 of the original PipeDream, stage 0 updates after two microbatches and reads late, the others after each one."""
    every, reads = (2, 1, 1), (lambda k: max(k // 2 - 2, 0), lambda k: max(k - 1, 0), lambda k: k)
    plan = plan_of((2, 1, 1), "pipedream", 2, update_every="replicas")
    pipe, batches, optimizer = pipeline(plan), batches_for(plan), models.momentum()
    fresh_state = fresh(pipe, batches)
    start = models.on_first_device(pipe.params(fresh_state))
    versions = [[{i: start[i] for i in stage.layers}] for stage in plan.stages]
    states, sums, losses = [optimizer.init(v[0]) for v in versions], [[], [], []], []

    @jax.jit
    def loss(params, x, labels, k):
        y, _ = STACK.apply(STACK.ids, params, {i: {} for i in STACK.ids}, x, key=jax.random.key(KEY), microbatch=k, train=True)
        return models.masked_squares(y, labels)

    for k in range(len(batches) * 4):
        x, labels = jax.tree.map(lambda leaf: leaf[k % 4 * models.ROWS :][: models.ROWS], batches[k // 4])  # noqa: B023 - called at once
        read = {i: params for s in range(3) for i, params in versions[s][reads[s](k)].items()}
        (total, weight), gradient = jax.value_and_grad(loss, has_aux=True)(read, x, labels, np.uint32(k))
        losses.append((total, weight))
        for s, stage in enumerate(plan.stages):
            sums[s].append((weight, {i: gradient[i] for i in stage.layers}))
            if len(sums[s]) == every[s]:
                weights, gradients = zip(*sums[s], strict=True)
                mean = jax.tree.map(lambda *parts: sum(parts) / (sum(weights) or 1.0), *gradients)  # noqa: B023 - the same
                updates, states[s] = optimizer.update(mean, states[s])
                versions[s].append(jax.tree.map(lambda w, u: w + u, versions[s][-1], updates))
                sums[s] = []
    result = train(pipe, batches, fresh_state)
    check_close(result.params, {i: params for v in versions for i, params in v[-1].items()})
    totals, weights = np.array(losses).reshape(-1, 4, 2).sum(1).T
    check_close(np.array(result.losses), totals / weights)


@pytest.mark.parametrize("sync_state", [True, False])
@pytest.mark.slow
def test_replicas_hold_the_mean_of_their_states_or_each_its_own(sync_state):
    stack = LayerStack({"track": models.tracking(), "out": models.dense()})
    plan = Plan.even(stack.ids, 1, "pipedream_flush", 6, replicas=3, sync_state=sync_state)
    pipe = Pipeline(stack, plan, models.masked_squares, optax.sgd(0.1))
    batches = models.masked_batches(3, 6, dtype=np.float64)
    state, means = fresh(pipe, batches), np.zeros((3, models.WIDTH))
    for t, batch in enumerate(batches):
        state, _ = pipe.step(state, batch)
        for k, rows in enumerate(batch[0].reshape(6, models.ROWS, -1)):
            means[k % 3] = 0.9 * means[k % 3] + 0.1 * rows.mean(0)
        if sync_state:
            means[:] = means.mean(0)
        for worker, mean in zip(state.workers, means, strict=True):
            check_close(worker.layer_state["track"], {"mean": mean, "count": np.int32(2 * (t + 1))})
            check_close(worker.weights, models.on_first_device(state.workers[0].weights))
    assert len(set(np.round(means, 6)[:, 0])) == (1 if sync_state else 3)
    assert jnp.isfinite(pipe.evaluate(state, batches[0]).loss)
