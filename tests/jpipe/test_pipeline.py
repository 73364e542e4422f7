"""The `Pipeline` object: states, metrics, evaluation, parameters."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import InputError, Pipeline, Plan, State, lower, simulate
from jpipe._arguments import checked_metrics
from jpipe.programs._instructions import Compute, Update
from tests.jpipe import models
from tests.jpipe.running import check_equal, fresh, layer_state, train

STACK = models.rich_stack()
M = 4
BATCHES = models.masked_batches(6, M)
ASYNCHRONOUS = ("pipedream", "pipedream_vertical_sync", "pipedream_2bw")


def pipeline(variant: str, d: int = 3, **options) -> Pipeline:
    plan = Plan.even(STACK.ids, d, microbatches=M, **models.VARIANTS[variant])
    return Pipeline(STACK, plan, models.masked_squares, models.momentum(), **options)


def value_of(pipe: Pipeline, params, state, batch, rows=models.ROWS):
    """Mean loss in evaluation mode, layer by layer by hand."""
    total = weight = 0.0
    for start in range(0, len(batch[0]), rows):
        x, labels = jax.tree.map(lambda leaf, start=start: jnp.asarray(leaf[start : start + rows]), batch)
        for layer_id in pipe.stack.ids:
            x, _ = pipe.stack.layers[layer_id].apply(params[layer_id], state[layer_id], x, None, False)
        loss, count = pipe.loss(x, labels)
        total, weight = total + loss, weight + count
    return total / weight, weight


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_each_step_finishes_its_own_batch_and_does_not_wait_for_it(variant):
    pipe = pipeline(variant)
    state = fresh(pipe, BATCHES)
    for t, batch in enumerate(BATCHES):
        state, metrics = pipe.step(state, batch)
        assert state.batch == t + 1
        assert list(metrics.losses) == list(metrics.weights) == [t]
        assert all(isinstance(leaf, jax.Array) and leaf.shape == () for leaf in jax.tree.leaves(metrics))
        assert float(metrics.weights[t]) == batch[1]["mask"].sum()


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_a_consumed_state_keeps_its_containers_and_loses_its_arrays(variant):
    """Like an argument that `jax.jit` donates; arrays that the next state or the metrics share are not deleted."""
    pipe = pipeline(variant, **{"clip_global_norm": 1.0} if variant in ("pipedream_2bw", "gpipe") else {})
    state, results = fresh(pipe, BATCHES), []
    for batch in (*BATCHES[:4], None):
        before, structure = state, jax.tree.structure(state)
        state, metrics = pipe.drain(state, with_metrics=True) if batch is None else pipe.step(state, batch)
        results.append(metrics)
        assert jax.tree.structure(before) == structure
        shared = {id(leaf) for leaf in jax.tree.leaves(state)}
        if state is not before:
            assert all(leaf.is_deleted() != (id(leaf) in shared) or leaf.nbytes <= 8 for leaf in jax.tree.leaves(before))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(results))


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_a_consumed_state_is_refused(variant):
    pipe = pipeline(variant)
    old = fresh(pipe, BATCHES)
    state, _ = pipe.step(old, BATCHES[0])
    message = r"state: step or drain has already consumed it and deleted its arrays; use the state which that call returned"
    for use in (
        lambda: pipe.step(old, BATCHES[0]),
        lambda: pipe.drain(old),
        lambda: pipe.evaluate(old, BATCHES[0]),
        lambda: pipe.params(old),
    ):
        with pytest.raises(InputError, match=message):
            use()
    pipe.step(state, BATCHES[1])


@pytest.mark.parametrize("variant", ASYNCHRONOUS)
def test_a_state_consumed_by_drain_is_refused(variant):
    """A drain may do nothing at the last stage, whose work is complete after the step."""
    pipe = pipeline(variant)
    old, _ = pipe.step(fresh(pipe, BATCHES), BATCHES[0])
    same_arrays = jax.tree.map(lambda leaf: leaf, old)
    pipe.drain(old)
    for used_up in (old, same_arrays):
        with pytest.raises(InputError, match=r"step or drain has already consumed it"):
            pipe.step(used_up, BATCHES[1])


def test_an_invalid_state_is_refused():
    pipe, other = pipeline("gpipe"), pipeline("gpipe", d=2)
    with pytest.raises(InputError, match=r"state: this pipeline did not make it; call init first"):
        pipe.step(fresh(other, BATCHES), BATCHES[0])
    fresh(pipe, BATCHES)
    with pytest.raises(InputError, match=r"state: another pipeline made it: "):
        pipe.step(fresh(other, BATCHES), BATCHES[0])


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_the_whole_state_is_a_pytree(variant):
    """A state that is flattened and rebuilt with copies of its arrays trains with the same numbers."""
    pipe = pipeline(variant)
    expected = train(pipe, BATCHES)
    state = fresh(pipe, BATCHES)
    for batch in BATCHES[:3]:
        state, _ = pipe.step(state, batch)
    leaves, form = jax.tree.flatten(state)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    state = jax.tree.unflatten(form, [jnp.copy(leaf) for leaf in leaves])
    assert isinstance(state, State)
    actual = train(pipe, BATCHES[3:], state)
    check_equal(actual._replace(losses=expected.losses[:3] + actual.losses), expected)


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_a_drained_pipeline_may_be_drained_again(variant):
    pipe = pipeline(variant)
    state, _ = pipe.step(fresh(pipe, BATCHES), BATCHES[0])
    state = pipe.drain(state)
    before = models.copied(state)
    check_equal(pipe.drain(state), before)


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_evaluation_leaves_the_trajectory_unchanged(variant):
    pipe = pipeline(variant)
    expected = train(pipe, BATCHES)
    state, losses = fresh(pipe, BATCHES), []
    for batch in BATCHES:
        pipe.evaluate(state, BATCHES[0])
        pipe.params(state)
        state, metrics = pipe.step(state, batch)
        losses += [float(loss) for loss in metrics.losses.values()]
    pipe.evaluate(state, BATCHES[0])
    state = pipe.drain(state)
    assert losses == expected.losses
    check_equal((pipe.params(state), layer_state(state)), (expected.params, expected.layer_state))


@pytest.mark.thinned
@pytest.mark.oldest
@pytest.mark.parametrize("variant", models.VARIANTS)
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_evaluation_equals_a_forward_by_hand_at_the_version_it_names(variant, steps):
    """Evaluate before and during training; with stashing no version is in all stages, so a drained copy is evaluated."""
    pipe = pipeline(variant)
    state = fresh(pipe, BATCHES)
    for batch in BATCHES[:steps]:
        state, _ = pipe.step(state, batch)
    evaluation = pipe.evaluate(state, BATCHES[5])
    params = models.on_first_device(pipe.params(state))
    if all(evaluation.version in worker.weights.versions for worker in state.workers):
        evaluated = state
        stored = {layer_id: p for worker in state.workers for layer_id, p in worker.weights.read(evaluation.version).items()}
        check_equal(params, stored)
    else:
        evaluated = pipe.drain(models.copied(state))
        assert variant == "pipedream"
        assert evaluation.version == steps
    expected = value_of(pipe, params, models.on_first_device(layer_state(evaluated)), BATCHES[5])
    np.testing.assert_allclose((evaluation.loss, evaluation.weight), expected, rtol=1e-6)
    least = steps if pipe.plan.schedule not in ASYNCHRONOUS else max(steps - 1, 0)
    assert least <= evaluation.version <= steps


def test_evaluation_takes_any_number_of_microbatches():
    pipe = pipeline("gpipe")
    state = fresh(pipe, BATCHES)
    parts = [
        pipe.evaluate(state, jax.tree.map(lambda a, i=i: a[i : i + models.ROWS], BATCHES[0]))
        for i in range(0, models.ROWS * M, models.ROWS)
    ]
    whole = pipe.evaluate(state, BATCHES[0])
    weights = np.array([part.weight for part in parts])
    np.testing.assert_allclose(whole.weight, weights.sum())
    np.testing.assert_allclose(whole.loss, (np.array([part.loss for part in parts]) * weights).sum() / weights.sum(), rtol=1e-6)


@pytest.mark.parametrize("rows", [1, 3])
def test_evaluation_takes_any_number_of_rows(rows):
    pipe = pipeline("gpipe")
    state = fresh(pipe, BATCHES)
    inputs, labels = batch = jax.tree.map(lambda a: a[:rows], BATCHES[2])
    evaluation = pipe.evaluate(state, batch, metrics={"close": models.close})
    for found, metric in ((evaluation, models.masked_squares), (evaluation.metrics["close"], models.close)):
        total, weight = metric(jnp.asarray(pipe.predict(state, inputs)), labels)
        np.testing.assert_allclose(found.weight, weight)
        np.testing.assert_allclose(found.loss if found is evaluation else found.mean, total / weight, rtol=1e-6)


@pytest.mark.parametrize("variant", ["gpipe", "pipedream_2bw"])
def test_metrics_of_an_evaluation_are_sums_over_its_microbatches_like_the_loss(variant):
    pipe = pipeline(variant)
    state, _ = pipe.step(fresh(pipe, BATCHES), BATCHES[0])
    plain = pipe.evaluate(state, BATCHES[1])
    evaluation = pipe.evaluate(state, BATCHES[1], metrics={"close": models.close, "loss again": models.masked_squares})
    assert (plain.metrics, list(evaluation.metrics)) == ({}, ["close", "loss again"])
    loss = float(plain.loss), float(plain.weight)
    assert (float(evaluation.loss), float(evaluation.weight)) == loss == tuple(map(float, evaluation.metrics["loss again"]))
    params, layer_states = models.on_first_device(pipe.params(state)), models.on_first_device(layer_state(state))
    by_hand = Pipeline(STACK, pipe.plan, lambda y, labels: tuple(map(jnp.float32, models.close(y, labels))), models.momentum())
    np.testing.assert_allclose(evaluation.metrics["close"], value_of(by_hand, params, layer_states, BATCHES[1]), rtol=1e-6)
    assert 0 < float(evaluation.metrics["close"].mean) < 1
    sums = np.sum(np.asarray(evaluation.microbatches["loss again"]), axis=0)
    np.testing.assert_allclose((sums[0] / sums[1], sums[1]), loss, rtol=1e-6)


def test_metrics_are_compiled_once():
    pipe = pipeline("gpipe")
    state = fresh(pipe, BATCHES)

    @chex.assert_max_traces(n=2)  # for its shapes, and in the program
    def counted(outputs, labels):
        return models.close(outputs, labels)

    means = {float(pipe.evaluate(state, BATCHES[0], {"close": counted}).metrics["close"].mean) for _ in range(3)}
    assert len(means) == 1


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (lambda y, labels: y, r"metrics: 'm': expected \(sum, weight\), two scalars, found float32\[2, 3\]; return values.sum\(\), count"),
        (
            lambda y: y,
            r"metrics: 'm': the function does not take outputs float32\[2, 3\] of layer 'out' and labels .*; it raises TypeError",
        ),
    ],
)
def test_a_metric_that_does_not_fit_is_refused(metric, message):
    pipe = pipeline("gpipe")
    state = fresh(pipe, BATCHES)
    with pytest.raises(InputError, match=message):
        pipe.evaluate(state, BATCHES[0], metrics={"m": metric})
    assert float(pipe.evaluate(state, BATCHES[0]).weight) > 0, "the state is still there"


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([models.close], r"metrics: expected a dict of functions by name, found list"),
        ({"close": 3}, r"metrics: expected a function by name, found 'close': int; give \(outputs, labels\) -> \(sum, weight\)"),
        ({3: models.close}, r"metrics: expected a function by name, found 3: function"),
    ],
)
def test_metrics_that_are_no_functions_by_name_are_refused(metrics, message):
    with pytest.raises(InputError, match=message):
        checked_metrics(metrics)


def test_users_print_one_short_line():
    pipe = pipeline("pipedream_2bw")
    assert repr(STACK) == "LayerStack(track, noise, mix, out)"
    assert "not compiled yet" in repr(pipe)
    state, _ = pipe.step(fresh(pipe, BATCHES), BATCHES[0])
    assert repr(state) == "State(before batch 1, in flight since batch 0, 3 workers)"
    assert repr(pipe.drain(state)) == "State(before batch 1, nothing in flight, 3 workers)"
    assert repr(state.workers[0]) == "WorkerState(already consumed)"
    assert repr(pipe).startswith("Pipeline(Plan(pipedream_2bw, 4 microbatches, 3 stages: [")
    many = Plan.even([f"layer {i}" for i in range(1000)], 500, "pipedream", 4, replicas=2, vertical_sync=True)
    expected = (
        "Plan(pipedream, 4 microbatches, 500 stages: [layer 0, layer 1] × 2, [layer 2, layer 3] × 2, [layer 4, layer 5] × 2, "
        "[layer 6, layer 7] × 2, …, [layer 998, layer 999] × 2, vertical_sync=True)"
    )
    assert repr(many) == str(many) == expected
    assert len(repr(simulate(lower(pipe.plan, 3), pipe.costs(BATCHES[0])))) < 300


def test_evaluation_of_a_batch_without_weight_is_zero():
    pipe = pipeline("gpipe")
    x, labels = BATCHES[0]
    evaluation = pipe.evaluate(fresh(pipe, BATCHES), (x, labels | {"mask": np.zeros_like(labels["mask"])}))
    assert (float(evaluation.loss), float(evaluation.weight)) == (0.0, 0.0)


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_params_survive_later_steps(variant):
    """The next update may write into the memory of the version that was returned."""
    pipe = pipeline(variant)
    state, _ = pipe.step(fresh(pipe, BATCHES), BATCHES[0])
    params = pipe.params(state)
    before = models.on_first_device(params)
    for batch in BATCHES[1:]:
        state, _ = pipe.step(state, batch)
    check_equal(params, before)
    assert set(params) == set(STACK.ids)


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("variant", models.VARIANTS)
def test_the_caller_may_overwrite_its_batch_at_once(variant):
    """A loader may fill one buffer repeatedly. Rows are large, so that a late copy would be noticed."""
    width, rows = 256, 256
    stack = models.LayerStack({"a": models.dense(width), "b": models.dense(width), "c": models.dense(width)})
    plan = Plan.even(stack.ids, 3, microbatches=M, **models.VARIANTS[variant])
    pipe = Pipeline(stack, plan, models.squares, optax.sgd(1e-4))
    batches = models.batches_of(4, rows * M, width=width)
    expected = train(pipe, batches)
    state, losses, buffer = fresh(pipe, batches), [], models.batches_of(1, rows * M, width=width)[0]
    for batch in batches:
        jax.tree.map(np.copyto, buffer, batch)
        state, metrics = pipe.step(state, buffer)
        jax.tree.map(lambda leaf: leaf.fill(np.nan), buffer)
        losses += metrics.losses.values()
    state = pipe.drain(state)
    assert [float(loss) for loss in losses] == expected.losses
    check_equal(pipe.params(state), expected.params)


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("variant", ["pipedream_2bw", "pipedream", "gpipe"])
def test_the_placement_does_not_change_the_numbers(variant):
    expected = train(pipeline(variant), BATCHES)
    plan = pipeline(variant).plan
    for devices in ([jax.devices()[0]] * 3, [jax.devices()[i] for i in (5, 5, 2)]):
        check_equal(train(Pipeline(STACK, plan, models.masked_squares, models.momentum(), devices=devices), BATCHES), expected)
    placed = Pipeline(STACK, plan.model_copy(update={"placement": ((3,), (1,), (3,))}), models.masked_squares, models.momentum())
    assert [device.id for device in placed.devices] == [3, 1, 3]
    check_equal(train(placed, BATCHES), expected)


def test_observe_sees_every_instruction_in_the_order_of_the_program():
    pipe, seen = pipeline("pipedream_flush"), []
    state, _ = pipe.step(fresh(pipe, BATCHES), BATCHES[0], observe=seen.append)
    second = []
    pipe.step(state, BATCHES[1], observe=second.append)
    assert [type(event.instruction) for event in seen] == [type(event.instruction) for event in second]
    assert [event.instruction.batch for event in second if isinstance(event.instruction, Update)] == [1, 1, 1]
    assert all((event.done is not None) == isinstance(event.instruction, (Compute, Update)) for event in seen)
    for before, after in zip(seen, second, strict=True):
        if isinstance(before.instruction, Compute):
            assert after.instruction.microbatch == before.instruction.microbatch + pipe.plan.microbatches
            assert after.instruction.version == before.instruction.version + 1


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"microbatches": 2 * M}, f"microbatches is {M} there and {2 * M} here"),
        ({"schedule": "pipedream_2bw"}, "schedule is gpipe there and pipedream_2bw here"),
        ({"recompute": "full"}, "recompute is none, none, none there and full, full, full here"),
        ({"optimizer": optax.adam(0.1)}, "optimizer state is of shapes with the hash "),
        ({"devices": jax.devices()[3:6]}, "devices is .*0, .*1, .*2 there and .*3, .*4, .*5 here"),
        ({"rows": 2}, r"microbatch is .*float32\[2, 3\].* there and .*float32\[4, 3\].* here"),
    ],
)
def test_the_state_of_another_pipeline_is_refused_with_the_difference(other, message):
    original = pipeline("gpipe")
    state = fresh(original, BATCHES)
    fields, optimizer = dict(other), other.get("optimizer", models.momentum())
    rows, devices = fields.pop("rows", 1), fields.pop("devices", None)
    fields.pop("optimizer", None)
    plan = Plan.even(STACK.ids, 3, **({"schedule": "gpipe", "microbatches": M} | fields))
    batches = models.masked_batches(1, plan.microbatches, rows=rows * models.ROWS)
    pipe = Pipeline(STACK, plan, models.masked_squares, optimizer, devices)
    fresh(pipe, batches)
    for call in (pipe.drain, pipe.params, lambda state: pipe.step(state, batches[0]), lambda state: pipe.evaluate(state, batches[0])):
        with pytest.raises(InputError, match=f"^state: another pipeline made it: {message}"):
            call(state)
    original.step(state, BATCHES[0])


class Lazy:
    """Rows that are read on demand; the third read fails or returns too few."""

    def __init__(self, array, failure):
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim
        self._array, self._failure, self._reads = array, failure, 0

    def __getitem__(self, index):
        self._reads += 1
        if self._reads == 3 and self._failure is OSError:
            raise OSError("the disk is gone")
        return self._array[index][1:] if self._reads == 3 else self._array[index]


@pytest.mark.parametrize(
    ("failure", "message"), [(OSError, "the disk is gone"), (InputError, r"batch: expected rows 4 to 5 as float32\[2, 3\]")]
)
def test_a_batch_that_fails_to_load_leaves_the_state_unchanged(failure, message):
    pipe = pipeline("pipedream_2bw")
    expected = train(pipe, BATCHES[:3])
    state, losses = fresh(pipe, BATCHES), []
    for batch in BATCHES[:3]:
        with pytest.raises(failure, match=message):
            pipe.step(state, (Lazy(batch[0], failure), batch[1]))
        state, metrics = pipe.step(state, batch)
        losses += map(float, metrics.losses.values())
    state = pipe.drain(state)
    check_equal((losses, pipe.params(state), layer_state(state)), tuple(expected))


def test_a_batch_of_python_numbers_is_not_listed_number_by_number():
    with pytest.raises(InputError) as error:
        pipeline("gpipe").check(([[1.0] * 100] * 100, [0] * 100))
    assert len(str(error.value)) < 500
    assert "and 10,092 more" in str(error.value)


def test_the_loss_of_another_batch_is_an_error_that_says_where_it_is():
    pipe = pipeline("pipedream")
    state = fresh(pipe, BATCHES)
    for batch in BATCHES[:2]:
        state, metrics = pipe.step(state, batch)
    assert list(metrics.losses) == [1] == list(jax.tree.map(float, metrics.losses))
    for other in (0, 2):
        message = (
            rf"^metrics: expected a batch that this call finished \(batch 1\), found {other}; other batches are in the metrics of other"
        )
        with pytest.raises(InputError, match=message):
            metrics.losses[other]


def test_saving_and_loading_take_a_folder_and_a_state(tmp_path):
    pipe = pipeline("pipedream")
    with pytest.raises(InputError, match="this pipeline has not been initialized; give the key and a batch"):
        pipe.load(tmp_path)
    state = fresh(pipe, BATCHES)
    with pytest.raises(InputError, match="there is no complete checkpoint; call init to begin a run"):
        pipe.load(tmp_path)
    for batch in BATCHES[:3]:
        state, _ = pipe.step(state, batch)
    pipe.save(tmp_path, state, facts={"note": 1})
    loaded = pipe.load(tmp_path)
    assert loaded.batch == 3
    losses = []
    for run in (state, loaded):
        for t, batch in enumerate(BATCHES[3:], start=3):
            run, metrics = pipe.step(run, batch)
            losses.append(float(metrics.losses[t]))
    check_equal(losses[:3], losses[3:])


def test_loading_with_a_fresh_optimizer_takes_the_weights_for_another_optimizer(tmp_path):
    pipe = pipeline("gpipe")
    state, _ = pipe.step(fresh(pipe, BATCHES), BATCHES[0])
    pipe.save(tmp_path, state)
    other = Pipeline(pipe.stack, pipe.plan, pipe.loss, optax.adam(0.1))
    key = jax.random.key(7)
    with pytest.raises(InputError, match="optimizer"):
        other.load(tmp_path, key, BATCHES[0])
    loaded = other.load(tmp_path, key, BATCHES[0], fresh_optimizer=True)
    assert loaded.batch == 1
    check_equal(other.params(loaded), pipe.params(state))
    begun = other.init(key, BATCHES[0])
    check_equal(*([worker.optimizer for worker in each.workers] for each in (loaded, begun)))
