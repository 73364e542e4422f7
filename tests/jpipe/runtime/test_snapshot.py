"""Snapshots of a run: they do not change it, and a run that starts from one is equal bit for bit."""

import chex
import jax
import numpy as np
import optax
import pytest

import jpipe
from jpipe import InputError, Pipeline
from jpipe.runtime import _snapshot as snapshot
from tests.jpipe import models, running

BATCHES = 7
CUTS = (1, 4)

PLANS = {
    "naive": {"schedule": "naive"},
    "gpipe": {"schedule": "gpipe"},
    "flush": {"schedule": "pipedream_flush", "recompute": "full"},
    "pipedream": {"schedule": "pipedream"},
    "pipedream, one microbatch": {"schedule": "pipedream", "microbatches": 1},
    "vertical sync": {"schedule": "pipedream", "vertical_sync": True, "microbatches": 1},
    "2BW": {"schedule": "pipedream_2bw"},
    "2BW, more in flight": {"schedule": "pipedream_2bw", "microbatches": 6, "extra_in_flight": 1},
    "2-1-1": {"schedule": "pipedream", "replicas": [2, 1, 1], "microbatches": 4},
    "2-1-1, own updates": {"schedule": "pipedream", "replicas": [2, 1, 1], "microbatches": 4, "update_every": "replicas"},
    "3-1-2, own updates": {"schedule": "pipedream", "replicas": [3, 1, 2], "microbatches": 6, "update_every": "replicas"},
    "3-2-1, own state": {"schedule": "pipedream", "replicas": [3, 2, 1], "microbatches": 6, "sync_state": False},
    "two pipelines of 2BW": {"schedule": "pipedream_2bw", "replicas": 2, "microbatches": 6},
    "two pipelines of GPipe": {"schedule": "gpipe", "replicas": 2, "microbatches": 4},
    "interleaved": {"schedule": "interleaved_1f1b", "num_stages": 4, "chunks_per_rank": 2},
    "ZB-V": {"schedule": "zb_v", "num_stages": 4},
    "2BW with chunks": {"schedule": "pipedream_2bw", "num_stages": 4, "chunks_per_rank": 2},
    "PipeDream with chunks": {"schedule": "pipedream", "num_stages": 4, "chunks_per_rank": 2},
    "2BW, early gradients": {"schedule": "pipedream_2bw", "split_backward": "early"},
}


CLIPPED = {
    "GPipe": {"schedule": "gpipe"},
    "2BW": {"schedule": "pipedream_2bw"},
    "vertical sync": {"schedule": "pipedream", "vertical_sync": True},
    "two pipelines of 2BW": {"schedule": "pipedream_2bw", "replicas": 2, "microbatches": 6},
}


def plan_of(fields):
    return jpipe.Plan.even(models.rich_stack().ids, **({"num_stages": 3, "microbatches": 3} | fields))


def pipeline(plan, optimizer=None, **options):
    devices = [jax.devices()[plan.workers[workers[0]][0]] for workers in plan.rank_workers]
    return Pipeline(models.rich_stack(), plan, models.masked_squares, optimizer or models.momentum(), devices, **options)


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def trained(pipe, state, batches, cuts=()):
    """Return the losses, the final parameters and layer state, and the layers of each snapshot."""
    losses, snapshots, cut_layers, of_states = {}, {}, {}, {}
    first = state.batch
    for t, batch in enumerate(batches, start=first):
        if t + 1 in cuts:
            snapshots[t + 1] = pipe.snapshot(t + 1)

        def observe(event):
            for one in snapshots.values():
                one(event)

        state, metrics = pipe.step(state, batch, observe=observe)
        losses |= {t: float(loss) for t, loss in metrics.losses.items()}
        if t + 1 in cuts:
            of_states[t + 1] = on_host(pipe.snapshot(state).layers())
        cut_layers |= {t: on_host(one.layers()) for t, one in snapshots.items() if one.complete and t not in cut_layers}
    state, metrics = pipe.drain(state, with_metrics=True)
    losses |= {t: float(loss) for t, loss in metrics.losses.items()}
    running.check_equal(of_states, cut_layers)  # a snapshot of a state is the one that was copied on the way
    return losses, pipe.params(state), running.layer_state(state), cut_layers


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("name", PLANS)
def test_a_run_from_a_snapshot_equals_the_run_that_continued(name):
    check_restored(name, plan_of(PLANS[name]))


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("name", CLIPPED)
def test_a_restored_run_is_equal_where_updates_wait_for_the_norm(name):
    check_restored(name, plan_of(CLIPPED[name]), clip_global_norm=3.0)


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("fields", [{"schedule": "pipedream", "vertical_sync": True}, {"schedule": "pipedream_2bw"}], ids=["sync", "2bw"])
def test_a_restored_run_is_equal_where_a_forward_and_half_a_backward_are_one_program(fields):
    check_restored("early", plan_of({**fields, "split_backward": "early"}), clip_global_norm=3.0)


def check_restored(name, plan, **options):
    pipe, batches = pipeline(plan, **options), models.masked_batches(BATCHES, plan.microbatches)
    losses, params, state, cut_layers = trained(pipe, running.fresh(pipe, batches), batches, CUTS)
    assert list(cut_layers) == list(CUTS)
    for t in CUTS if name in ("2-1-1", "vertical sync") else CUTS[1:]:
        original = jax.tree.map(np.copy, cut_layers[t])
        restored = pipe.restore(jax.random.key(running.KEY), batches[0], cut_layers[t], t)
        assert (restored.batch, restored.start) == (t, t)
        resumed = trained(pipe, restored, batches[t:])
        running.check_equal({batch: loss for batch, loss in losses.items() if batch >= t}, resumed[0])
        running.check_equal((params, state), resumed[1:3])
        running.check_equal(cut_layers[t], original)  # an update may write into memory that it is given, not into that of the caller


@pytest.mark.parametrize("name", ["vertical sync", "2BW", "pipedream, one microbatch"])
def test_validation_after_a_restore_is_of_the_weights_that_it_would_have_been(name):
    plan = plan_of(PLANS[name])
    pipe, batches = pipeline(plan), models.masked_batches(BATCHES, plan.microbatches)
    *_, cut_layers = trained(pipe, running.fresh(pipe, batches), batches, (3,))
    states = running.fresh(pipe, batches), pipe.restore(jax.random.key(running.KEY), batches[0], cut_layers[3], 3)
    versions = []
    for state in states:
        for batch in batches[state.batch : 4]:
            state, _ = pipe.step(state, batch)
        evaluation = pipe.evaluate(state, batches[0])
        versions.append(evaluation.version)
    assert versions[0] == versions[1]


@pytest.mark.parametrize("name", ["gpipe", "2BW", "3-1-2, own updates"])
def test_a_snapshot_changes_no_numbers(name):
    plan = plan_of(PLANS[name])
    pipe, batches = pipeline(plan), models.masked_batches(BATCHES, plan.microbatches)
    state = running.fresh(pipe, batches)
    running.check_equal(trained(pipe, models.copied(state), batches)[:3], trained(pipe, state, batches, CUTS)[:3])


OTHER_PLANS = [
    {"num_stages": 1, "schedule": "gpipe"},
    {"num_stages": 2, "schedule": "pipedream_2bw"},
    {"num_stages": 4, "schedule": "pipedream"},
    {"num_stages": 2, "schedule": "pipedream", "replicas": [1, 2]},
    {"num_stages": 4, "schedule": "pipedream_2bw", "chunks_per_rank": 2},
]


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize("first", ["2-1-1", "gpipe", "pipedream", "2BW", "2BW with chunks"])
def test_a_run_resumes_under_any_other_plan(first):
    """The snapshot holds the newest weights, the optimizer state, and older weights as far as they are stored."""
    plan = plan_of(PLANS[first])
    pipe, batches = pipeline(plan), models.masked_batches(6, plan.microbatches)
    *_, cut_layers = trained(pipe, running.fresh(pipe, batches), batches[:5], (3,))
    newest = {layer_id: cut_layers[3][layer_id]["params"]["0"] for layer_id in pipe.stack.ids}
    momenta = {layer_id: jax.tree.leaves(cut_layers[3][layer_id]["optimizer"]) for layer_id in pipe.stack.ids}
    batches = models.masked_batches(2, 12, seed=3)
    for fields in OTHER_PLANS:
        resumed_pipe = pipeline(jpipe.Plan.even(models.rich_stack().ids, microbatches=12, **fields))
        state = resumed_pipe.restore(jax.random.key(running.KEY), batches[0], cut_layers[3], 3)
        running.check_equal(on_host(resumed_pipe.params(state)), newest)
        for worker in state.workers:
            for layer_id, optimizer_state in worker.optimizer.items():
                running.check_equal(on_host(jax.tree.leaves(optimizer_state)), momenta[layer_id])
            for version in worker.weights.versions:
                for layer_id, params in worker.weights.read(version).items():
                    ages = cut_layers[3][layer_id]["params"]
                    running.check_equal(on_host(params), ages.get(str(worker.weights.newest - version), ages["0"]))
        losses, *_ = trained(resumed_pipe, state, batches)
        assert sorted(losses) == [3, 4]
        assert np.isfinite(list(losses.values())).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("interleaved", "ZB-V"),
        *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in (("gpipe", "interleaved"), ("ZB-V", "flush"))),
    ],
    ids=["to chunks", "to a V", "to one stage a rank"],
)
def test_a_run_resumes_with_other_chunks(first, then):
    """Schedules that flush are plain training under every plan, equal up to rounding because XLA compiles other stages."""
    pipe, other = (pipeline(plan_of(PLANS[name])) for name in (first, then))
    batches = models.masked_batches(6, pipe.plan.microbatches)
    losses, params, state, cut_layers = trained(pipe, running.fresh(pipe, batches), batches, (3,))
    resumed = trained(other, other.restore(jax.random.key(running.KEY), batches[0], cut_layers[3], 3), batches[3:])
    assert resumed[0] == pytest.approx({t: loss for t, loss in losses.items() if t >= 3}, rel=1e-5)
    chex.assert_trees_all_close((params, state), resumed[1:3], rtol=1e-5, atol=1e-6)


def state_of(layers, layer_id):
    """Return the running means and the counts of a layer's replicas from the layers of a checkpoint."""
    states = [layers[name]["state"] for name in sorted(layers) if name == layer_id or name.startswith(f"{layer_id} replica ")]
    return [one["mean"] for one in states], [int(one["count"]) for one in states]


@pytest.fixture(scope="module")
def of_three_replicas():
    """Return the layers of a snapshot at batch 2, with a stage of three replicas that never flushes, and a batch."""
    plan = plan_of({"schedule": "pipedream_2bw", "num_stages": 2, "replicas": [3, 1], "microbatches": 6})
    pipe, batches = pipeline(plan), models.masked_batches(4, 6)
    return trained(pipe, running.fresh(pipe, batches), batches, (2,))[3][2], batches[0]


@pytest.mark.parametrize(
    ("fields", "keeps_state"),
    [
        ({"schedule": "pipedream_2bw", "replicas": [3, 1]}, True),
        ({"schedule": "pipedream_2bw", "replicas": [2, 1]}, False),
        ({"schedule": "gpipe", "replicas": [3, 1]}, False),
        ({"schedule": "naive", "replicas": [1, 1]}, False),
    ],
)
def test_replicas_restore_their_own_layer_state_or_the_mean(fields, keeps_state, of_three_replicas):
    layers, batch = of_three_replicas
    means, counts = state_of(layers, "track")
    assert len({mean.tobytes() for mean in means}) == 3
    old = layers["track"] | {"late": {"0": {"then": {}, "total": {}, "after": np.int32(1)}}}  # as versions before wrote; it is left out
    resumed_pipe = pipeline(plan_of({"num_stages": 2, "microbatches": 6} | fields))
    state = resumed_pipe.restore(jax.random.key(running.KEY), batch, layers | {"track": old}, 2)
    mean = (means[0] + means[1] + means[2]) * np.float32(1 / 3)
    for replica, worker in enumerate(state.workers[:-1]):
        expected = {"mean": means[replica] if keeps_state else mean, "count": np.int32(counts[replica])}
        running.check_equal(on_host(worker.layer_state["track"]), expected)
    if keeps_state:  # nothing is in flight, and a drain gives the mean all the same
        running.check_equal([on_host(worker.layer_state["track"]["mean"]) for worker in resumed_pipe.drain(state).workers[:-1]], [mean] * 3)


def test_layers_of_a_cut_are_averaged_over_the_replicas(of_three_replicas):
    layers, _ = of_three_replicas
    means, counts = state_of(layers, "track")
    averaged = jpipe.runtime.average_replicas(layers)
    assert sorted(averaged) == sorted(models.rich_stack().ids)
    running.check_equal(
        averaged["track"]["state"], {"mean": (means[0] + means[1] + means[2]) * np.float32(1 / 3), "count": np.int32(counts[0])}
    )
    running.check_equal(averaged["mix"], layers["mix"])
    strange = layers | {"track replica 1": {"state": {"mean": np.zeros(7, np.float32), "count": np.int32(0)}}}
    with pytest.raises(
        InputError, match=r"layer state of 'track replica 1': expected 'mean' as in the model, float32\[3\], found float32\[7\]"
    ):
        jpipe.runtime.average_replicas(strange)


@pytest.fixture(scope="module")
def cut_at_batch_2():
    """Return the layers of a snapshot at batch 2, the batches and the plan."""
    plan = plan_of({"schedule": "pipedream_2bw"})
    pipe, batches = pipeline(plan), models.masked_batches(4, 3)
    return trained(pipe, running.fresh(pipe, batches), batches, (2,))[3][2], batches, plan


def restored(cut, layers, optimizer=None, **options):
    _, batches, plan = cut
    return pipeline(plan, optimizer).restore(jax.random.key(running.KEY), batches[0], layers, 2, **options)


def without(layers, layer_id):
    return {name: plain for name, plain in layers.items() if name != layer_id}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layers: without(layers, "mix"), "checkpoint: layer 'mix' of the model is missing; is it of another model?"),
        (
            lambda layers: (
                layers | {"mix": layers["mix"] | {"params": {"0": {"b": np.zeros(3, np.float32), "w": np.zeros((3, 4), np.float32)}}}}
            ),
            "checkpoint: layer 'mix', parameters: expected 'w' as in the model, float32[3, 3], found float32[3, 4]",
        ),
        (
            lambda layers: layers | {"mix": layers["mix"] | {"params": {}}},
            "checkpoint: layer 'mix', parameters: the model's array 'b', float32[3], is missing; is it of another model?",
        ),
        (
            lambda layers: layers | {"track": {"params": layers["track"]["params"], "optimizer": layers["track"]["optimizer"]}},
            "checkpoint: layer 'track', state: the model's array 'count', int32[], is missing; is it of another model?",
        ),
        (
            lambda layers: layers | {"mix": layers["mix"] | {"params": {"0": layers["mix"]["params"]["0"] | {"more": np.zeros(1)}}}},
            "checkpoint: layer 'mix', parameters: 'more' is not in the model; is it of another model?",
        ),
        (
            lambda layers: layers | {"mix": layers["mix"] | {"params": np.zeros(2, np.float32)}},
            "checkpoint: layer 'mix', parameters: expected a dict, found float32[2]; was it written by jpipe?",
        ),
        (
            lambda layers: layers | {"mix": layers["mix"] | {"params": {"0": np.zeros(2, np.float32)}}},
            "checkpoint: layer 'mix', parameters: expected a dict, found float32[2]; was it written by jpipe?",
        ),
    ],
)
def test_a_snapshot_of_another_model_is_refused(change, message, cut_at_batch_2):
    with pytest.raises(InputError) as error:
        restored(cut_at_batch_2, change(cut_at_batch_2[0]))
    assert str(error.value) == message


@pytest.mark.slow
def test_another_optimizer_needs_fresh_state_or_is_refused(cut_at_batch_2):
    with pytest.raises(InputError, match=r"layer 'track', optimizer state: the model's array '0/count', int32\[\], is missing"):
        restored(cut_at_batch_2, cut_at_batch_2[0], optax.adam(0.1))
    state = restored(cut_at_batch_2, cut_at_batch_2[0], optax.adam(0.1), fresh_optimizer=True)
    assert int(state.workers[0].optimizer["track"]["0"]["count"]) == 0


def test_random_keys_and_any_other_tree_come_back():
    tree = {"key": jax.random.key(3), "pair": (np.ones(2), [np.zeros(1)]), "numbered": {7: np.arange(3)}, "none": None}
    plain = snapshot.to_plain(tree)
    assert plain["numbered"].keys() == {"7"}
    specs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
    running.check_equal(snapshot.from_plain(specs, plain, "it"), tree)
    assert list(snapshot.to_plain(np.ones(2))) == ["array"]
