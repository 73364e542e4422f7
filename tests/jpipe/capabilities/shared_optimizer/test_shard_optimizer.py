"""Replicas that shard the optimizer state of their stage (ZeRO stage 1): equal numbers with a part of the state."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest

from jpipe import InputError, Link, Pipeline, Plan, Precision, checkpoints, lower, simulate
from jpipe.capabilities.shared_optimizer.program import deal
from jpipe.programs import ProgramError, StageCost
from jpipe.programs._instructions import Send
from jpipe.runtime._plain import to_plain
from jpipe.runtime._snapshot import with_optimizers
from tests.jpipe import models, running

STEPS = 4


def plan_of(sharded: bool = True, **fields) -> Plan:
    fields = {"num_stages": 2, "schedule": "gpipe", "microbatches": 4, "replicas": 2} | fields
    return Plan.even(models.rich_stack().ids, **fields, shard_optimizer=sharded)


def pipeline(plan: Plan, stack=None, optimizer=None, **options) -> Pipeline:
    return Pipeline(stack or models.rich_stack(), plan, models.masked_squares, optimizer or models.momentum(), **options)


def batches_for(plan: Plan, wide: bool = False, count: int = STEPS) -> list:
    return models.masked_batches(count, plan.microbatches, dtype=np.float64, **({"rows": 4, "width": 4} if wide else {}))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def check_bits(actual, expected) -> None:
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


CASES = {
    "gpipe": {},
    "flush, clipped": {"schedule": "pipedream_flush", "clip_global_norm": 0.5},
    "skipped": {"schedule": "zb_h1", "skip_nonfinite": True},
    "naive": {"schedule": "naive", "microbatches": 2},
    "chunks": {"schedule": "interleaved_1f1b", "num_stages": 4, "chunks_per_rank": 2},
    "one replica at the end": {"replicas": (2, 1)},
    "four replicas": {"replicas": (4, 2), "num_stages": 2},
    "data parallel": {"num_stages": 1, "schedule": "pipedream_flush", "replicas": 3, "microbatches": 6},
    "more replicas than layers": {"num_stages": 4, "replicas": 2},
    "masters": {"precision": Precision(params="bfloat16")},
    "float16": {"schedule": "pipedream_flush", "precision": Precision(params="float16", loss_scale="dynamic")},
    "tied": {"tied": True},
    "tied in a stage": {"tied": True, "num_stages": 1, "schedule": "pipedream_flush", "precision": Precision(params="bfloat16")},
    "2bw": {"schedule": "pipedream_2bw"},
    "2bw, four replicas, clipped": {"schedule": "pipedream_2bw", "replicas": (4, 2), "microbatches": 8, "clip_global_norm": 0.5},
    "2bw, tied": {"schedule": "pipedream_2bw", "tied": True},
    "2bw, one stage, masters": {"schedule": "pipedream_2bw", "num_stages": 1, "precision": Precision(params="bfloat16")},
    "2bw, chunks": {"schedule": "pipedream_2bw", "num_stages": 4, "chunks_per_rank": 2, "microbatches": 8},
    "pipedream": {"schedule": "pipedream", "microbatches": 2},
    "pipedream, three versions": {"schedule": "pipedream", "replicas": (2, 1, 2), "num_stages": 3, "microbatches": 2},
    "vertical sync": {"schedule": "pipedream", "vertical_sync": True, "clip_global_norm": 0.5},
    "meshes": {"wide": True, "mesh": {"data": 2}, "fsdp": True},
    "tied on meshes": {"wide": True, "tied": True, "mesh": {"model": 2}, "clip_global_norm": 0.5},
}
OPTIONS = ("clip_global_norm", "skip_nonfinite", "precision")


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("case", CASES)
def test_the_numbers_equal_those_without_sharding(case):
    fields = dict(CASES[case])
    options = {name: fields.pop(name) for name in OPTIONS if name in fields}
    tied, wide = fields.pop("tied", False), fields.pop("wide", False)
    stack = models.wide_stack(tied) if wide else models.tied_stack() if tied else models.rich_stack()
    without, shared = (plan_of(sharded, **fields) for sharded in (False, True))
    expected = running.train(pipeline(without, stack, **options), batches_for(without, wide))
    actual = running.train(pipeline(shared, stack, **options), batches_for(shared, wide))
    if tied or wide:  # XLA may round the update of a layer in other ways beside other layers
        running.check_close(actual, expected)
    else:
        check_bits(actual, expected)


@pytest.mark.slow
def test_a_skipped_batch_changes_nothing():
    pipe = pipeline(plan_of(schedule="pipedream_flush"), skip_nonfinite=True)
    batches = batches_for(pipe.plan)
    state = pipe.init(jax.random.key(0), batches[0])
    state, _ = pipe.step(state, batches[0])
    before = jax.tree.map(np.asarray, [(worker.weights.read(1), worker.optimizer) for worker in state.workers])
    bad = batches[1][0] * np.nan, batches[1][1]
    state, metrics = pipe.step(state, bad)
    assert max(metrics.nonfinite.values()) > 0
    check_bits([(worker.weights.read(2), worker.optimizer) for worker in state.workers], before)


@pytest.mark.slow
def test_each_replica_holds_and_updates_its_share_and_copies_are_its_own():
    pipe = pipeline(plan_of(), optimizer=optax.adam(1e-2), devices=[jax.devices()[0]] * 4)
    batches = batches_for(pipe.plan)
    state = pipe.init(jax.random.key(0), batches[0])
    layers = [worker.optimizer.keys() for worker in state.workers]
    assert list(map(len, layers)) == [1] * 4
    assert [layers[w] | layers[w + 1] for w in (0, 2)] == [set(stage.layers) for stage in pipe.plan.stages]
    calls = [stage.calls for stage in pipe._executor.stages.values()]
    assert calls[0]["forward"] is calls[1]["forward"], "replicas on one device share what does not depend on their share"
    assert calls[0]["in_place"] is not calls[1]["in_place"]
    for batch in batches:
        state, _ = pipe.step(state, batch)
    for first, second in ((0, 1), (2, 3)):
        check_bits(state.workers[first].weights, state.workers[second].weights)
    addresses = [leaf.unsafe_buffer_pointer() for worker in state.workers for leaf in jax.tree.leaves(worker.weights)]
    assert len(set(addresses)) == len(addresses)
    costs = pipe.costs(batches[0])
    optimizer_bytes = [sum(leaf.nbytes for leaf in jax.tree.leaves(worker.optimizer)) for worker in state.workers]
    assert [cost.optimizer for cost in costs] == [max(optimizer_bytes[:2]), max(optimizer_bytes[2:])]
    assert [sum(cost.updated) for cost in costs] == [cost.weights for cost in costs]


@pytest.mark.slow
def test_a_run_resumes_with_a_sharded_optimizer_and_without():
    """Restore in all directions, with other replicas and cuts, and with the masters that some replica has."""
    options = {"precision": Precision(params="bfloat16"), "optimizer": optax.adam(1e-2)}
    plans = [plan_of(), plan_of(False), plan_of(num_stages=1, schedule="pipedream_flush", replicas=4)]
    batches, key = batches_for(plans[0], count=3), jax.random.key(3)
    pipes, afterwards = [pipeline(plan, **options) for plan in plans], []
    for source, pipe in enumerate(pipes):
        state, snapshot = pipe.init(key, batches[0]), pipe.snapshot(2)
        for batch in batches:
            state, _ = pipe.step(state, batch, observe=snapshot)
        afterwards.append(pipe.params(state))
        layers = jax.tree.map(np.asarray, snapshot.layers())
        for target, other in enumerate(pipes):
            other.check_layers(batches[0], layers, 2)
            resumed = other.restore(key, batches[0], layers, 2)
            states = [{entry: to_plain(part) for entry, part in worker.optimizer.items()} for worker in resumed.workers]
            for entry, plain in with_optimizers(layers).items():
                owners = [part[entry] for part in states if entry in part]
                assert owners or " replica " in entry
                for copy in owners:
                    check_bits(copy, plain["optimizer"])
            if source < 2 and target < 2:  # the same cut and sums, so the same bits from here on
                resumed, _ = other.step(resumed, batches[2])
                check_bits(other.params(resumed), afterwards[0])
        fresh = pipe.restore(key, batches[0], layers, 2, fresh_optimizer=True)
        check_bits(pipe.params(fresh), pipe.params(pipe.restore(key, batches[0], layers, 2)))


@pytest.mark.slow
@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("schedule", ["pipedream_2bw", "pipedream"])
@pytest.mark.parametrize("saving", [True, False])
def test_a_run_without_a_flush_resumes_with_a_sharded_optimizer_and_without(saving, schedule):
    """Microbatches and updates are in flight at the checkpoint, and replicas may lack what others update."""
    pipes = {sharded: pipeline(plan_of(sharded, schedule=schedule)) for sharded in (True, False)}
    batches, key = batches_for(pipes[True].plan, count=6), jax.random.key(3)
    source = pipes[saving]
    state = source.init(key, batches[0])
    snapshot = source.snapshot(3)
    for batch in batches[:5]:
        state, _ = source.step(state, batch, observe=snapshot)
        evaluated = source.evaluate(state, batches[0])
        assert np.isfinite(evaluated.loss)
    state, _ = source.step(state, batches[5], observe=snapshot)
    expected = source.params(source.drain(state, observe=snapshot))
    resuming = pipes[not saving]
    state = resuming.restore(key, batches[0], jax.tree.map(np.asarray, snapshot.layers()), 3)
    for batch in batches[3:]:
        state, _ = resuming.step(state, batch)
    check_bits(resuming.params(resuming.drain(state)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"num_stages": 1}, {"replicas": (2, 1)}, {"schedule": "pipedream", "replicas": (4, 2), "microbatches": 8}]
)
def test_steps_do_what_one_long_run_does(fields):
    """Early updates of replicas, too."""
    plan = plan_of(**{"schedule": "pipedream_2bw"} | fields)
    for norm in (False, plan.schedule == "pipedream_2bw"):
        whole = lower(plan, 7, global_norm=norm)
        simulate(whole)
        parts = [lower(plan, b + 1, begin=b, drain=b == 6, global_norm=norm).instructions for b in range(7)]
        assert tuple(i for part in parts for i in part) == whole.instructions


@pytest.mark.exhaustive
def test_a_checkpoint_on_disk_has_each_layers_optimizer_state(tmp_path):
    pipe = pipeline(plan_of(), precision=Precision(params="bfloat16"))
    batches = batches_for(pipe.plan, count=2)
    state, snapshot = pipe.init(jax.random.key(3), batches[0]), pipe.snapshot(2)
    for batch in batches:
        state, _ = pipe.step(state, batch, observe=snapshot)
    checkpoints.save(tmp_path, snapshot)
    for name in pipe.stack.ids:
        read = checkpoints.Checkpoint(tmp_path, 2).read([name])
        assert list(read) == [name]
        assert read[name]["optimizer"].keys() >= {"masters"}
        assert checkpoints.Checkpoint(tmp_path, 2).specs()[name]["optimizer"].keys() == read[name]["optimizer"].keys()
    other = pipeline(plan_of(False), precision=Precision(params="bfloat16"))
    check_bits(other.params(checkpoints.load(other, tmp_path, jax.random.key(3), batches[0])), pipe.params(state))


def test_programs_give_the_weights_before_they_are_read():
    plan = plan_of(schedule="pipedream_flush")
    program = lower(plan, 2)
    sends = [i for i in program.instructions if isinstance(i, Send) and i.message == "weights"]
    assert [(i.worker, i.to) for i in sends] == [(0, 1), (1, 0), (2, 3), (3, 2)] * 2
    costs = [StageCost(weights=6, optimizer=6, updated=(4, 2), accumulators=6)] * 2
    free, slow = (simulate(program, costs, link=link) for link in (None, Link(bandwidth=0.5)))
    assert slow.seconds > free.seconds
    assert free.moved_bytes == tuple(2 * (6 + size) for size in (4, 2, 4, 2)), "a sum of gradients and what is updated, twice"
    assert free.held_bytes == simulate(lower(plan_of(False, schedule="pipedream_flush"), 2), costs).held_bytes
    first = next(n for n, i in enumerate(program.instructions) if i == sends[0])
    without = program.instructions[:first] + program.instructions[first + 2 :]
    with pytest.raises(ProgramError, match=r"version 1 lacks the weights that workers \[0\] have updated"):
        simulate(replace(program, instructions=without))


def test_parts_are_dealt_evenly_the_largest_first():
    assert deal([(4, 0), (3, 0), (2, 0), (3, 0)], 2) == [0, 1, 0, 1]
    assert deal([(0, 1), (0, 5), (0, 3)], 2) == [1, 0, 1], "without optimizer state the weights are dealt"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "pipedream", "update_every": "replicas"}, "plan: shard_optimizer: expected update_every 'batch', found 'replicas'"),
        ({"schedule": "pipedream_2bw", "max_in_flight": 1}, "plan: shard_optimizer: expected no max_in_flight under the schedule"),
        ({"replicas": 1}, "plan: shard_optimizer: expected a stage with replicas, found none"),
    ],
)
def test_a_plan_that_cannot_share_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        plan_of(**fields)


def test_an_average_of_the_weights_is_refused():
    with pytest.raises(InputError, match=r"ema_decay: expected no plan\.shard_optimizer with 0\.9: the average is in"):
        pipeline(plan_of(), ema_decay=0.9)
