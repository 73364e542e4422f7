"""Batches of several shapes in one run: each shape has its own programs and the versions of the schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jpipe import InputError, Layer, LayerStack, Pipeline, Plan, checkpoints
from tests.jpipe import models
from tests.jpipe.running import KEY, check_close, check_equal, train, train_as_one_function

STACK = models.sequence_stack()
COUNT = len(models.LENGTHS)


def pipeline(plan, **options) -> Pipeline:
    return Pipeline(STACK, plan, models.masked_squares, models.momentum(), jax.devices()[: len(plan.workers)], **options)


def started(pipe, batches):
    return pipe.init(jax.random.key(KEY), batches[0], buckets=batches)


@pytest.mark.usefixtures("float64")
@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize(
    ("variant", "d", "m", "fields"),
    [
        ("pipedream_2bw", 3, 3, {}),
        ("pipedream", 4, 1, {"recompute": "full"}),
        ("pipedream", 4, 1, {}),
        ("pipedream_vertical_sync", 4, 1, {"extra_in_flight": 1}),
        ("pipedream_2bw", 4, 4, {"recompute": "full"}),
    ]
    + [(variant, 3, 3, {}) for variant in (*models.VARIANTS, "zb_h1") if variant != "pipedream_2bw"],
)
def test_every_schedule_equals_one_gradient_of_the_whole_model(variant, d, m, fields):
    plan = Plan.even(STACK.ids, d, microbatches=m, **models.VARIANTS.get(variant, {"schedule": variant}), **fields)
    pipe, batches = pipeline(plan), models.sequences(COUNT, m, dtype=np.float64)
    state = started(pipe, batches)
    expected = train_as_one_function(pipe, batches, state)
    check_close(train(pipe, batches, state), expected)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("float64")
def test_replicas_equal_one_gradient_of_the_whole_model():
    stack = LayerStack({"first": models.recurrent(), "second": models.recurrent(), "mean": models.mean_of_positions, "out": models.dense()})
    plan = Plan.even(stack.ids, 2, "pipedream_2bw", 4, replicas=(2, 1))
    pipe = Pipeline(stack, plan, models.masked_squares, models.momentum(), jax.devices()[:1] * 3)
    batches = models.sequences(COUNT, 4, dtype=np.float64)
    state = started(pipe, batches)
    expected = train_as_one_function(pipe, batches, state)
    check_close(train(pipe, batches, state), expected)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["pipedream", pytest.param("pipedream_2bw", marks=pytest.mark.exhaustive)])
def test_an_evaluation_has_another_shape_than_batches_in_flight(schedule):
    pipe, batches = pipeline(Plan.even(STACK.ids, 3, schedule, 3)), models.sequences(COUNT, 3)
    state = started(pipe, batches)
    for batch in batches[:3]:
        state, _ = pipe.step(state, batch)
    drained = pipe.drain(models.copied(state))
    params, layer_state = pipe.params(state), {i: s for worker in drained.workers for i, s in worker.layer_state.items()}
    for batch in batches:
        evaluation = pipe.evaluate(state, batch, {"again": models.masked_squares})
        if schedule == "pipedream":  # it holds no common version in flight, so it evaluates a drained copy
            (x, labels), (params, state_of) = batch, (models.on_first_device(pipe.params(state)), models.on_first_device(layer_state))
            y, _ = STACK.apply(STACK.ids, params, state_of, x, key=None, microbatch=0, train=False)
            total, weight = models.masked_squares(y, labels)
            np.testing.assert_allclose(evaluation.loss, total / weight, rtol=1e-5)
        assert float(evaluation.metrics["again"].mean) == float(evaluation.loss)


@pytest.mark.slow
def test_a_run_resumes_from_a_checkpoint_in_the_middle(tmp_path):
    pipe, batches = pipeline(Plan.even(STACK.ids, 3, "pipedream", 2)), models.sequences(COUNT, 2)
    state, snapshot = started(pipe, batches), pipe.snapshot(4)
    for batch in batches:
        state, _ = pipe.step(state, batch, observe=snapshot)
    state = pipe.drain(state, observe=snapshot)
    checkpoints.save(tmp_path, snapshot)
    expected, other = pipe.params(state), pipeline(pipe.plan)
    restored = checkpoints.load(other, tmp_path, jax.random.key(KEY), batches[0], 4, buckets=batches)
    for batch in batches[4:]:
        restored, _ = other.step(restored, batch)
    check_equal(other.params(other.drain(restored)), expected)
    loaded = pipe.load(tmp_path)  # with the buckets of the run
    for batch in batches[4:]:
        loaded, _ = pipe.step(loaded, batch)
    check_equal(pipe.params(pipe.drain(loaded)), expected)


@pytest.mark.slow
def test_only_functions_that_depend_on_the_shape_are_compiled_for_each_shape():
    pipe, batches = pipeline(Plan.even(STACK.ids, 2, "pipedream_2bw", 2)), models.sequences(COUNT, 2)
    started(pipe, batches)
    one, *remaining = pipe._executor._compiled
    assert len(remaining) == len(set(models.LENGTHS)) - 1
    for stages in remaining:
        for w, stage in stages.items():
            recompiled = {name for name, call in stage.calls.items() if call is not one[w].calls[name]}
            assert recompiled <= {"forward", "backward", "forward_backward", "evaluate"}
            assert "evaluate" in recompiled


def test_a_state_stores_only_the_shapes_of_the_batches_in_flight():
    pipe, batches = pipeline(Plan.even(STACK.ids, 3, "pipedream", 2)), models.sequences(COUNT, 2)
    state = started(pipe, batches)
    for batch in batches:
        state, _ = pipe.step(state, batch)
    assert len(state.buckets) == pipe._steps.in_flight < COUNT
    plain = pipeline(pipe.plan)
    state = plain.init(jax.random.key(KEY), batches[0])
    state, _ = plain.step(state, batches[0])
    assert state.buckets == ()


def test_the_cost_depends_on_the_shape():
    pipe, batches = pipeline(Plan.even(STACK.ids, 2, "pipedream_2bw", 2)), models.sequences(COUNT, 2)
    short, long = (pipe.costs(batches[models.LENGTHS.index(length)])[0] for length in (2, 5))
    assert short.outputs < long.outputs
    assert short.weights == long.weights


def test_invalid_round_robin_plans_are_refused():
    pipe, batches = pipeline(Plan.even(STACK.ids, 2, "pipedream_2bw", 2)), models.sequences(COUNT, 2)
    with pytest.raises(InputError, match="buckets: expected microbatches of 2 rows"):
        pipe.init(jax.random.key(KEY), batches[0], buckets=[jax.tree.map(lambda leaf: leaf[:2], batches[1])])
    x, labels = batches[1]
    with pytest.raises(InputError, match=r"buckets: expected the arrays of the first batch, .*found .*more"):
        pipe.init(jax.random.key(KEY), batches[0], buckets=[(x, labels | {"more": labels["mask"]})])
    state = pipe.init(jax.random.key(KEY), batches[0], buckets=[batches[1]])
    with pytest.raises(InputError, match=r"like one of the shapes given to init, .*\[2, 4, 3\].* or .*\[2, 2, 3\].*, found .*\[2, 5, 3\]"):
        pipe.step(state, batches[3])
    with pytest.raises(InputError, match="expected microbatches like one of the shapes given to init"):
        pipe.evaluate(state, batches[3])


def flattened() -> Layer:
    """Build a layer with a weight for each position."""
    return Layer(
        lambda key, x: ({"w": jnp.ones(x.shape[1:])}, {}),
        lambda params, state, x, key, train: ((x * params["w"][None]).sum(1), state),
    )


def counting() -> Layer:
    """Build a layer whose state counts each position."""
    return Layer(lambda key, x: ({}, {"n": jnp.zeros(x.shape[1])}), lambda params, state, x, key, train: (x.mean(1), state))


@pytest.mark.parametrize(("layer", "what"), [(flattened(), "parameters"), (counting(), "state")])
def test_a_layer_that_changes_with_the_shape_is_refused(layer, what):
    stack, batches = LayerStack({"first": models.recurrent(), "odd": layer}), models.sequences(COUNT, 2)
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", 2), models.masked_squares, models.momentum())
    with pytest.raises(InputError, match=f"buckets: expected layer 'odd' to have the same {what} with batches of each shape"):
        started(pipe, batches)
