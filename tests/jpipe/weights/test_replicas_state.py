"""Layer state of replicas without a flush: each replica has its own during training, and reads give the mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import Layer, LayerStack, Pipeline, Plan
from tests.jpipe import models
from tests.jpipe.running import check_equal


def average() -> Layer:
    """Return a layer with a factor and a running mean of its inputs that only evaluation reads, as in batch norm."""

    def init(key, x):
        return {"w": jnp.ones(x.shape[-1:], x.dtype)}, {"mean": jnp.zeros(x.shape[-1:], x.dtype)}

    def apply(params, state, x, key, train):
        if train:
            return x * params["w"][None, :], {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0)}
        return (x - state["mean"][None, :]) * params["w"][None, :], state

    return Layer(init, apply)


def pipeline(depth, schedule, m, replicas=2, **fields) -> Pipeline:
    stack = LayerStack({f"average{s}": average() for s in range(depth)})
    plan = Plan.even(stack.ids, depth, schedule, m, replicas=replicas, **fields)
    return Pipeline(stack, plan, models.squares, optax.sgd(0.0), [jax.devices()[s] for s, _ in plan.workers])


def replica_means(plan, batches) -> list[np.ndarray]:
    """Compute the running mean of each replica's forwards; the layers multiply by 1, so it is equal at all stages."""
    means = [np.zeros(models.WIDTH, np.float64) for _ in range(plan.replicas[0])]
    for t, (inputs, _) in enumerate(batches):
        for j, rows in enumerate(inputs.reshape(plan.microbatches, models.ROWS, -1)):
            r = (t * plan.microbatches + j) % len(means)
            means[r] = 0.9 * means[r] + 0.1 * rows.mean(0, dtype=np.float64)
    return means


CASES = {
    "one stage": (1, "pipedream", 2, {}),
    "one stage of 2BW": (1, "pipedream_2bw", 2, {}),
    "PipeDream": (2, "pipedream", 4, {}),
    "own updates": (2, "pipedream", 4, {"update_every": "replicas"}),
    "one microbatch each": (2, "pipedream", 2, {}),
    "three of 2BW": (1, "pipedream_2bw", 3, {"replicas": 3}),
}


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("name", CASES)
def test_after_a_drain_all_replicas_hold_the_mean_of_what_each_has_made(name):
    depth, schedule, m, fields = CASES[name]
    pipe = pipeline(depth, schedule, m, **fields)
    batches = models.batches_of(10, m * models.ROWS)
    state = pipe.init(jax.random.key(0), batches[0])
    for t, batch in enumerate(batches):
        state, _ = pipe.step(state, batch)
        if t == 4:
            state = pipe.drain(state)
            middle = [models.copied(worker.layer_state) for worker in state.workers]  # the next step deletes its arrays
    assert len({np.asarray(layer["mean"]).tobytes() for states in middle for layer in states.values()}) == 1
    ends = [np.asarray(layer["mean"]) for worker in pipe.drain(state).workers for layer in worker.layer_state.values()]
    for mean in ends:
        assert mean.tobytes() == ends[0].tobytes()
    # A mean that is taken in the middle changes no mean: the running mean is linear in what it starts from.
    np.testing.assert_allclose(ends[0], np.mean(replica_means(pipe.plan, batches), axis=0), rtol=1e-5, atol=1e-6)


def test_a_drain_with_nothing_in_flight_does_not_consume_the_state():
    """The returned state has means of layer state that the passed one lacks, but no array of the passed one is deleted."""
    pipe = pipeline(2, "pipedream", 4)
    batch = models.batches_of(1, 4 * models.ROWS)[0]
    state = pipe.init(jax.random.key(0), batch)
    drained, metrics = pipe.drain(state, with_metrics=True)
    assert drained.averaged
    assert not metrics.losses
    following, _ = pipe.step(state, batch)
    assert following.batch == 1


@pytest.mark.parametrize(("schedule", "fields"), [("pipedream_2bw", {}), ("pipedream", {"vertical_sync": True}), ("pipedream", {})])
def test_an_evaluation_in_flight_reads_the_mean_and_leaves_each_replica_its_own(schedule, fields):
    pipe = pipeline(2, schedule, 4, **fields)
    batches = models.batches_of(4, 4 * models.ROWS)
    state = pipe.init(jax.random.key(0), batches[0])
    for batch in batches:
        state, _ = pipe.step(state, batch)
    before = [models.copied(worker.layer_state) for worker in state.workers]
    losses = [float(pipe.evaluate(state, batches[0]).loss) for _ in range(2)]
    check_equal([worker.layer_state for worker in state.workers], before)
    assert len({np.asarray(layer_state["mean"]).tobytes() for worker in before[:2] for layer_state in worker.values()}) == 2
    if schedule == "pipedream" and not fields:
        state = pipe.drain(state)  # as the evaluation had to, of a copy
    y, labels = batches[0]
    for s in range(2):
        first, second = (np.asarray(worker.layer_state[f"average{s}"]["mean"]) for worker in state.workers[2 * s : 2 * s + 2])
        y = y - (first + second) / 2
    np.testing.assert_allclose(losses, [((y - labels) ** 2).mean()] * 2, rtol=1e-5)


def test_without_sync_state_each_replica_keeps_its_layer_state():
    pipe = pipeline(1, "pipedream_2bw", 2, sync_state=False)
    batches = models.batches_of(3, 2 * models.ROWS)
    state = pipe.init(jax.random.key(0), batches[0])
    for batch in batches:
        state, _ = pipe.step(state, batch)
    ends = [worker.layer_state["average0"]["mean"] for worker in pipe.drain(state).workers]
    np.testing.assert_allclose(ends, replica_means(pipe.plan, batches), rtol=1e-5, atol=1e-6)
