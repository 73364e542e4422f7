"""Precision: masters, float32 accumulation, the loss scale, dtypes of messages, and invalid settings."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import InputError, Layer, LayerStack, Pipeline, Plan, Precision
from jpipe.model import LayerwiseOptimizer
from tests.jpipe import models, running

STACK = models.rich_stack()
MASTERS = Precision(params="bfloat16")
CASES = [
    (variant, d, m, 1)
    for variant in sorted(models.VARIANTS, reverse=True)  # those with several versions first
    for d, m in ((2, 1), (4, 4))
    if models.is_legal(layers=STACK.ids, num_stages=d, microbatches=m, **models.VARIANTS[variant])
] + [("gpipe", 1, 4, 1), ("pipedream_flush", 2, 4, 2), ("pipedream_2bw", 2, 4, 2), ("pipedream", 2, 4, 2)]


def pipeline(plan, precision, optimizer=None, **options):
    devices = [jax.devices()[s] for s, _ in plan.workers]
    return Pipeline(STACK, plan, models.masked_squares, optimizer or models.momentum(), devices, precision=precision, **options)


def dtypes(tree) -> set[str]:
    return {str(leaf.dtype) for leaf in jax.tree.leaves(tree)}


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(("variant", "d", "m", "replicas"), CASES)
def test_masters_are_the_float32_parameters_of_a_run_that_casts_them(variant, d, m, replicas):
    """A weight version is the masters cast to bfloat16, of half the bytes, and so is the whole stash."""
    plan, batches = Plan.even(STACK.ids, d, microbatches=m, replicas=replicas, **models.VARIANTS[variant]), models.masked_batches(5, m)
    cast, with_masters = (pipeline(plan, precision) for precision in (Precision(compute="bfloat16"), MASTERS))
    expected = running.train(cast, batches)
    state, losses = running.fresh(with_masters, batches), []
    for batch in batches:
        state, metrics = with_masters.step(state, batch)
        losses += map(float, metrics.losses.values())
    assert losses == expected.losses[: len(losses)]
    in_flight = with_masters.params(state)
    state = with_masters.drain(state)
    actual = with_masters.params(state)
    running.check_equal(actual, expected.params)
    running.check_equal(in_flight, expected.params)
    running.check_equal(running.layer_state(state), expected.layer_state)
    assert dtypes(actual) == {"float32"}
    for worker in state.workers:
        newest = worker.weights.read(worker.weights.newest)
        running.check_equal(newest, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), {i: actual[i] for i in newest}))
        assert dtypes(worker.weights) == {"bfloat16"}
        assert dtypes(worker.accumulators) == {"float32"}
    for a, b in zip(cast.costs(batches[0]), with_masters.costs(batches[0]), strict=True):
        assert (a.weights, a.accumulators) == (2 * b.weights, b.accumulators)
        assert b.optimizer == a.optimizer + a.weights
        assert (a.inputs, a.outputs, a.residuals, a.message, a.gradient) == (b.inputs, b.outputs, b.residuals, b.message, b.gradient)


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(("variant", "d", "m", "replicas"), [case for case in CASES if case[1] > 1 and case[3] == 1])
def test_a_schedule_with_masters_equals_the_sequential_reference_bit_for_bit(variant, d, m, replicas):
    plan = Plan.even(STACK.ids, d, microbatches=m, replicas=replicas, **models.VARIANTS[variant])
    running.check_against_reference(STACK, plan, {3}, precision=MASTERS)


def test_a_step_with_masters_by_hand():
    """Cast the masters, compute in bfloat16, sum in float32 and update the masters; only the named steps round these numbers."""
    layer = Layer(
        lambda key, x: ({"w": jax.random.normal(key, (3,))}, {}), lambda params, state, x, key, train: (params["w"][None] * x, state)
    )
    stack, x = LayerStack({"one": layer}), np.array([[0.5], [-2.0]], np.float32)
    labels = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)

    def loss(y, labels):
        return ((y - labels) ** 2).sum(), 1.0

    pipe = Pipeline(stack, Plan.even(stack.ids, 1, "gpipe", 2), loss, optax.sgd(0.5), precision=MASTERS)
    state = pipe.init(jax.random.key(0), (x, labels))
    masters = np.asarray(pipe.params(state)["one"]["w"])
    state, metrics = pipe.step(state, (x, labels))
    errors = _bfloat16(masters) * x - labels
    gradients = _bfloat16(2 * errors * x)
    running.check_equal(pipe.params(state), {"one": {"w": masters - np.float32(0.5) * (gradients[0] + gradients[1]) / np.float32(2)}})
    assert float(metrics.losses[0]) == pytest.approx((errors**2).sum() / 2, rel=1e-6)


def test_an_update_is_of_the_masters():
    rule, params = LayerwiseOptimizer(optax.sgd(0.5), has_masters=True), {"w": jnp.ones(3, jnp.bfloat16)}
    new, state = rule.update("a", {"w": jnp.full(3, 2.0**-9)}, rule.init("a", params), params)
    running.check_equal(state.masters, {"w": np.full(3, 1 - 2.0**-10, np.float32)})
    running.check_equal(new, {"w": jnp.ones(3, jnp.bfloat16)})


def _bfloat16(array):
    return array.astype(jnp.bfloat16).astype(np.float32)


# Accumulation ----------------------------------------------------------------------------------------------------------


def scale(dtype) -> Layer:
    """Build a layer that computes `w * x`, with a `w` of zeros."""
    return Layer(lambda key, x: ({"w": jnp.zeros((), dtype)}, {}), lambda params, state, x, key, train: (params["w"] * x, state))


@pytest.mark.parametrize("replicas", [1, 2])
def test_many_small_bfloat16_gradients_do_not_vanish(replicas):
    """A sum in bfloat16 would stay at 1: each other term is less than half of its last digit."""
    stack, m = LayerStack({"scale": scale(jnp.bfloat16)}), 64
    x = np.full((m, 1), 2.0**-9, jnp.bfloat16)
    x[0] = 1
    pipe = Pipeline(stack, Plan.even(stack.ids, 1, "gpipe", m, replicas=replicas), lambda y, labels: (y.sum(), 1.0 / m), optax.sgd(1.0))
    state, _ = pipe.step(pipe.init(jax.random.key(0), (x, x)), (x, x))
    assert dtypes(state.workers[0].accumulators) == {"float32"}
    assert dtypes(state.workers[0].weights) == {"bfloat16"}
    (weight,) = jax.tree.leaves(pipe.params(state))
    assert weight == jnp.asarray(-(1 + (m - 1) * 2.0**-9), jnp.bfloat16)


def test_gradients_accumulate_in_float64_if_asked():
    stack = LayerStack({"scale": scale(jnp.float32)})
    with jax.enable_x64(True):
        pipe = Pipeline(
            stack,
            Plan.even(stack.ids, 1, "gpipe", 4),
            lambda y, labels: ((y * labels).sum(), 1.0),
            optax.sgd(2.0**30),
            precision=Precision(accumulate="float64"),
        )
        x, labels = np.array([[1.0], [1e-9], [-1.0], [1e-9]], np.float32), np.ones((4, 1), np.float32)
        state, _ = pipe.step(pipe.init(jax.random.key(0), (x, labels)), (x, labels))
        assert dtypes(state.workers[0].accumulators["gradients"]) == {"float64"}
        (weight,) = jax.tree.leaves(pipe.params(state))
        assert (weight.dtype, float(weight)) == (jnp.float32, pytest.approx(-(2.0**30) * 2e-9 / 4))


# The loss scale --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_power_of_two_as_the_loss_scale_changes_no_bit():
    plan, batches = Plan.even(STACK.ids, 2, "pipedream_2bw", 4), models.masked_batches(3, 4)
    plain, scaled = (running.train(pipeline(plan, Precision(compute="bfloat16", loss_scale=s)), batches) for s in (None, 1024))
    running.check_equal(scaled._asdict(), plain._asdict())


def test_the_loss_scale_keeps_small_float16_gradients():
    stack, m = LayerStack({"first": scale(jnp.float32), "second": lambda x: x}), 2
    x = np.ones((m, 1), np.float32)

    def trained(precision):
        pipe = Pipeline(
            stack, Plan.even(stack.ids, 2, "gpipe", m), lambda y, labels: (1e-9 * y.sum(), 0.5), optax.sgd(1.0), precision=precision
        )
        state, _ = pipe.step(pipe.init(jax.random.key(0), (x, x)), (x, x))
        return float(jax.tree.leaves(pipe.params(state))[0]), pipe.costs((x, x))

    with pytest.warns(UserWarning, match=r'^precision: compute is float16 without a loss_scale: .*; set loss_scale to "dynamic", or'):
        plain = Precision(params="float16")
    assert trained(plain)[0] == 0
    weight, costs = trained(Precision(params="float16", loss_scale=2**16))
    assert weight == pytest.approx(-2e-9, rel=1e-3)
    assert (costs[0].outputs, costs[0].weights, costs[0].accumulators) == (2, 2, 8)


# What is computed in which dtype ---------------------------------------------------------------------------------------


def test_layers_compute_in_the_dtype_but_the_loss_and_the_state_do_not():
    seen = []

    def look(x):
        seen.append(dtypes(x))
        return {"float": x["float"].astype(jnp.float32), "int": x["int"]}

    def loss(y, labels):
        seen.append(dtypes(y))
        return y["float"].sum(), y["float"].size

    stack = LayerStack({"look": look, "again": look})
    x = {"float": np.ones((2, 1), np.float32), "int": np.ones((2, 1), np.int32)}
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", 2), loss, optax.sgd(1.0), precision=Precision(compute="bfloat16"))
    pipe.check((x, x["float"]))
    assert {frozenset(one) for one in seen} == {frozenset({"bfloat16", "int32"}), frozenset({"float32", "int32"})}
    assert pipe.costs((x, x["float"]))[0].outputs == 2 + 4
    state = running.fresh(pipeline(Plan.even(STACK.ids, 1, "gpipe", 1), MASTERS), models.masked_batches(1, 1))
    assert dtypes(state.workers[0].layer_state) == {"float32", "int32"}


def test_float64_is_unchanged():
    with jax.enable_x64(True):
        stack, batches = LayerStack({"one": models.dense()}), models.batches_of(2, 2, dtype=np.float64)
        plan = Plan.even(stack.ids, 1, "pipedream_2bw", 1)
        plain, cast = (
            running.train(Pipeline(stack, plan, models.squares, models.momentum(), precision=precision), batches)
            for precision in (Precision(), MASTERS)
        )
        assert dtypes(cast.params) == {"float64"}
        running.check_close(cast.params, plain.params)


# Restored --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_restored_run_has_the_masters_under_any_cut():
    plan, batches = Plan.even(STACK.ids, 2, "pipedream", 2), models.masked_batches(6, 2)
    pipe = pipeline(plan, MASTERS)
    state, snapshot = running.fresh(pipe, batches), pipe.snapshot(3)
    for batch in batches:
        state, _ = pipe.step(state, batch, observe=snapshot)
    state = pipe.drain(state)
    layers = jax.tree.map(np.asarray, snapshot.layers())

    def restored(plan, fresh=False):
        pipe = pipeline(plan, MASTERS)
        return pipe, pipe.restore(jax.random.key(running.KEY), batches[0], layers, 3, fresh_optimizer=fresh)

    resumed_pipe, middle = restored(plan)
    running.check_equal(resumed_pipe.params(state := _trained(resumed_pipe, middle, batches[3:])), pipe.params(_drained(pipe, batches)))
    other, middle = restored(Plan.even(STACK.ids, 4, "gpipe", 2))
    _, reset = restored(Plan.even(STACK.ids, 4, "gpipe", 2), fresh=True)
    masters = {layer_id: layers[layer_id]["optimizer"]["masters"] for layer_id in STACK.ids}
    running.check_equal(other.params(middle), masters)
    for worker in reset.workers:
        running.check_equal(
            {i: optimizer_state.masters for i, optimizer_state in worker.optimizer.items()}, {i: masters[i] for i in worker.optimizer}
        )
    with pytest.raises(InputError, match=r"expected 'b' as in the model, float32\[3\], found bfloat16\[3\]; is it of another precision\?$"):
        pipeline(plan, Precision()).check_layers(batches[0], layers, 3)
    plain = pipeline(plan, Precision())
    plain.init(jax.random.key(0), batches[0])
    with pytest.raises(InputError, match=re.escape("state: another pipeline made it: precision is Precision(params='bfloat16', compute")):
        plain.drain(state)


def _drained(pipe, batches):
    return _trained(pipe, running.fresh(pipe, batches), batches)


def _trained(pipe, state, batches):
    for batch in batches:
        state, _ = pipe.step(state, batch)
    return pipe.drain(state)


# Bad input -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"params": "bf16"}, r"^precision: params: unknown dtype 'bf16'; did you mean 'bfloat16'\?$"),
        ({"compute": "float8"}, r"^precision: compute: unknown dtype 'float8'; did you mean 'float"),
        ({"accumulate": "bfloat16"}, r"^precision: accumulate: unknown dtype 'bfloat16'; "),
        (
            {"loss_scale": 0},
            r'^precision: loss_scale: expected a finite number above 0, "dynamic", a DynamicLossScale or None, found 0; give',
        ),
        ({"loss_scale": float("inf")}, r"expected a finite number above 0"),
        ({"loss_scale": True}, r"expected a finite number above 0"),
    ],
)
def test_a_wrong_precision_is_refused(fields, message):
    with pytest.raises(InputError, match=message):
        Precision(**fields)


def test_a_pipeline_refuses_invalid_precisions():
    plan = Plan.even(STACK.ids, 1, "gpipe", 1)
    with pytest.raises(InputError, match=r"^precision: expected a jpipe\.Precision, found str; give Precision\("):
        Pipeline.__init__.__wrapped__(object.__new__(Pipeline), STACK, plan, models.squares, models.momentum(), precision="bfloat16")
    with pytest.raises(InputError, match=r"^precision: accumulate: float64 needs jax\.config\.update\('jax_enable_x64', True\)"):
        pipeline(plan, Precision(accumulate="float64"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Precision(params="float16", loss_scale=8).compute == "float16"
        assert Precision(params="bfloat16", compute="float32").compute == "float32"
