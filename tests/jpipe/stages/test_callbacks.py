"""Host callbacks run once for each microbatch, with the values of its forward, in every schedule; so do those of a backward."""

import logging
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.experimental import checkify, io_callback

from jpipe import InputError, Layer, LayerStack, Pipeline, Plan
from jpipe.stages._standalone import StandaloneStage
from tests.jpipe import models

pytestmark = pytest.mark.usefixtures("lenient")

FROZEN_SGD = optax.inject_hyperparams(optax.sgd)(0.0)  # the rate is state, so that nothing counts as frozen
MICROBATCHES, ROWS = 4, 2
SEEN: dict[str, list[float]] = defaultdict(list)


def record(name, value, result=None):
    """Record a value after checking that it is positive, which zeros in place of a forward's values are not."""
    assert value > 0
    SEEN[name].append(float(value))
    return result


def noted(name, x):
    jax.debug.callback(lambda value: record(name, value), x.min())
    return x


def factor(call, name, x):
    """Return 2 from a callback on the host."""
    host = jax.ShapeDtypeStruct((), x.dtype)
    return call(lambda value: record(name, value, np.asarray(2, x.dtype)), host, jax.lax.stop_gradient(x.min()))


def watched(x):
    """Call all kinds of callbacks, at the top level and inside JAX's control flow."""
    x = noted("debug", jnp.exp(x))
    x = jax.jit(lambda x: noted("jit", x) * 0.5)(x)
    x, _ = jax.lax.scan(lambda x, _: (noted("scan", x) * 0.5, None), x, None, length=1)
    x = jax.lax.cond(x.sum() > 0, lambda x: noted("cond", x), lambda x: -x, x)
    x = x * factor(jax.pure_callback, "pure", x) * factor(io_callback, "io", x)
    io_callback(lambda value: record("ordered", value), None, jax.lax.stop_gradient(x.min()), ordered=True)
    return jnp.log(x)


def from_weights() -> Layer:
    """Return a layer with a callback on its weights and weights scaled by the host; its backward calls neither again."""

    def apply(params, state, x, key, train):
        weights = jax.jit(lambda w, x: (noted("weights", jnp.square(w)) * factor(io_callback, "scaled", jnp.square(w)), noted("both", x)))
        scaled, x = weights(params["w"], jnp.square(x))
        return jnp.tanh(x @ scaled), state

    return Layer(lambda key, x: ({"w": jnp.full((3, 3), 0.2)}, {}), apply)


def loss(y, labels):
    noted("loss", 1 + jnp.square(y))
    return jnp.square(y - labels).sum(), y.size


STACK = LayerStack({"in": models.dense(), "watched": watched, "weights": from_weights(), "out": models.dense()})
PLANS = {
    "gpipe": {"num_stages": 3, "schedule": "gpipe"},
    "flush": {"num_stages": 2, "schedule": "pipedream_flush"},
    "2bw": {"num_stages": 4, "schedule": "pipedream_2bw"},
    "stashing": {"num_stages": 3, "schedule": "pipedream"},
    "split": {"num_stages": 4, "schedule": "zb_h1"},
    "chunks": {"num_stages": 4, "schedule": "zb_v"},
    "replicas": {"num_stages": 2, "schedule": "pipedream_flush", "replicas": 2},
    "elementwise": {"num_stages": 3, "schedule": "pipedream_flush", "recompute": "elementwise"},
    "elementwise, split": {"num_stages": 4, "schedule": "zb_h1", "recompute": "elementwise"},
}


def batch_of(microbatches: int = MICROBATCHES) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.random.default_rng(0).normal(size=(2, ROWS * microbatches, 3)).astype(np.float32)
    return x, y


def recorded_values() -> dict[str, list[float]]:
    """Return the sorted values that each callback recorded since the last call, and clear them."""
    jax.effects_barrier()
    result = {name: sorted(values) for name, values in SEEN.items()}
    SEEN.clear()
    return result


def expected(params, batch) -> dict[str, list[float]]:
    """Return the values that the callbacks record when the forwards of a batch run one after the other."""
    for x, y in zip(*(np.split(part, MICROBATCHES) for part in batch), strict=True):
        outputs, _ = STACK.apply(STACK.ids, params, {i: {} for i in STACK.ids}, x, key=None, microbatch=None, train=True)
        loss(outputs, y)
    return recorded_values()


@pytest.mark.slow
@pytest.mark.oldest
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("plan", PLANS)
def test_callbacks_run_once_with_the_values_of_the_forward(plan):
    pipe, batch = (
        Pipeline(STACK, Plan.even(STACK.ids, microbatches=MICROBATCHES, **PLANS[plan]), loss, FROZEN_SGD),
        batch_of(),
    )
    state = pipe.init(jax.random.key(0), batch)
    assert recorded_values() == {}, "nothing has run"
    values = expected(models.on_first_device(pipe.params(state)), batch)
    assert {len(calls) for calls in values.values()} == {MICROBATCHES}
    state, _ = pipe.step(state, batch)
    state = jax.block_until_ready(pipe.drain(state))
    check_values(recorded_values(), values)
    jax.block_until_ready(pipe.evaluate(state, batch).loss)
    check_values(recorded_values(), values)


def check_values(actual, values) -> None:
    assert {name: len(calls) for name, calls in actual.items()} == {name: len(calls) for name, calls in values.items()}
    for name, calls in actual.items():
        np.testing.assert_allclose(calls, values[name], rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_callbacks_on_a_mesh():
    """A callback runs once with the whole array; an ordered one cannot run on several devices, and the error names the layer."""
    batch, layers = batch_of(2), {"in": models.dense(), "noted": lambda x: noted("mesh", jnp.exp(x)), "out": models.dense()}
    stack = LayerStack(layers)
    pipe = Pipeline(stack, Plan.even(stack.ids, 1, "gpipe", 2, mesh={"data": 2}), models.squares, FROZEN_SGD)
    state, _ = pipe.step(pipe.init(jax.random.key(0), batch), batch)
    jax.block_until_ready(state)
    first = jnp.tanh(batch[0] @ pipe.params(state)["in"]["w"])
    np.testing.assert_allclose(recorded_values()["mesh"], sorted(float(jnp.exp(part).min()) for part in jnp.split(first, 2)), rtol=1e-5)

    def ordered(x):
        jax.debug.print("x {}", x.sum(), ordered=True)
        return x

    stack = LayerStack({**layers, "noted": ordered})
    pipe = Pipeline(stack, Plan.even(stack.ids, 1, "gpipe", 2, mesh={"data": 2}), models.squares, FROZEN_SGD)
    with pytest.raises(
        InputError, match=r"^layer 'noted': a side effect cannot run on a mesh: ValueError: .*; make the side effect unordered"
    ):
        pipe.init(jax.random.key(0), batch)


def test_a_side_effect_that_does_not_compile_is_reported_with_the_layer():
    def checked(x):
        checkify.check(x.sum() < 1e9, "too large")
        return x

    stack = LayerStack({"in": models.dense(), "checked": checked})
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", 2), models.squares, FROZEN_SGD)
    with pytest.raises(InputError, match=r"^layer 'checked': a side effect cannot run: ValueError: .*; .* in checkify\.checkify"):
        pipe.init(jax.random.key(0), batch_of(2))


@jax.custom_vjp
def reported(x):
    """Return `x`, and record the gradient in the backward."""
    return x


def _forward(x):
    noted("forward", 1 + jnp.square(x))
    return x, None


def _report(_, gradient):
    jax.debug.callback(lambda value: SEEN["gradient"].append(float(value)), gradient.sum())
    return (gradient,)


reported.defvjp(_forward, _report)


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("schedule", ["pipedream_flush", "zb_h1"])
def test_callbacks_of_a_backward_run_once_with_its_gradients(schedule):
    """A backward that would be split runs as a whole, and a warning names the layer."""
    batch, stack = batch_of(), LayerStack({"in": models.dense(), "reported": lambda x: reported(x), "out": models.dense()})
    pipe = Pipeline(stack, Plan.even(stack.ids, 3, schedule, MICROBATCHES), models.squares, FROZEN_SGD)
    if schedule == "zb_h1":
        with pytest.warns(UserWarning, match=r"^layer 'reported': its backward cannot be split: it has side effects"):
            state = pipe.init(jax.random.key(0), batch)
    else:
        state = pipe.init(jax.random.key(0), batch)
    params = models.on_first_device(pipe.params(state))
    state, _ = pipe.step(state, batch)
    jax.block_until_ready(pipe.drain(state))
    calls = recorded_values()
    assert len(calls["forward"]) == MICROBATCHES

    def after(h, y):
        return models.squares(jnp.tanh(h @ params["out"]["w"]), y)[0]

    hidden = jnp.tanh(batch[0] @ params["in"]["w"])
    values = [float(jax.grad(after)(*part).sum()) for part in zip(*(jnp.split(a, MICROBATCHES) for a in (hidden, batch[1])), strict=True)]
    np.testing.assert_allclose(calls["gradient"], sorted(values), rtol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("recompute", ["full", "dots_saveable"])
def test_recomputation_repeats_callbacks_with_one_warning(recompute, caplog):
    batch, stack = batch_of(), LayerStack({"in": models.dense(), "noted": lambda x: noted("again", jnp.exp(x)), "out": models.dense()})
    plan = models.cut(stack.ids, (2, 1), recompute=recompute, schedule="gpipe", microbatches=MICROBATCHES)
    pipe = Pipeline(stack, plan, models.squares, FROZEN_SGD)
    with caplog.at_level(logging.WARNING, "jpipe"):
        state = pipe.init(jax.random.key(0), batch)
    (record,) = caplog.records
    assert record.getMessage().startswith("layer 'noted': recomputation runs its side effects (host callbacks, prints) once more")
    state, _ = pipe.step(state, batch)
    jax.block_until_ready(state)
    hidden = jnp.exp(jnp.tanh(batch[0] @ pipe.params(state)["in"]["w"]))
    values = sorted(2 * [float(part.min()) for part in jnp.split(hidden, MICROBATCHES)])
    np.testing.assert_allclose(recorded_values()["again"], values, rtol=1e-5)


def test_a_callback_that_cannot_be_recomputed_is_refused_with_the_layer():
    def recorded(x):
        io_callback(lambda _: None, None, jax.lax.stop_gradient(x))
        return x

    stack = LayerStack({"in": models.dense(), "recorded": recorded, "out": models.dense()})
    plan = models.cut(stack.ids, (2, 1), recompute="full", schedule="gpipe", microbatches=MICROBATCHES)
    pipe = Pipeline(stack, plan, models.squares, FROZEN_SGD)
    with pytest.raises(
        InputError, match=r"^layer 'recorded': the forward cannot be recomputed: NotImplementedError: Effects .*; set recompute to"
    ):
        pipe.init(jax.random.key(0), batch_of())


class Checked(linen.Module):
    """A Linen module whose forward runs when its parameters are initialized."""

    @linen.compact
    def __call__(self, x):
        noted("input", jnp.square(x))  # an input of zeros would fail
        kernel = self.param("kernel", lambda key: noted("kernel", jnp.exp(jax.random.normal(key, (3, 3)))))
        return x @ kernel


def test_initialization_the_probe_and_a_profile_show_no_made_up_values():
    """Values that depend on the zeros in place of an input are not recorded; those of the initialization are recorded once."""

    def checked():
        def update(updates, state, params=None):
            noted("rate", state + 1)
            jax.debug.callback(lambda g: SEEN["update"].append(float(g)), sum(jnp.sum(leaf) for leaf in jax.tree.leaves(updates)))
            return updates, state

        return optax.GradientTransformation(lambda params: noted("start", jnp.ones(())), update)

    batch, stack = batch_of(), LayerStack({"checked": Checked(), "out": models.dense()})
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", MICROBATCHES), models.squares, optax.chain(checked(), optax.sgd(0.1)))
    pipe.check(batch)
    assert recorded_values() == {}
    pipe.init(jax.random.key(0), batch)
    calls = recorded_values()
    assert {name: len(values) for name, values in calls.items()} == {"kernel": 1, "start": 2}
    functions = pipe.stage_functions(batch)[0]
    alone = StandaloneStage(stack, pipe.plan.stages[0], stack.specs(batch[0][:ROWS]), None, models.squares, functions.optimizer)
    for name in ("forward", "backward", "update"):
        assert not alone.trace(name, jax.devices()[0]).jaxpr.effects
