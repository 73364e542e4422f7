"""Rules that the papers leave open, as in docs/explanation/: 2BW, chunks, replicas, zero weights, evaluation."""

import itertools
import math

import jax
import numpy as np
import optax
import pytest

from jpipe import LayerStack, Pipeline, Plan, lower, simulate
from jpipe.schedules import SCHEDULES
from tests.jpipe import models
from tests.jpipe.running import check_equal

STACK = models.plain_stack()


def least_of_2bw(replicas, extra):
    """Return the least m: m >= d, and at every stage m >= r_s (n_s - 1), or m >= r_s n_s where r_s > 1; a multiple of each r_s."""
    ahead = [1]
    for after, current in zip(replicas[:0:-1], replicas[-2::-1], strict=True):
        ahead.insert(0, 1 + math.ceil(ahead[0] * after / current) + extra)
    needs = (r * (n - 1 + (r > 1)) for r, n in zip(replicas, ahead, strict=True))
    common = math.lcm(*replicas)
    return math.ceil(max(len(replicas), *needs) / common) * common


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 2), (2, 2, 2), (3, 3), (1, 2), (2, 1), (3, 1, 2)])
def test_2bw_with_replicas_and_more_in_flight_needs_enough_microbatches(replicas, extra):
    d, r, least = len(replicas), replicas[0], least_of_2bw(replicas, extra)
    fields = {"layers": STACK.ids, "num_stages": d, "schedule": "pipedream_2bw", "replicas": replicas, "extra_in_flight": extra}
    assert [m for m in range(1, least + 1) if models.is_legal(microbatches=m, **fields)] == [least]
    if len(set(replicas)) == 1:  # as the page has it
        assert least // r == (max(d, (1 + extra) * (d - 1)) if r == 1 else (1 + extra) * (d - 1) + 1)
    simulate(lower(Plan.even(microbatches=least, **fields), 6))  # two versions are enough, each has the delay of one update


def read_in_chunks(p, v, m, r, s, k):
    """Return floor(max(D(s, k) - l, 0) / (m / r)), with the D of docs/explanation/chunks.md."""
    rank, c, n = s % p, s // p, k // r
    w = (v - 1) * p + 2 * (p - 1 - rank)
    q = p * (v * (n // p) + c) + n % p - w - p * (v - 1 - c)
    done = max(p * (q // (v * p)) + min(q % (v * p), p), 0)
    return max(done - (r > 1), 0) * r // m


@pytest.mark.parametrize(("p", "v", "m", "r"), [(2, 2, 3, 1), (2, 2, 2, 1), (3, 2, 4, 1), (2, 3, 5, 1), (2, 2, 6, 2), (3, 2, 5, 1)])
def test_chunks_without_a_flush_run_groups_of_p_across_batches_and_drains(p, v, m, r):
    """Group a has microbatches a p to a p + p - 1 of each replica, across batches and drains."""
    ids = models.plain_stack(p * v).ids
    plan = Plan.even(ids, p * v, "pipedream", m, replicas=r, chunks_per_rank=v)
    rules = SCHEDULES["pipedream"]
    for s, k in itertools.product(range(p * v), range(6 * m)):
        assert rules.version(plan, s, k) == read_in_chunks(p, v, m, r, s, k)
    for start in range(4):  # as after a drain before that batch
        forwards = [(e.stage // p, e.microbatch // r // p) for e in rules.computations(plan, p - 1, 0, start, start + 6) if e.is_forward]
        groups = [group for _, group in forwards]
        assert forwards == sorted(forwards, key=lambda visit: (visit[1], visit[0]))
        assert groups[0] == start * m // r // p
    simulate(lower(plan, 8, begin=3, start=3))


def test_replicas_keep_their_own_layer_state_in_flushed_batches_too():
    """`flush_first` determines which weights are read; only a drain takes the mean of layer state."""
    stack = LayerStack({"track": models.tracking()})
    plan = Plan.even(stack.ids, 1, "pipedream_2bw", 4, replicas=2, flush_first=2)
    pipe = Pipeline(stack, plan, models.masked_squares, models.momentum(), jax.devices()[:1] * 2)
    batches = models.masked_batches(1, 4)
    state, _ = pipe.step(pipe.init(jax.random.key(0), batches[0]), batches[0])
    assert state.start == state.batch, "nothing is in flight"
    first, second = (np.asarray(state.workers[w].layer_state["track"]["mean"]) for w in plan.stage_workers[0])
    assert not np.array_equal(first, second)
    evaluated = float(pipe.evaluate(state, batches[0]).loss)  # reads the mean
    state = pipe.drain(state)
    for w in plan.stage_workers[0]:
        np.testing.assert_allclose(state.workers[w].layer_state["track"]["mean"], (first + second) / 2, rtol=1e-6)
    assert float(pipe.evaluate(state, batches[0]).loss) == evaluated


def masked(outputs, labels):
    """Return the masked sum of squared errors, multiplying by the mask so that NaNs propagate, and the sum of the mask."""
    return (((outputs - labels["target"]) ** 2).sum(-1) * labels["mask"]).sum(), labels["mask"].sum()


def test_a_later_stage_may_hold_more_versions_than_the_first_one():
    """With few microbatches in flight and replicas, whose sum is awaited later: two at stage 0, and three at stage 1 after a drain."""
    plan = Plan.even(STACK.ids, 3, "pipedream", 2, replicas=(1, 2, 1), max_in_flight=3)
    assert [SCHEDULES["pipedream"].versions_alive(plan, s) for s in range(3)] == [2, 3, 1]
    pipe = Pipeline(STACK, plan, models.squares, models.momentum(), jax.devices()[:1] * 4)
    batch = models.batches_of(1, 4)[0]
    state = pipe.init(jax.random.key(0), batch)
    for t in range(4):
        assert pipe.evaluate(state, batch).version <= t
        state, _ = pipe.step(state, batch)
    assert [worker.weights.versions for worker in pipe.drain(state).workers] == [(3, 4), (2, 3, 4), (2, 3, 4), (4,)]


ZERO = [
    ({"schedule": "pipedream_2bw"}, {"skip_nonfinite": True}),
    ({"schedule": "pipedream", "replicas": 2, "update_every": "replicas"}, {}),
]


@pytest.mark.parametrize(("fields", "options"), ZERO, ids=lambda value: value.get("schedule", ""))
def test_a_batch_of_weight_zero_is_divided_by_one_and_hides_no_nan(fields, options):
    plan = Plan.even(STACK.ids, 2, microbatches=4, **fields)
    devices = [jax.devices()[s] for s, _ in plan.workers]
    pipe = Pipeline(STACK, plan, masked, optax.sgd(0.1), devices, **options)
    (x, labels), (other, other_labels) = models.masked_batches(2, 4)
    nothing = labels | {"mask": np.zeros_like(labels["mask"])}
    balanced = labels | {"mask": np.resize(np.float32([1, -1]), labels["mask"].shape)}  # weighs nothing, and has a loss
    spoiled = nothing | {"target": np.full_like(labels["target"], np.nan)}
    batches = [(x, nothing), (x, balanced), (other, other_labels), (x, spoiled)]
    state = pipe.init(jax.random.key(0), batches[0])
    initial = jax.tree.map(np.asarray, pipe.params(state))
    state, metrics = pipe.step(state, batches[0])
    state, more = pipe.drain(state, with_metrics=True)
    assert (float(metrics.losses[0]), float(metrics.weights[0])) == (0.0, 0.0)
    check_equal(pipe.params(state), initial)
    errors = ((forward(initial, x) - labels["target"]) ** 2).sum(-1) * balanced["mask"]
    state, metrics = pipe.step(state, batches[1])
    if "update_every" not in fields:  # there the weights change inside the batch
        assert float(metrics.losses[1]) == pytest.approx(errors.sum(), rel=1e-5)
    assert float(metrics.losses[1]) != 0
    state, _ = pipe.step(state, batches[2])
    before = jax.tree.map(np.asarray, pipe.params(state := pipe.drain(state)))
    state, metrics = pipe.step(state, batches[3])
    state, more = pipe.drain(state, with_metrics=True)
    assert (np.isnan(float(metrics.losses[3])), float(metrics.weights[3])) == (True, 0.0)
    after = jax.tree.map(np.asarray, pipe.params(state))
    if options:
        assert float(more.nonfinite.get(3, metrics.nonfinite.get(3))) > 0
        check_equal(after, before)
    else:
        assert any(np.isnan(leaf).any() for leaf in jax.tree.leaves(after)), "as a run without pipelining has it"


def forward(params, x):
    outputs, _ = STACK.apply(STACK.ids, params, {i: {} for i in STACK.ids}, x, key=None, microbatch=0, train=True)
    return np.asarray(outputs)


EVALUATED = [
    ((1, 1), 2, {}, None),
    ((1, 2), 2, {}, 1),  # each replica of the last stage makes an update one slot later: all stages hold the version before
    ((2, 2), 8, {}, 1),
    ((1, 2), 4, {"update_every": "replicas"}, None),
]


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize(("replicas", "m", "fields", "late"), EVALUATED)
def test_an_evaluation_reads_the_newest_version_that_all_replicas_hold_or_drains_a_copy(replicas, m, fields, late):
    plan = Plan.even(STACK.ids, 2, "pipedream", m, replicas=replicas, **fields)
    pipe = Pipeline(STACK, plan, models.squares, models.momentum(), [jax.devices()[s] for s, _ in plan.workers])
    batch = models.batches_of(1, 2 * m)[0]
    state, drained = pipe.init(jax.random.key(0), batch), {}
    for t in range(5):
        rates = [plan.updates_per_batch(s) for s, _ in plan.workers]
        versions = [set(worker.weights.versions) for worker in state.workers]
        common = [v for v in range(t + 1) if all(v * rate in stage_versions for rate, stage_versions in zip(rates, versions, strict=True))]
        evaluation = pipe.evaluate(state, batch)
        assert evaluation.version == (max(common) if common else t)
        if t == 4:
            assert evaluation.version == (t if late is None else t - late)
        drained[t] = float(pipe.evaluate(pipe.drain(models.copied(state)), batch).loss)
        assert float(evaluation.loss) == drained[evaluation.version]
        state, _ = pipe.step(state, batch)
