"""Rows in slices: the numbers of whole rows, the bits of a sequential reference, and what is refused."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jpipe import InputError, Layer, LayerStack, Pipeline, Plan, Precision, Tie, lower, simulate
from jpipe.capabilities.global_norm.runtime import waits_for
from jpipe.capabilities.slices.option import lengths_by_cost, lengths_of
from jpipe.programs import ProgramError, StageCost
from jpipe.programs._instructions import Update
from jpipe.runtime import fit_costs
from jpipe.runtime._trace import _inputs
from jpipe.schedules import SCHEDULES
from jpipe.schedules._schedule import most_in_flight
from jpipe.stages._batch import microbatch_spec
from jpipe.stages.functions._update import update
from tests.jpipe.capabilities.slices import models
from tests.jpipe.models import cut
from tests.jpipe.running import KEY, check_close, check_equal
from tests.jpipe.runtime.test_memory import peaks_of

STOCHASTIC = {"activations": "int8", "gradients": "int8", "rounding": "stochastic"}
HALVES = [{"backward_input": each / 2, "backward_weight": each / 2} for each in (3.0, 4.0, 3.5)]
"""Of the backwards of two slices, and of the mean slice."""


def plan_of(sizes=(2, 2, 2), m=3, schedule="pipedream_flush", **fields):
    return cut(models.stack().ids, sizes, schedule=schedule, microbatches=m, **fields)


def pipeline(plan, stack=None, devices=None, **options):
    """Return a pipeline with all ranks on one device, so that replicas share what is compiled; on a mesh with all devices."""
    if devices is None and not any(stage.mesh for stage in plan.stages):
        devices = jax.devices()[:1] * len(plan.rank_workers)
    return Pipeline(stack or models.stack(), plan, models.loss, optax.sgd(0.2, momentum=0.9), devices, **options)


def trained(pipe, batches):
    """Return the losses of the batches, the weights after them, and an evaluation."""
    state, losses = pipe.init(jax.random.key(KEY), batches[0]), []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        losses += metrics.losses.values()
    state, metrics = pipe.drain(state, with_metrics=True)
    losses += metrics.losses.values()
    return losses, pipe.params(state), pipe.evaluate(state, batches[0]).loss


@pytest.mark.thinned(most=1, most_slow=1)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("schedule", "slices", "sizes", "options"),
    [
        ("gpipe", 2, (3, 3), {"replicas": 3}),
        ("pipedream_flush", (1, 6, 3), (1, 3, 2), {"extra_in_flight": 1}),
        ("pipedream_2bw", 3, (2, 2, 2), {}),
        ("interleaved_1f1b", 2, (1, 2, 1, 2), {"ranks": ((0, 2), (1, 3))}),
        ("zb_h1", (4, 6), (2, 2, 2), {}),
        ("interleaved_zero_bubble", 2, (1, 2, 1, 2), {"ranks": ((0, 2), (1, 3))}),
        ("pipedream_flush", (1, 6, 3), (2, 2, 2), {"m": 4, "replicas": (2, 1, 4), "shard_optimizer": True}),
        ("pipedream_flush", 2, (2, 4), {"m": 4, "replicas": 2, "agree": {"every": 2}}),
        ("zb_h2", (4, 6), (3, 3), {"m": 4, "replicas": 2}),
        ("interleaved_1f1b", 3, (1, 2, 1, 2), {"m": 4, "replicas": 2, "ranks": ((0, 2), (1, 3))}),
        ("pipedream_2bw", 3, (3, 3), {"m": 4, "replicas": (2, 1), "split_backward": "early"}),
        ("pipedream_2bw", (1, 6, 3), (1, 2, 1, 2), {"ranks": ((0, 2), (1, 3)), "flush_first": 1}),
        ("pipedream_2bw", 2, (1, 2, 1, 2), {"m": 8, "replicas": 2, "ranks": ((0, 2), (1, 3))}),
        ("pipedream_flush", (1, 6, 3), (2, 2, 2), {"max_in_flight": 1}),
        ("zb_h1", 2, (2, 2, 2), {"recompute": "full", "offload": dict.fromkeys(("residuals", "stash", "optimizer"), "all")}),
        ("gpipe", 2, (3, 3), {"m": 4, "replicas": 2, "offload": {"residuals": "all"}}),
        ("pipedream", 3, (3, 3), {"m": 4, "replicas": 2, "update_every": "replicas", "max_in_flight": 2}),
        ("pipedream", 2, (2, 4), {"replicas": 3, "links": {"sums": "int8"}}),
        ("pipedream_flush", (1, 6, 3), (2, 2, 2), {"links": {"activations": "bfloat16", "gradients": "bfloat16"}}),
    ],
)
def test_numbers_are_those_of_whole_rows(schedule, slices, sizes, options):
    batches = models.batches(3, options.get("m", 3))
    expected = trained(pipeline(plan_of(sizes, schedule=schedule, **options)), batches)
    check_close(trained(pipeline(plan_of(sizes, schedule=schedule, slices=slices, **options)), batches), expected, 1e-10)


@pytest.mark.thinned(most=1, most_slow=1)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("schedule", "fields"), [("pipedream_2bw", {}), ("zb_h1", {"replicas": 2})])
def test_numbers_on_a_mesh_are_those_of_whole_rows(schedule, fields):
    plans = [Plan.even(models.stack().ids, 2, schedule, 2, mesh={"data": 2}, slices=slices, **fields) for slices in (None, (6, 4))]
    whole, sliced = (trained(pipeline(plan), models.batches(3, 2)) for plan in plans)
    check_close(sliced, whole, 1e-10)


@pytest.mark.thinned(most=1, most_slow=1)
@pytest.mark.parametrize(
    ("schedule", "m", "options"),
    [
        ("gpipe", 3, {}),
        ("pipedream_flush", 3, {"recompute": "full"}),
        ("pipedream", 1, {"slices": (1, 6, 3)}),
        ("pipedream", 2, {"vertical_sync": True, "offload": {"residuals": "all", "versions": "all"}}),
        ("pipedream_2bw", 2, {"flush_first": 1}),
        ("pipedream", 3, {"sizes": (1, 2, 1, 2), "ranks": ((0, 2), (1, 3))}),
        ("pipedream", 2, {"stash": False}),
        ("pipedream_2bw", 2, {"links": STOCHASTIC}),
        ("interleaved_1f1b", 3, {"sizes": (1, 2, 1, 2), "ranks": ((0, 2), (1, 3)), "slices": (1, 6, 3)}),
        ("looped_bfs", 2, {"sizes": (1, 2, 1, 2), "ranks": ((0, 2), (1, 3))}),
        ("zb_h1", 3, {"sizes": (2, 2, 2), "slices": (1, 6, 3)}),
        ("zb_h2", 3, {}),
        ("interleaved_zero_bubble", 2, {"sizes": (1, 2, 1, 2), "ranks": ((0, 2), (1, 3))}),
        ("pipedream_flush", 4, {"replicas": (2, 1)}),
        ("zb_h1", 4, {"replicas": 2}),
        ("pipedream_2bw", 4, {"replicas": 2}),
    ],
)
def test_bits_are_those_of_the_slices_one_after_the_other(schedule, m, options):
    plan, batches = plan_of(**{"m": m, "schedule": schedule, "sizes": (2, 4), "slices": (7, 3), **options}), models.batches(5, m)
    pipe = pipeline(plan)
    state = pipe.init(jax.random.key(KEY), batches[0])
    of_slices = pipe._bucket(microbatch_spec(batches[0], m)).slices
    start = jax.device_put(jax.tree.map(jnp.copy, state.workers), jax.devices()[0])
    lengths, functions = lengths_of(plan.slices, models.LENGTH), pipe.stage_functions(batches[0])
    expected = models.in_sequence(of_slices, models.jitted(of_slices), models.updates(functions, update), start, plan, lengths, batches)
    losses = []
    for batch in batches:
        state, metrics = pipe.step(state, batch)
        losses += metrics.losses.values()
    state, metrics = pipe.drain(state, with_metrics=True)
    losses += metrics.losses.values()
    check_equal((losses, [worker.weights.read(5) for worker in state.workers]), expected)


def test_the_bubble_is_that_of_slices():
    for schedule in ("gpipe", "pipedream_flush"):
        for d, m, slices in ((1, 2, 3), (3, 4, 2), (4, 2, 4)):
            plan = Plan.even([f"layer{s}" for s in range(d)], d, schedule, m, slices=slices)
            prediction = simulate(lower(plan, 1))
            assert prediction.bubble == pytest.approx((d - 1) / (m * slices + d - 1))
            assert len(prediction.timeline[0]) == 2 * m * slices


@pytest.mark.slow
def test_programs_of_all_schedules_are_verified_and_hold_what_their_schedule_says():
    for schedule, chunks, m, slices, replicas in itertools.product(SCHEDULES, (1, 2, 3), (1, 3, 4, 7), (2, 3, 5), (1, 2)):
        if not SCHEDULES[schedule].takes_slices or SCHEDULES[schedule].refuses_chunks(chunks):
            continue
        d, m = 3 * chunks, m * replicas
        try:
            plan = Plan.even([f"layer{s}" for s in range(d)], d, schedule, m, chunks_per_rank=chunks, slices=slices, replicas=replicas)
        except InputError as error:
            assert not SCHEDULES[schedule].flushes, error  # noqa: PT017
            continue
        rules = SCHEDULES[schedule]
        prediction, counted = simulate(lower(plan, 2 if rules.flushes else 4)), plan.counted
        batches, of_stages = 1 if rules.flushes else 8, [plan.workers[w][0] for w in range(len(plan.workers))]
        alive = [max(a for a, s in zip(prediction.versions_alive, of_stages, strict=True) if s == stage) for stage in range(d)]
        assert all(each <= rules.versions_alive(counted, s) for s, each in enumerate(alive))
        for p, stages in enumerate(counted.pipeline_ranks):
            for s in stages:
                order = [entry for entry in rules.computations(counted, p, 0, 0, batches) if entry.stage == s]
                assert most_in_flight(order) == rules.in_flight(counted, s)


@pytest.mark.thinned(most=1, most_slow=1)
@pytest.mark.parametrize(
    ("schedule", "fields", "options"),
    [
        ("pipedream_flush", {"offload": {"residuals": "all"}}, {}),
        ("pipedream_2bw", {"links": STOCHASTIC}, {}),
        ("pipedream", {"sizes": (1, 2, 1, 2), "ranks": ((0, 2), (1, 3))}, {}),
        ("pipedream_2bw", {"replicas": (1, 2), "m": 4, "sizes": (3, 3)}, {"clip_global_norm": 0.1}),
        ("gpipe", {}, {}),
        ("zb_h1", {}, {}),
        ("interleaved_1f1b", {"sizes": (1, 2, 1, 2), "ranks": ((0, 2), (1, 3))}, {}),
    ],
)
def test_a_run_goes_on_from_a_snapshot_in_flight_before_any_batch(schedule, fields, options):
    plan = plan_of(**{"m": 2, "slices": (2, 8), "schedule": schedule, **fields})
    batches, pipe = models.batches(5, plan.microbatches), pipeline(plan, **options)
    state, snapshots = pipe.init(jax.random.key(KEY), batches[0]), [pipe.snapshot(n) for n in range(1, 5)]

    def observe(event):
        for snapshot in snapshots:
            snapshot(event)

    for batch in batches:
        state, _ = pipe.step(state, batch, observe=observe)
    expected = pipe.params(pipe.drain(state, observe=observe))
    for n, snapshot in enumerate(snapshots, 1):
        again = pipe.restore(jax.random.key(KEY), batches[0], snapshot.layers(), n)
        for batch in batches[n:]:
            again, _ = pipe.step(again, batch)
        check_equal(pipe.params(pipe.drain(again)), expected)


@pytest.mark.thinned(most=1, most_slow=1)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("schedule", "m", "options"),
    [
        ("pipedream_flush", 2, {}),
        ("pipedream_2bw", 2, {"flush_first": 1}),
        ("pipedream_2bw", 8, {"replicas": 2}),
        ("pipedream_2bw", 3, {"num_stages": 4, "chunks_per_rank": 2}),
        ("pipedream", 1, {"vertical_sync": True}),
    ],
)
def test_shared_parameters_norms_and_loss_scales(schedule, m, options):
    layers = {"embed": models.embed(), "attend": models.attention(), "again": models.attention(), "head": models.head()}
    stack = LayerStack(layers, [Tie(("attend", "k"), ("again", "q"))])
    clipped = {"clip_global_norm": 0.1, "precision": Precision(loss_scale=8.0)}
    fields = {"num_stages": 2, "schedule": schedule, "microbatches": m, **options}
    plans = [Plan.even(stack.ids, **fields, slices=slices) for slices in (None, 2)]
    whole, sliced = (trained(pipeline(plan, stack, **clipped), models.batches(4, m)) for plan in plans)
    check_close(sliced, whole, 1e-10)


def test_norms_and_shared_gradients_follow_the_rows_without_a_flush():
    schedules = {"pipedream": {"vertical_sync": True}, "pipedream_2bw": {}}
    for schedule, chunks, (slices, ranks), replicas in itertools.product(schedules, (1, 2), ((2, 3), (5, 2)), (1, 2)):
        d, m = ranks * chunks, 2 * ranks * replicas
        fields = {"chunks_per_rank": chunks, "slices": slices, "replicas": replicas, **schedules[schedule]}
        plan = Plan.even([f"layer{s}" for s in range(d)], d, schedule, m, **fields)
        simulate(lower(plan, 5, global_norm=True, shared_parameters=((0, d - 1),)))


def test_costs_are_those_of_each_slice_and_of_the_mean_slice():
    batch, pipe = models.batches(1, 2)[0], pipeline(plan_of(m=2, slices=(6, 4)))
    pipe.init(jax.random.key(KEY), batch)
    whole, (cost, *_, last) = pipeline(plan_of(m=2)).costs(batch), pipe.costs(batch)
    assert (cost.inputs, cost.outputs, cost.message) == (whole[0].inputs // 2, whole[0].outputs // 2, (whole[0].message + 4) // 2)
    assert cost.temporary > 0
    assert [each.inputs for each in cost.by_slice] == [whole[0].inputs * 6 // 10, whole[0].inputs * 4 // 10]
    keys_and_values = 2 * models.ROWS * 6 * models.WIDTH * 4  # of the first slice
    assert [(each.carry_message, each.carry_gradient) for each in cost.by_slice] == [(keys_and_values, 0), (0, keys_and_values)]
    assert sum(each.forward for each in cost.by_slice) == pytest.approx(2)
    projections, pairs = 3 * models.WIDTH, 2  # products of a position; of a pair of positions
    expected = 6 * (projections + 6 * pairs) / (4 * (projections + 10 * pairs))
    assert cost.by_slice[0].forward / cost.by_slice[1].forward == pytest.approx(expected)
    fields = {"inputs": cost.inputs, "outputs": cost.outputs}
    assert fields == {name: sum(getattr(each, name) for each in cost.by_slice) // 2 for name in fields}
    assert last.by_slice[0].labels == last.by_slice[1].labels * 6 // 4


@pytest.mark.thinned(most=1, most_slow=1)
@pytest.mark.parametrize(
    ("schedule", "fields"),
    [
        ("pipedream_flush", {"recompute": "full", "slices": (1, 4, 2, 3)}),
        ("gpipe", {"recompute": "elementwise"}),
        ("zb_h1", {"recompute": "full", "slices": 2}),
        ("zb_h1", {}),
        ("pipedream", {"recompute": "full"}),
        ("pipedream_flush", {"recompute": "elementwise", "replicas": 2}),
        ("pipedream_flush", {"recompute": "full", "offload": {"residuals": "all"}}),
        ("pipedream_flush", {"offload": {"residuals": "all"}}),
        ("pipedream_2bw", {"links": {"activations": "int8", "gradients": "bfloat16"}}),
        ("pipedream_2bw", {"recompute": "everything_saveable", "sizes": (1, 2, 1, 2), "ranks": ((0, 2), (1, 3))}),
    ],
)
def test_measured_peak_is_predicted(schedule, fields):
    plan, batch = plan_of(**{"m": 4, "schedule": schedule, "slices": (5, 2, 3), **fields}), models.batches(1, 4)[0]
    devices = jax.devices()[: len(plan.rank_workers)]
    measured, predicted = peaks_of(pipeline(plan, devices=devices), batch, devices)
    np.testing.assert_allclose(measured, predicted, atol=64)  # but for a few scalars it is exact


@pytest.mark.parametrize("recompute", ["none", "elementwise", "full", "everything_saveable"])
def test_a_carry_is_freed_once_by_the_last_slice_that_reads_it(recompute):
    slices = [cost.by_slice for cost in pipeline(plan_of(m=2, slices=(1, 4, 2, 3), recompute=recompute)).costs(models.batches(1, 2)[0])]
    made = [[each.carries for each in of_stage] for of_stage in slices]
    freed = [[each.carries_used_up + each.carries_freed for each in of_stage] for of_stage in slices]
    keys_and_values = [2 * models.ROWS * models.WIDTH * 4 * length for length in (1, 4, 2, 0)]  # the last slice leaves none
    assert made == [keys_and_values, [models.ROWS * models.WIDTH * 4] * 3 + [0], keys_and_values]
    copied, again = recompute == "everything_saveable", [0, *keys_and_values[:-1]]  # copies of joined keys, and forwards that are repeated
    own = [0, 0, 0, sum(keys_and_values)] if copied else keys_and_values if recompute == "none" else again
    assert freed == [own, [0, *made[1][:-1]], own]
    assert any(each.carries_used_up for of_stage in slices[::2] for each in of_stage) == copied


def test_slices_are_rounded_by_different_random_numbers():
    stack = LayerStack({"first": models.act, "head": models.head()})
    pipe, inputs = (
        pipeline(Plan.even(stack.ids, 2, "gpipe", 1, slices=2, links=STOCHASTIC), stack),
        np.ones((1, 10, models.WIDTH), np.float32),
    )
    inputs[..., 0] = 2.0  # sets the scale
    spec = inputs, {"next": np.zeros((1, 10), int), "weight": np.ones((1, 10))}
    stages = [of_slice[0] for of_slice in pipe._bucket(microbatch_spec(spec, 1)).slices]
    messages = []
    for f in stages:
        (sent, _), *_ = f.forward({"first": {}}, {"first": {}}, (inputs[:, :5], {}), None, (jnp.uint32(0), jax.random.key(KEY)))
        messages.append(f.exchange.decode("activation", sent, jax.ShapeDtypeStruct((1, 5, models.WIDTH), jnp.float32)))
    assert np.any(messages[0] != messages[1])
    for message in messages:
        np.testing.assert_allclose(message, np.tanh(inputs[:, :5]), atol=1 / 127)


def test_a_slice_costs_what_the_trace_says():
    plan = Plan.even("ab", 2, "pipedream_flush", 2, slices=2)
    slices = StageCost(forward=1.0, backward=3.0), StageCost(forward=2.0, backward=4.0, outputs=7, inputs=7)
    costs = [StageCost(forward=1.5, backward=3.5, by_slice=slices)] * 2
    found = simulate(lower(plan, 1), costs)
    assert fit_costs([StageCost(by_slice=(StageCost(), slices[1]))] * 2, found.timeline)[0] == replace(
        costs[0], by_slice=tuple(replace(each, **HALVES[n]) for n, each in enumerate(slices)), **HALVES[2]
    )
    spans = [(span.op, span.microbatch, span.end - span.start) for span in found.timeline[0]]
    assert {(op, k % 2): seconds for op, k, seconds in spans} == {("F", 0): 1.0, ("F", 1): 2.0, ("B", 0): 3.0, ("B", 1): 4.0}
    assert sum(found.moved_bytes) == 2 * 7
    with pytest.raises(InputError, match="costs of stage 0: by_slice: expected a cost for each of 2 slices of the rows, found 1"):
        simulate(lower(plan, 1), [replace(costs[0], by_slice=slices[:1])] * 2)


def test_lengths_by_cost_take_equally_long():
    assert lengths_by_cost(4, 4096, 1.0, 1.0) == (1024,) * 4
    for count, length in ((4, 4096), (3, 1000), (7, 32768)):
        lengths = lengths_by_cost(count, length, 1.5, 2.5)
        ends, pair = np.cumsum(lengths), 1.0 / (length - length // 2)
        costs = np.array(lengths) * (1.5 - pair * (length // 2) + pair * ends)
        assert sum(lengths) == length
        assert list(lengths) == sorted(lengths, reverse=True)
        assert max(costs) / min(costs) < 1.3
    assert lengths_by_cost(4, 4, 2.0, 4.0) == (1,) * 4  # each slice has positions, even if their costs differ
    plan = plan_of(m=2, slices={"count": 2, "by": "cost"})
    assert Plan.from_json(plan.to_json()) == plan
    batch, pipe = models.batches(1, 2, 64)[0], pipeline(plan)
    first, second = pipe.costs(batch)[0].by_slice
    assert first.inputs > second.inputs
    assert first.forward == pytest.approx(second.forward, rel=0.15)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("lost", "expected slice 1"),
        ("twice", ": carry of microbatch 34 used before"),
        ("early", ": carry of microbatch 34 used before"),
        ("backwards swapped", "gradient of the carry of microbatch 33 used before"),
        ("version", "reads version 1, the formula says 2"),
    ],
)
def test_a_program_with_slices_in_a_wrong_order_is_refused(broken, words):
    program = lower(plan_of(schedule="pipedream_2bw", slices=3), 4)
    items, op = list(program.instructions), "B" if broken == "backwards swapped" else "F"
    *_, at = (n for n, i in enumerate(items) if getattr(i, "slice", None) == 1 and i.op == op)
    one = items[at]
    other = next(
        n for n, i in enumerate(items) if getattr(i, "op", "") == op and (i.worker, i.microbatch + 1) == (one.worker, one.microbatch)
    )
    if broken == "lost":
        items[at] = replace(one, slice=2)
    elif broken == "twice":
        items.insert(at, one)
    elif broken == "version":
        items[at] = replace(one, version=one.version - 1)
    else:
        items[at], items[other] = items[other], one
    with pytest.raises(ProgramError, match=words):
        simulate(replace(program, instructions=tuple(items)))


def test_a_single_slice_is_no_slice():
    assert plan_of(slices=1) == plan_of() == plan_of(slices=[10])
    assert Plan.from_json(plan_of(slices=(1, 6, 3)).to_json()) == plan_of(slices=(1, 6, 3))


def test_slices_are_even_or_as_long_as_the_plan_says():
    assert lengths_of(3, 10) == (4, 3, 3)
    assert lengths_of((1, 6, 3), 10) == (1, 6, 3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"schedule": "naive"}, "plan: slices: expected one of the schedules with an order for slices, gpipe, pipedream_flush"),
        ({"schedule": "pipedream_2bw", "m": 1}, "needs at least 2 microbatches for 3 stages and 2 slices, found microbatches 1"),
        ({"slices": 0}, "expected a number of slices"),
        ({"slices": "2"}, "expected a number of slices"),
        (
            {"slices": {"count": 2, "by": "time"}},
            "expected a number of slices, a list of their lengths, or {count: number, by: cost}, found",
        ),
    ],
)
def test_what_slices_cannot_be_combined_with(fields, words):
    with pytest.raises(InputError, match="slices") as error:
        plan_of(**{"slices": 2, **fields})
    assert words in str(error.value)


def test_an_update_waits_for_the_backward_of_the_first_slice_of_the_last_rows_of_each_replica():
    program = lower(plan_of((3, 3), m=4, schedule="gpipe", replicas=2, slices=2), 1, global_norm=True)
    updates = [i for i in program.instructions if isinstance(i, Update)]
    waits = waits_for(program.plan, updates)
    assert len(waits) == 4
    assert all({(worker, k) for worker, _, k, _ in keys} == {(0, 4), (1, 6)} for keys in waits.values())
    of_stage_0 = [_inputs(key, program.plan) for key in waits if key[0] < 2]
    assert all({(worker, k) for worker, _, k, _ in keys} == {(0, 4), (1, 6)} for keys in of_stage_0)
    program = lower(plan_of((3, 3), m=2, schedule="pipedream_2bw", slices=2), 3, global_norm=True)
    waits = waits_for(program.plan, [i for i in program.instructions if isinstance(i, Update)])
    assert all({(worker, k) for worker, _, k, _ in keys} == {(0, 4 * batch + 2)} for (_, _, batch, _), keys in waits.items())


def test_sums_in_parts_are_refused():
    with pytest.raises(InputError, match=r"expected no stages\.0\.sum_parts"):
        Plan.even(models.stack().ids, 2, "gpipe", 3, slices=2, replicas=3, sum_parts=2)


def plus_mean(x):
    return x + x.mean(1, keepdims=True)


def plus_number(x):
    return x + jnp.arange(x.shape[1], dtype=x.dtype)[None, :, None]


def with_table(read, length=10) -> Layer:
    """Return a layer that adds rows of a table, which `read(table, number)` returns."""

    def apply(params, state, x, key, train):
        return x + read(params["table"], x.shape[1])[None], state

    return Layer(lambda key, x: ({"table": jnp.ones((length, x.shape[-1]), x.dtype)}, {}), apply)


def plus_waves(x):
    return x + np.sin(np.arange(x.shape[1])).astype(x.dtype)[None, :, None]


def noisy() -> Layer:
    def apply(params, state, x, key, train):
        return (x if key is None else x * jax.random.uniform(key, x.shape, x.dtype)), state

    return Layer(lambda key, x: ({}, {}), apply, stochastic=True)


def counting() -> Layer:
    return Layer(lambda key, x: ({}, {"count": jnp.zeros((), jnp.int32)}), lambda p, s, x, k, t: (x, {"count": s["count"] + 1}))


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (plus_mean, "found layers that mix positions: 'layer'; give the layer a carry"),
        (plus_number, "layer 'layer', which counts positions without it"),
        (plus_waves, "layer 'layer', which has constants for each position without it"),
        (lambda x: x / x.shape[1], "layer 'layer', which computes with the number of positions without it"),
        (with_table(lambda table, n: table[:n]), "layer 'layer', which counts positions without it"),
        (with_table(lambda table, n: jax.lax.dynamic_slice(table, (0, 0), (n, table.shape[1]))), "which counts positions without it"),
        (with_table(lambda table, n: table), "layer 'layer' does not accept"),
        (noisy(), "layer 'layer', which draws random numbers without it"),
        (counting(), "found layer 'layer'"),
    ],
)
def test_layers_that_do_not_fit_are_named(layer, words):
    stack = LayerStack({"embed": models.embed(), "layer": layer, "head": models.head()})
    pipe = pipeline(Plan.even(stack.ids, 2, "gpipe", 2, slices=2), stack)
    with pytest.raises(InputError) as error:
        pipe.init(jax.random.key(0), models.batches(1, 2)[0])
    assert words in str(error.value)


def test_layers_that_mix_positions_are_named_in_a_model_that_was_cut():
    def model(params, x):
        for layer in params:
            x = plus_mean(jnp.tanh(x @ layer["w"]))
        return x

    stack = LayerStack.from_function(model, [{"w": jnp.eye(models.VOCAB)} for _ in range(3)], jnp.ones((2, models.LENGTH, models.VOCAB)))
    batch = np.ones((4, models.LENGTH, models.VOCAB), np.float32), models.batches(1, 2)[0][1]
    with pytest.raises(InputError, match=r"found layers that were cut from a model and mix positions: '0', '1', '2'; give"):
        pipeline(Plan.even(stack.ids, 2, "gpipe", 2, slices=2), stack).init(jax.random.key(0), batch)


def test_losses_and_batches_that_do_not_fit_are_refused():
    def of_rows(logits, labels):
        return jnp.square(logits.sum((1, 2))).sum(), jnp.float32(1)

    batch = models.batches(1, 3)[0]
    with pytest.raises(InputError, match="expected a loss that is a sum over positions"):
        Pipeline(models.stack(), plan_of(slices=2), of_rows, optax.sgd(0.1)).init(jax.random.key(0), batch)
    with pytest.raises(InputError, match="expected arrays with the positions of the rows in their second dim"):
        pipeline(plan_of(slices=2)).init(jax.random.key(0), (batch[0], {"next": batch[1]["next"], "weight": batch[1]["weight"][:, :1]}))
    with pytest.raises(InputError, match="expected rows of at least 11 positions, found 10"):
        pipeline(plan_of(slices=11)).init(jax.random.key(0), batch)
    with pytest.raises(InputError, match="expected rows of 9 positions, found 10"):
        pipeline(plan_of(slices=(4, 5))).init(jax.random.key(0), batch)


class Sum(nnx.Module):
    """The sum over the positions so far, times a parameter."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (models.WIDTH,)))

    def __call__(self, x):
        return self.carried(x, None)[0]

    def carried(self, x, carry):
        total = jnp.cumsum(x, 1) + (jnp.zeros_like(x[:, :1]) if carry is None else carry)
        return x + total * self.w[...][None, None], total[:, -1:]


class LinenSum(linen.Module):
    """The same in Linen."""

    def setup(self):
        self.w = self.param("w", linen.initializers.normal(), (models.WIDTH,))

    def __call__(self, x):
        return self.carried(x, None)[0]

    def carried(self, x, carry):
        total = jnp.cumsum(x, 1) + (jnp.zeros_like(x[:, :1]) if carry is None else carry)
        return x + total * self.w[None, None], total[:, -1:]


@pytest.mark.thinned(most=1, most_slow=1)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("layer", [lambda rngs: Sum(rngs=rngs), LinenSum()], ids=["nnx", "linen"])
def test_modules_of_flax_have_a_method_for_the_carry(layer):
    stack = LayerStack({"embed": models.embed(), "sum": layer, "head": models.head()})
    plans = (Plan.even(stack.ids, 2, "pipedream_flush", 2, slices=slices) for slices in (None, 2))
    whole, sliced = (trained(pipeline(plan, stack), models.batches(2, 2)) for plan in plans)
    check_close(sliced, whole, 1e-10)


@pytest.mark.parametrize("schedule", ["pipedream_flush", "pipedream_2bw"])
@pytest.mark.parametrize("replicas", [(1, 2), (2, 1, 4)])
def test_stages_with_more_replicas_than_the_one_before_them_do_not_deadlock(schedule, replicas):
    for slices in (3, 4):
        simulate(lower(Plan.even("abc"[: len(replicas)], len(replicas), schedule, 12, replicas=replicas, slices=slices), 2))


def test_an_order_that_deadlocks_is_an_error_with_advice():
    plan = Plan.even("abc", 3, "pipedream_flush", 6, replicas=(1, 2, 1), slices=5, extra_in_flight=1)
    with pytest.raises(
        InputError, match=r"slices: expected slices .* does not deadlock, found replicas \[1, 2, 1\] and 5 slices; use equal"
    ):
        lower(plan, 1)
