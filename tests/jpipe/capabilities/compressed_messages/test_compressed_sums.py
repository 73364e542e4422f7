"""Compressed sums of gradients: the numbers are those of the rule with error feedback, whatever the schedule is."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import InputError, Link, Pipeline, Plan, lower, simulate
from jpipe.capabilities.compressed_messages.compress import compress, decompress
from jpipe.plan import Links
from jpipe.programs import LayerCost, StageCost, sum_layer_costs
from tests.jpipe import models, running
from tests.jpipe.capabilities.compressed_messages.test_links import MESHES, STACK, batches_of, pipeline, rule

KINDS = ("bfloat16", "int8", "fp8")
CASES: dict[str, dict] = {
    "gpipe": {},
    "pipedream_flush": {"replicas": 3, "microbatches": 6},
    "pipedream": {"num_stages": 3, "replicas": [2, 1, 1]},
    "pipedream_2bw": {"replicas": [2, 1]},
    "zb_h1": {},
    "interleaved_1f1b": {"num_stages": 4, "chunks_per_rank": 2},
    "zb_v": {"num_stages": 4},
    "early": {"schedule": "pipedream_2bw", "split_backward": "early"},
    "parts": {"schedule": "pipedream_flush", "sum_parts": 2},
    "parts, 2BW": {"schedule": "pipedream_2bw", "sum_parts": 2},
    "one stage": {"schedule": "gpipe", "num_stages": 1, "replicas": 4},
    "shared optimizer": {"schedule": "pipedream_flush", "shard_optimizer": True},
}


def plan_of(name, links, **fields) -> Plan:
    fields = {"num_stages": 2, "microbatches": 4, "replicas": 2, "schedule": name, **CASES.get(name, {}), **fields}
    return Plan.even(STACK.ids, links=None if links is None else Links(**links), **fields)


def errors_of(worker):
    """Return what rounding has lost of the gradients of a worker, by entry."""
    return worker.capabilities["compressed_messages"]


class Replicas:
    """The replicas of all stages, with what rounding has lost at each of them."""

    def __init__(self, plan, key, weights) -> None:
        self.plan, self.key, self.weights, self.errors = plan, key, weights, {}
        self.stages = list(enumerate(zip(plan.stages, plan.replicas, strict=True)))

    def mean(self, t, parts, weight):
        """Sum what the replicas of each stage send, and divide it by the weight of the update."""
        mean = {}
        for s, (stage, count) in self.stages:
            for n, layer_id in enumerate(sorted(stage.layers)):
                leaves = [self.sent(t, s, k, n, layer_id, parts[k::count]) for k in range(count)]
                treedef = jax.tree.structure(parts[0][0][layer_id])
                mean[layer_id] = jax.tree.unflatten(treedef, [sum(of_replicas) / weight for of_replicas in zip(*leaves, strict=True)])
        return mean

    def sent(self, t, s, k, n, layer_id, parts):
        """Return what a replica sends for one layer, by leaf."""
        weight, count = sum(float(numbers[1]) for _, numbers in parts), self.plan.replicas[s]
        sent = []
        for i, leaves in enumerate(zip(*(jax.tree.leaves(gradient[layer_id]) for gradient, _ in parts), strict=True)):
            total, place = sum(map(np.asarray, leaves)), (s, k, layer_id, i)
            if count > 1:
                error = self.errors.get(place, np.zeros_like(total))
                wanted = total + weight * error
                total = wanted.copy()
                for shard in self.shards_of(layer_id, i):
                    total[shard] = both_ways(self.plan.links, wanted[shard], self.key_of(s, t * count + k, n, i))
                self.errors[place] = (wanted - total) / weight if weight else error
            sent.append(total)
        return sent

    def shards_of(self, layer_id, i):
        """Return the distinct shards of an array, which are compressed one by one; without a mesh there is one."""
        leaf = jax.tree.leaves(self.weights[layer_id])[i]
        return {str(index): index for index in leaf.sharding.devices_indices_map(leaf.shape).values()}.values()

    def key_of(self, *numbers):
        key = jax.random.fold_in(self.key, 8)
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return key


@partial(jax.jit, static_argnums=0)
def both_ways(links, x, key):
    """Round one array in blocks of neighbouring values."""
    row = x.reshape(1, -1)
    key = key if links.rounding == "stochastic" else None
    return decompress(compress(row, links.sums, key), links.sums, row).reshape(x.shape)


def check_rule(plan, batches=None, whole=None, **options):
    """Compare a run with the rule; `whole` is the optimizer of the whole tree, if it is another than that of the layers."""
    pipe, batches = pipeline(plan, **options), batches or batches_of(plan)
    state, key = running.fresh(pipe, batches), jax.random.key(running.KEY)
    params = pipe.params(state)
    replicas = Replicas(plan, key, params)
    expected = rule(pipe, batches, jax.tree.map(np.asarray, params), key, replicas.mean, whole)
    found = running.train(pipe, batches, state)
    running.check_close((found.losses, found.params), expected)
    return found, replicas


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.thinned(most=3)
def test_equals_the_rule(name, kind, rounding):
    _, replicas = check_rule(plan_of(name, {"sums": kind, "rounding": rounding}))
    assert max(np.abs(error).max() for error in replicas.errors.values()) > 0


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("mesh", "fsdp"), [("weights", False), ("rows", True)])
def test_shards_are_compressed_one_by_one(mesh, fsdp):
    found, replicas = check_rule(plan_of("pipedream_2bw", {"sums": "int8"}, fsdp=fsdp, **MESHES[mesh]))
    assert len(replicas.shards_of("first", 1)) == 2
    assert all(np.isfinite(found.losses))


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_with_compressed_messages_and_clipping_by_the_norm_of_the_sums():
    links = {"sums": "int8", "activations": "fp8", "gradients": "int8"}
    whole = optax.chain(optax.clip_by_global_norm(0.3), models.momentum())
    check_rule(plan_of("pipedream_2bw", links), whole=whole, clip_global_norm=0.3)


@pytest.mark.usefixtures("float64")
def test_a_replica_whose_rows_weigh_nothing_keeps_its_error():
    plan = plan_of("gpipe", {"sums": "int8"}, num_stages=1, microbatches=2)
    batches, rows = batches_of(plan), models.ROWS
    for _, labels in batches:
        labels["mask"][:] = 1
    batches[2][1]["mask"][:rows] = 0
    check_rule(plan, batches)


@pytest.mark.slow
def test_a_skipped_batch_leaves_no_nan_in_the_errors():
    plan = plan_of("gpipe", {"sums": "int8"})
    pipe, batches = pipeline(plan, skip_nonfinite=True), models.masked_batches(4, plan.microbatches)
    batches[1] = (np.full_like(batches[1][0], np.nan), batches[1][1])
    state = running.fresh(pipe, batches)
    before = jax.tree.map(np.asarray, pipe.params(state))
    for batch in batches:
        state, metrics = pipe.step(state, batch)
    assert np.isfinite(float(metrics.losses[3]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves([errors_of(worker) for worker in state.workers]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(pipe.params(state)))
    with pytest.raises(AssertionError):
        running.check_equal(pipe.params(state), before)


RESUMED = {
    "pipedream_2bw": {"sum_parts": 2},
    "pipedream_flush": {},
    "pipedream": {"update_every": "replicas", "replicas": [3, 2, 1]},
}


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_from_a_snapshot_equals_the_run_that_continued(name):
    """With layer state, dropout, and replicas that hold the same bits."""
    fields = {"schedule": name, "microbatches": 6, "replicas": 2, "links": {"sums": "int8", "rounding": "stochastic"}, **RESUMED[name]}
    stack = models.rich_stack()
    plan = Plan.even(stack.ids, 3, **fields)
    pipe = Pipeline(stack, plan, models.masked_squares, models.momentum(), jax.devices()[:1] * len(plan.rank_workers))
    batches, cut = models.masked_batches(6, plan.microbatches), 3
    state, snapshot, losses = running.fresh(pipe, batches), pipe.snapshot(cut), {}
    for batch in batches:
        state, metrics = pipe.step(state, batch, observe=None if snapshot.complete else snapshot)
        losses |= metrics.losses
    state, metrics = pipe.drain(state, with_metrics=True)
    layers = jax.tree.map(np.asarray, snapshot.layers())
    again = pipe.restore(jax.random.key(running.KEY), batches[0], layers, cut)
    found = {}
    for batch in batches[cut:]:
        again, resumed = pipe.step(again, batch)
        found |= resumed.losses
    again, resumed = pipe.drain(again, with_metrics=True)
    running.check_equal(found | resumed.losses, {t: loss for t, loss in (losses | metrics.losses).items() if t >= cut})
    running.check_equal(*([(errors_of(worker), worker.optimizer, worker.layer_state) for worker in s.workers] for s in (again, state)))
    running.check_equal(pipe.params(again), pipe.params(state))
    for workers in plan.stage_workers:
        newest = [state.workers[w].weights.read(state.workers[w].weights.newest) for w in workers]
        for other in newest[1:]:
            running.check_equal(other, newest[0])


@pytest.mark.slow
def test_the_error_goes_on_with_as_many_replicas_and_else_begins_with_zeros():
    plan = plan_of("pipedream_flush", {"sums": "int8"}, microbatches=6, replicas=2)
    pipe, batches = pipeline(plan), models.masked_batches(3, 6)
    state, snapshot = running.fresh(pipe, batches), pipe.snapshot(2)
    for batch in batches[:2]:
        state, _ = pipe.step(state, batch, observe=snapshot)
    layers = jax.tree.map(np.asarray, snapshot.layers())
    found = {}
    others = {
        "other kind and cut": plan_of("gpipe", {"sums": "fp8"}, num_stages=1, microbatches=6),
        "three replicas": plan_of("gpipe", {"sums": "int8"}, num_stages=1, microbatches=6, replicas=3),
        "no sums": plan_of("gpipe", None, num_stages=1, microbatches=6, replicas=1),
    }
    for name, other in others.items():
        restored = pipeline(other).restore(jax.random.key(running.KEY), batches[0], layers, 2)
        found[name] = [worker.capabilities.get("compressed_messages") for worker in restored.workers]
    expected = [errors_of(state.workers[k]) | errors_of(state.workers[2 + k]) for k in range(2)]
    running.check_equal(found["other kind and cut"], expected)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(found["three replicas"]))
    assert found["no sums"] == [None]
    begun = pipe.restore(jax.random.key(running.KEY), batches[0], layers, 2, fresh_optimizer=True)
    assert all(not np.any(leaf) for worker in begun.workers for leaf in jax.tree.leaves(errors_of(worker)))


def test_compressed_bytes_are_counted():
    """Each replica sends all it has to each other one: of 4 replicas three times as much as one."""
    moved, batch = {}, models.masked_batches(1, 4)[0]
    for kind in (None, *KINDS):
        plan = plan_of("gpipe", kind and {"sums": kind}, num_stages=1, replicas=4)
        costs = pipeline(plan).costs(batch)
        prediction = simulate(lower(plan, 2), costs, Link(bandwidth=100.0))
        moved[kind] = prediction.moved_bytes[0]
        (summed, _) = [transfer for transfer in prediction.transfers if transfer.what == "sum"]
        assert prediction.moved_bytes == (2 * summed.size,) * 4
    sizes = [leaf.size for spec in STACK.specs(batch[0]).values() for leaf in jax.tree.leaves(spec.params)]
    numbers = 2 * 4  # the loss and the weight
    assert moved[None] == 2 * 2 * 3 / 4 * (4 * sum(sizes) + numbers)
    assert moved["bfloat16"] == 2 * 3 * (2 * sum(sizes) + numbers)
    blocks = sum(-(-size // 256) for size in sizes)
    assert moved["int8"] == moved["fp8"] == 2 * 3 * (sum(sizes) + 4 * blocks + numbers)
    layers = {layer_id: LayerCost(1.0, 2.0, weights=1024, residuals={"none": 0}) for layer_id in STACK.ids}
    for parts, sent in ((1, (520, 520)), (2, (260, 260))):
        first, _ = sum_layer_costs(plan_of("pipedream_flush", {"sums": "int8"}, replicas=[2, 1], sum_parts=parts), layers)
        assert (first.gathered, first.kept) == (sent if parts == 2 else sent[:1], 2048)


def test_what_is_given_to_a_sum_takes_less_memory_than_the_gradients_until_the_sum_is_there():
    costs = [StageCost(accumulators=400, kept=400, gathered=(104,))]
    plan = plan_of("gpipe", {"sums": "int8"}, num_stages=1, microbatches=2)
    prediction = simulate(lower(plan, 1), costs, Link())
    assert prediction.held_bytes == (800, 800)
    assert prediction.peak_bytes == (400 + 400 + 2 * 104,) * 2
    for schedule in ("pipedream_2bw", "pipedream"):
        plan = plan_of(schedule, {"sums": "int8"}, num_stages=2, replicas=2)
        samples = [sample for rank in simulate(lower(plan, 4), costs * 2, Link()).memory for sample in rank]
        assert min(min(sample.gradients, sample.other) for sample in samples) >= 0


def test_what_is_not_supported_is_refused():
    sums = {"sums": "int8"}
    for fields, message in (
        (
            {"agree": {"every": 2}},
            r"plan: links\.sums: expected no agree: pipelines that agree sum no gradients; remove one of them",
        ),
        (
            {"replicas": 1},
            r"plan: links\.sums: expected a stage with replicas, found 'int8' and no replicas; remove links.sums, or give a stage replicas",
        ),
        ({"links": {"sums": "int4"}}, r"plan: links\.sums: expected 'bfloat16', 'int8' or 'fp8', found 'int4'"),
    ):
        with pytest.raises(InputError, match=message):
            Plan.even(STACK.ids, 2, **{"links": sums, "replicas": 2, **fields})
    stack = models.tied_stack()
    plan = Plan.even(stack.ids, 2, "gpipe", 4, replicas=2, links=sums)
    with pytest.raises(InputError, match=r"ties: expected no plan\.links\.sums with .*, found 'int8': .*; put"):
        Pipeline(stack, plan, models.masked_squares, models.momentum())


@pytest.mark.slow
def test_layers_that_share_a_parameter_inside_a_stage():
    stack = models.tied_stack()
    plan = Plan.even(stack.ids, 1, "gpipe", 4, replicas=2, links={"sums": "bfloat16"})
    batches = models.masked_batches(4, 4)
    found, expected = (
        running.train(Pipeline(stack, one, models.masked_squares, models.momentum(), jax.devices()[:1] * 2), batches)
        for one in (plan, plan.model_copy(update={"links": None}))
    )
    running.check_close(found.losses, expected.losses, 0.02)
    assert found.losses != expected.losses
    assert jnp.isfinite(jnp.asarray(found.losses)).all()
