"""Stages on meshes equal stages on single devices: in float64 up to rounding, bit for bit where no sum changes its order."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jpipe import InputError, LayerStack, Pipeline, Plan, lower, simulate
from jpipe.meshes._partition import shard_bytes
from jpipe.runtime._snapshot import average_replicas
from tests.jpipe import models, running

ROWS = 4  # of a microbatch
MESHES = {
    "rows": [{"data": 2}] * 2,
    "weights": [{"model": 2}] * 2,
    "both": [{"data": 2, "model": 2}] * 2,
    "unlike": [{"model": 2}, {"data": 4}],
    "unlike, the other way": [{"data": 4}, {"data": 2, "model": 2}],
    "only the last": [{}, {"model": 4}],
    "one device": [{"data": 1, "model": 1}] * 2,
}
SCHEDULES = {
    "naive": {"schedule": "naive", "microbatches": 2},
    "gpipe": {"schedule": "gpipe", "microbatches": 3},
    "flush": {"schedule": "pipedream_flush", "microbatches": 3},
    "pipedream": {"schedule": "pipedream", "microbatches": 1},
    "vertical sync": {"schedule": "pipedream", "microbatches": 1, "vertical_sync": True},
    "2bw": {"schedule": "pipedream_2bw", "microbatches": 3},
    "zb_h1": {"schedule": "zb_h1", "microbatches": 3},
    "early": {"schedule": "pipedream_2bw", "microbatches": 3, "split_backward": "early"},
}


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def trained(plan: Plan, stack=None, steps: int = 4, **options) -> tuple[running.Trained, Pipeline]:
    pipe = Pipeline(stack or models.wide_stack(), plan, models.masked_squares, models.momentum(), **options)
    return running.train(pipe, batches_for(plan, steps)), pipe


def batches_for(plan: Plan, count: int = 4) -> list:
    return models.masked_batches(count, plan.microbatches, rows=ROWS, width=4, dtype=np.float64)


def even(**fields) -> Plan:
    return Plan.even(models.wide_stack().ids, fields.pop("num_stages", 2), **fields)


def check_close(actual: running.Trained, expected: running.Trained) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_changes_no_number(mesh, schedule):
    expected, _ = trained(even(**SCHEDULES[schedule]))
    actual, _ = trained(even(**SCHEDULES[schedule], mesh=MESHES[mesh]))
    if mesh == "one device":
        for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    check_close(actual, expected)


OPTIONS = {
    "fsdp": {"mesh": {"data": 2, "model": 2}, "fsdp": True},
    "fsdp of rows only": {"mesh": {"data": 4}, "fsdp": True},
    "clipped": {"mesh": {"data": 2, "model": 2}, "clip_global_norm": 0.5},
    "recomputed": {"mesh": {"data": 2, "model": 2}, "fsdp": True, "recompute": "full"},
    "average": {"mesh": {"model": 2}, "ema_decay": 0.9},
    "replicas": {"mesh": {"model": 2}, "replicas": 2, "microbatches": 4},
    "replicas of one stage": {"mesh": [{"model": 2}, {"data": 2, "model": 2}], "replicas": (2, 1), "microbatches": 4},
    "tied": {"mesh": {"data": 2, "model": 2}, "tied": True},
}


@pytest.mark.exhaustive
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("schedule", ["gpipe", "pipedream_2bw"])
@pytest.mark.parametrize("option", OPTIONS)
def test_other_features_of_a_run_are_equal_on_a_mesh(option, schedule):
    fields = {"microbatches": 3, **OPTIONS[option], "schedule": schedule}
    options = {name: fields.pop(name) for name in ("clip_global_norm", "ema_decay") if name in fields}
    stack = models.wide_stack(fields.pop("tied", False))
    plain = {name: value for name, value in fields.items() if name not in ("mesh", "fsdp")}
    expected, _ = trained(even(**plain), stack, **options)
    actual, _ = trained(even(**fields), stack, **options)
    check_close(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream_flush", pytest.param("pipedream_2bw", marks=pytest.mark.exhaustive)])
def test_workers_that_share_the_devices_of_a_mesh_compute_one_after_the_other(schedule):
    """Six workers share pairs of eight devices; their collectives must not wait for each other's threads."""
    stack = LayerStack({"a": models.dense(4), "b": models.dense(4)})
    plain = Plan.even(stack.ids, 2, schedule=schedule, microbatches=6)
    expected, _ = trained(plain, stack, steps=2)
    plan = Plan.even(stack.ids, 2, schedule=schedule, microbatches=6, replicas=3, mesh={"data": 2})
    pipe = Pipeline(stack, plan, models.masked_squares, models.momentum())
    shared = [[place.devices for place in pipe.places].count(place.devices) > 1 for place in pipe.places]
    assert shared == [True, True, False] * 2
    waited = []

    def observe(event):
        if event.done is not None and shared[event.instruction.worker]:
            waited.append(event.done.is_ready())

    batches = batches_for(pipe.plan, 2)
    state, losses = running.fresh(pipe, batches), []
    for batch in batches:
        state, metrics = pipe.step(state, batch, observe=observe)
        losses += metrics.losses.values()
    state, metrics = pipe.drain(state, with_metrics=True)
    assert all(waited)
    assert len(waited) > 20
    check_close(running.Trained([float(x) for x in losses], pipe.params(state), running.layer_state(state)), expected)
    assert np.isfinite(float(pipe.evaluate(state, batches[0]).loss))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zb_v", pytest.param("interleaved_1f1b", marks=pytest.mark.exhaustive)])
def test_chunks_on_meshes_change_no_number(schedule):
    fields = {"num_stages": 4, "schedule": schedule, "microbatches": 4, "chunks_per_rank": 2}
    expected, _ = trained(even(**fields))
    actual, _ = trained(even(**fields, mesh={"data": 2, "model": 2}, fsdp=True))
    check_close(actual, expected)


@pytest.mark.slow
def test_each_device_holds_its_share_and_the_run_is_measured_as_predicted():
    plan = even(schedule="pipedream_2bw", microbatches=2, mesh={"data": 2, "model": 2}, fsdp=True)
    pipe = Pipeline(models.wide_stack(), plan, models.masked_squares, optax.adam(1e-2))
    batches = batches_for(plan)
    state = pipe.init(jax.random.key(0), batches[0])
    worker, _ = state.workers
    weights = worker.weights.read(0)
    assert weights["track"]["w"].sharding.spec == PartitionSpec("data", "model")
    assert weights["track"]["w"].addressable_shards[0].data.shape == (2, 2)
    assert weights["noise"]["b"].sharding.spec == PartitionSpec("data"), "it names no axes: fsdp alone shards it"
    costs = pipe.costs(batches[0])
    per_device = sum(shard.data.nbytes for leaf in jax.tree.leaves(weights) for shard in leaf.addressable_shards[:1])
    assert costs[0].weights == per_device < sum(leaf.nbytes for leaf in jax.tree.leaves(weights)) / 2
    assert costs[0].optimizer == sum(map(shard_bytes, jax.tree.leaves(worker.optimizer))) < 2 * per_device + 64
    gc.collect()
    before = [alive(place.first) for place in pipe.places]
    peaks = [0, 0]

    def observe(event):
        peaks[event.instruction.worker] = max(peaks[event.instruction.worker], alive(pipe.devices[event.instruction.worker]))

    for batch in batches:
        state, _ = pipe.step(state, batch, observe=observe)
    predicted = simulate(lower(plan, len(batches)), pipe.costs(batches[0])).held_bytes
    resting = [sum(cost[name] for name in ("weights", "optimizer", "state", "accumulators")) for cost in map(vars, costs)]
    assert [most - at_first + bytes_at_rest for most, at_first, bytes_at_rest in zip(peaks, before, resting, strict=True)] == pytest.approx(
        predicted, abs=64
    )


def alive(device: jax.Device) -> int:
    """Return the bytes of all live arrays on a device, except keys and markers of computations."""
    arrays = [a for a in jax.live_arrays() if device in a.devices() and not a.is_deleted()]
    return sum(shard_bytes(a) for a in arrays if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key) and a.dtype != bool)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream_flush", pytest.param("pipedream_2bw", marks=pytest.mark.exhaustive)])
def test_a_run_resumes_under_another_mesh(schedule):
    before = even(schedule=schedule, microbatches=2, mesh={"data": 2, "model": 2}, fsdp=True)
    batches = batches_for(before, 5)
    pipe = Pipeline(models.wide_stack(), before, models.masked_squares, models.momentum())
    state = pipe.init(jax.random.key(running.KEY), batches[0])
    snapshot = pipe.snapshot(2)
    for batch in batches:
        state, _ = pipe.step(state, batch, observe=snapshot)
    state = pipe.drain(state, observe=snapshot)
    for after in (before, even(schedule=schedule, microbatches=2, mesh=[{"model": 4}, {}]), even(schedule=schedule, microbatches=2)):
        other = Pipeline(models.wide_stack(), after, models.masked_squares, models.momentum())
        layers = average_replicas(jax.tree.map(np.asarray, snapshot.layers()))
        resumed = other.restore(jax.random.key(running.KEY), batches[0], layers, 2)
        for batch in batches[2:]:
            resumed, _ = other.step(resumed, batch)
        actual, expected = other.params(other.drain(resumed)), pipe.params(state)
        for one, another in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(one), np.asarray(another), rtol=1e-10, atol=1e-12)


def test_stages_that_share_a_parameter_have_one_mesh():
    plan = even(schedule="gpipe", microbatches=2, mesh=[{"model": 2}, {"data": 2}])
    with pytest.raises(InputError, match="ties: expected the same mesh for all stages that share 'noise shared w', found stage 0 on"):
        trained(plan, models.wide_stack(tied=True))
