"""A dynamic loss scale: its rule, float16 runs against the sequential reference, restored runs, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import DynamicLossScale, InputError, Pipeline, Plan, Precision
from tests.jpipe import models, running

STACK = models.rich_stack()
HALF = Precision(params="float16", loss_scale=DynamicLossScale(initial=2.0**15, growth_every=2))


def test_the_rule_by_hand():
    """Two finite batches in a row double the scale and restart the count; any other batch halves it, down to 1."""
    rule = DynamicLossScale(4, growth_every=2)
    scale, history = rule.first(), []
    for is_finite in (True, True, True, False, True, True, False, False, False, False, False, True, True):
        scale = rule.after(scale, is_finite)
        history.append((float(scale.value), int(scale.finite)))
    assert history == [(4, 1), (8, 0), (8, 1), (4, 0), (4, 1), (8, 0), (4, 0), (2, 0), (1, 0), (1, 0), (1, 0), (1, 1), (2, 0)]
    assert float(DynamicLossScale(2.0**100, 1).after(DynamicLossScale(2.0**100, 1).first(), True).value) == 2.0**100


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(
    ("replicas", "fields"),
    [
        ((1, 1, 1), {"schedule": "pipedream_2bw", "microbatches": 3}),
        ((1, 1, 1), {"schedule": "pipedream", "vertical_sync": True, "microbatches": 1}),
        ((2, 1), {"schedule": "pipedream_2bw", "microbatches": 4}),
        ((1, 1), {"schedule": "pipedream_flush", "microbatches": 3}),
        ((1, 1), {"schedule": "pipedream_2bw", "microbatches": 2, "flush_first": 2}),
        ((1, 1), {"schedule": "gpipe", "microbatches": 3}),
        ((2,), {"schedule": "naive", "microbatches": 2}),
        ((1, 1, 1, 1), {"schedule": "pipedream", "vertical_sync": True, "microbatches": 2}),
    ],
    ids=lambda value: "-".join(map(str, value.values() if isinstance(value, dict) else value)),
)
@pytest.mark.parametrize("clip", [None, 3.0])
def test_equals_the_sequential_reference_bit_for_bit(replicas, fields, clip):
    """The gradients of these batches overflow at a scale of 2**15 and fit later; then the scale grows until they overflow."""
    plan = Plan.even(STACK.ids, len(replicas), replicas=replicas, **fields)
    running.check_against_reference(STACK, plan, {3}, precision=HALF, clip_global_norm=clip)


def trained(pipe, batches, state=None, observe=None):
    """Train and return (state after a drain, loss scale after each batch, skipped batches)."""
    state, scales, skipped = state or running.fresh(pipe, batches), {}, []
    for batch in [*batches, None]:
        state, metrics = pipe.drain(state, with_metrics=True) if batch is None else pipe.step(state, batch, observe=observe)
        scales |= {t: float(scale) for t, scale in metrics.loss_scales.items()}
        skipped += [t for t, count in metrics.nonfinite.items() if float(count)]
    return state, scales, skipped


@pytest.mark.slow
def test_float16_overflows_at_first_and_trains_then():
    plan, batches = Plan.even(STACK.ids, 2, "pipedream_flush", 2), models.masked_batches(8, 2)
    pipe = Pipeline(STACK, plan, models.masked_squares, models.momentum(), precision=HALF)
    start = running.fresh(pipe, batches)
    before = pipe.params(start)
    state, scales, skipped = trained(pipe, batches, start)
    assert skipped[0] == 0
    assert 0 < len(skipped) < len(batches)
    assert sorted(scales) == list(range(len(batches)))
    assert scales == {t: scales.get(t - 1, 2.0**15) * (0.5 if t in skipped else scales[t] / scales.get(t - 1, 2.0**15)) for t in scales}
    assert any(scales[t + 1] == 2 * scales[t] for t in range(len(batches) - 1))
    assert any(np.any(a != b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(pipe.params(state)), strict=True))


@pytest.mark.slow
def test_the_scale_changes_no_other_bit():
    """In bfloat16, where nothing overflows, a run with a growing scale equals one without a scale that may skip batches."""
    plan, batches = Plan.even(STACK.ids, 2, "pipedream_2bw", 2), models.masked_batches(6, 2)
    options = [{"precision": Precision(params="bfloat16"), "skip_nonfinite": True}]
    options.append({"precision": Precision(params="bfloat16", loss_scale=DynamicLossScale(1, 1))})
    plain, scaled = (running.train(Pipeline(STACK, plan, models.masked_squares, models.momentum(), **one), batches) for one in options)
    running.check_equal(scaled._asdict(), plain._asdict())


@pytest.mark.slow
def test_a_restored_run_has_the_scales_of_all_versions():
    plan, batches = Plan.even(STACK.ids, 2, "pipedream_2bw", 2), models.masked_batches(8, 2)

    def pipeline(plan, precision=HALF):
        return Pipeline(STACK, plan, models.masked_squares, models.momentum(), precision=precision)

    pipe = pipeline(plan)
    state = running.fresh(pipe, batches)
    snapshot = pipe.snapshot(3)
    state, scales, _ = trained(pipe, batches, state, snapshot)
    layers = jax.tree.map(np.asarray, snapshot.layers())
    assert {float(scale["value"]) for layer in layers.values() for scale in layer["loss_scale"].values()} == {scales[1], scales[2]}
    resumed_pipe = pipeline(plan)
    restored, later, _ = trained(resumed_pipe, batches[3:], resumed_pipe.restore(jax.random.key(running.KEY), batches[0], layers, 3))
    assert later == {t: scales[t] for t in range(3, 8)}
    running.check_equal(resumed_pipe.params(restored), pipe.params(state))
    running.check_equal(restored.workers[0].loss_scales, state.workers[0].loss_scales)

    other = pipeline(Plan.even(STACK.ids, 1, "pipedream_2bw", 2))
    middle = other.restore(jax.random.key(running.KEY), batches[0], layers, 3)
    for worker in middle.workers:
        assert {v: float(scale.value) for v, scale in worker.loss_scales.items()} == {2: scales[1], 3: scales[2]}
    without = {layer_id: {name: part for name, part in layer.items() if name != "loss_scale"} for layer_id, layer in layers.items()}
    initial = pipeline(plan).restore(jax.random.key(running.KEY), batches[0], without, 3)
    assert {float(scale.value) for worker in initial.workers for scale in worker.loss_scales.values()} == {2.0**15}
    fixed = pipeline(plan, Precision(params="float16", loss_scale=8))
    assert fixed.restore(jax.random.key(running.KEY), batches[0], layers, 3).workers[0].loss_scales == {}
    layers["track"]["loss_scale"] = {"0": {"value": np.zeros(2, np.float32)}}
    with pytest.raises(
        InputError, match=r"^checkpoint: layer 'track', loss scale: expected 'value' as in the model, float32\[\], found float32\[2\]"
    ):
        pipeline(plan).restore(jax.random.key(running.KEY), batches[0], layers, 3)


def test_an_evaluation_leaves_the_scales_unchanged():
    plan, batches = Plan.even(STACK.ids, 2, "pipedream_2bw", 2), models.masked_batches(5, 2)
    pipe = Pipeline(STACK, plan, models.masked_squares, models.momentum(), precision=HALF)
    expected, state = trained(pipe, batches)[1], running.fresh(pipe, batches)
    for batch in batches[:2]:
        state, _ = pipe.step(state, batch)
    pipe.evaluate(state, batches[0])
    assert expected.items() >= trained(pipe, batches[2:], state)[1].items()


def test_costs_count_the_scale_of_each_version():
    plan, batches = Plan.even(STACK.ids, 2, "pipedream_2bw", 2), models.masked_batches(1, 2)
    fixed, dynamic = (
        Pipeline(STACK, plan, models.masked_squares, models.momentum(), precision=Precision(params="float16", loss_scale=scale))
        for scale in (8, "dynamic")
    )
    for a, b in zip(fixed.costs(batches[0]), dynamic.costs(batches[0]), strict=True):
        assert b.weights == a.weights + 8
    scales = running.fresh(dynamic, batches).workers[0].loss_scales
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(scales)) == 8 * len(scales)


def test_weight_stashing_is_refused():
    with pytest.raises(
        InputError,
        match=r"^precision: loss_scale: dynamic: expected no early updates under the schedule 'pipedream': the last stage updates",
    ):
        Pipeline(STACK, Plan.even(STACK.ids, 2, "pipedream", 2), models.masked_squares, optax.sgd(0.1), precision=HALF)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"initial": 0.5}, r"^precision: loss_scale: initial: expected a number from 1 to 2\*\*100, found 0\.5; the default is 32768$"),
        ({"initial": float("nan")}, "initial: expected a number from 1"),
        (
            {"growth_every": 0},
            r"^precision: loss_scale: growth_every: expected a number of batches, at least 1, found 0; the default is 2000$",
        ),
    ],
)
def test_a_wrong_dynamic_scale_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        DynamicLossScale(**fields)
    assert Precision(params="float16", loss_scale="dynamic").loss_scale == DynamicLossScale()
    assert jnp.float32 == DynamicLossScale().first().value.dtype
