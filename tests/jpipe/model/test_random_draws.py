"""Random numbers of initialization, dropout, evaluation and losses depend only on (seed, layer id, microbatch)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jpipe import Layer, LayerStack, Pipeline, Plan
from tests.jpipe import models
from tests.jpipe.running import check_equal, fresh


def drawing() -> Layer:
    """Return a layer that adds a random number to its input and has an unused parameter."""

    def apply(params, state, x, key, train):
        return x if key is None else x + jax.random.uniform(key), state

    return Layer(lambda key, x: ({"unused": jnp.zeros(1)}, {}), apply, stochastic=True)


STACK = LayerStack({"a": drawing(), "b": drawing(), "c": drawing()})


def total(y, labels):
    """Return the sum of the outputs: for a microbatch of ones, 1 plus the random number drawn for it."""
    return y[0, 0], 1.0


def losses(sizes, m, count, *, seed=0, stack=STACK, variant="pipedream"):
    plan = models.cut(stack.ids, sizes, microbatches=m, **models.VARIANTS[variant])
    pipe = Pipeline(stack, plan, total, models.momentum())
    batch = (np.ones((m, 1), np.float32), np.ones((m, 1), np.float32))
    state, values = pipe.init(jax.random.key(seed), batch), []
    for _ in range(count):
        state, metrics = pipe.step(state, batch)
        values += [float(loss) for loss in metrics.losses.values()]
    return np.array(values)


@pytest.mark.oldest
def test_every_microbatch_draws_new_numbers():
    values = losses((1, 1, 1), 1, 6)
    assert len(set(values)) == 6


def test_every_layer_draws_its_own_numbers():
    one = LayerStack({"a": drawing()})
    drawn = losses((1,), 1, 1, stack=one) - 1
    assert not np.isclose(losses((3,), 1, 1), 1 + 3 * drawn)


def test_the_seed_determines_the_text():
    np.testing.assert_array_equal(losses((1, 2), 1, 3, seed=5), losses((1, 2), 1, 3, seed=5))
    assert not np.any(losses((1, 2), 1, 3, seed=5) == losses((1, 2), 1, 3, seed=6))


@pytest.mark.thinned(most=3)
@pytest.mark.parametrize("sizes", [(3,), (2, 1), (1, 2), (1, 1, 1)])
@pytest.mark.parametrize("variant", ["gpipe", "pipedream", "pipedream_2bw"])
def test_draws_do_not_depend_on_the_cut_or_the_schedule(sizes, variant):
    np.testing.assert_array_equal(losses(sizes, 3, 4, variant=variant), losses((3,), 3, 4, variant="naive"))


def test_draws_do_not_depend_on_the_number_of_microbatches_in_a_batch():
    """Microbatches are counted over the whole run, so two batches of three draw the numbers of six batches of one."""
    np.testing.assert_allclose(losses((1, 2), 3, 2), losses((1, 2), 1, 6).reshape(2, 3).mean(1), rtol=1e-6)


def test_a_draw_depends_on_the_id_of_the_layer_and_not_on_its_position():
    key = jax.random.key(0)
    run = jax.jit(
        lambda ids, k: STACK.apply(ids, *({i: {} for i in STACK.ids},) * 2, jnp.ones((1, 1)), key=key, microbatch=k, train=True)[0],
        static_argnums=0,
    )
    alone, after_another = run(("b",), 4), run(("a", "b"), 4) - run(("a",), 4) + 1
    np.testing.assert_allclose(alone, after_another, rtol=1e-6)
    assert run(("a",), 4) != run(("b",), 4)
    assert run(("b",), 4) != run(("b",), 5)


@pytest.mark.slow
def test_initial_weights_do_not_depend_on_the_cut_the_schedule_or_the_other_layers():
    stack = models.rich_stack()
    initial = []
    for sizes, variant in [((4,), "gpipe"), ((1, 3), "pipedream"), ((1, 1, 1, 1), "pipedream_2bw")]:
        plan = models.cut(stack.ids, sizes, microbatches=4, **models.VARIANTS[variant])
        pipe = Pipeline(stack, plan, models.masked_squares, models.momentum())
        initial.append(pipe.params(fresh(pipe, models.masked_batches(1, 4))))
    for params in initial[1:]:
        check_equal(params, initial[0])
    assert not np.array_equal(initial[0]["track"]["w"], initial[0]["mix"]["w"]), "every layer has its own"
    shorter = LayerStack({i: stack.layers[i] for i in ("track", "out")})
    pipe = Pipeline(shorter, Plan.even(shorter.ids, 2, "gpipe", 4), models.masked_squares, models.momentum())
    check_equal(pipe.params(fresh(pipe, models.masked_batches(1, 4))), {i: initial[0][i] for i in shorter.ids})


class Sampled(nnx.Module):
    """A layer that draws random numbers in evaluation, too."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.rngs = rngs

    def __call__(self, x):
        return x + jax.random.uniform(self.rngs.noise(), x.shape)


class SampledInLinen(linen.Module):
    """The Linen version of `Sampled`."""

    @linen.compact
    def __call__(self, x, train):
        return x + jax.random.uniform(self.make_rng("dropout"), x.shape)


SAMPLED = {"nnx": lambda rngs: Sampled(rngs), "linen": SampledInLinen()}


def sampled(kind: str, sizes, **fields):
    """Check that predictions are repeatable and return the noise that two layers add to four microbatches of one row."""
    noise = SAMPLED[kind]
    stack = LayerStack({"in": models.dense(1), "first": noise, "second": noise if kind == "nnx" else noise.clone(), "out": lambda x: x})
    pipe = Pipeline(stack, models.cut(stack.ids, sizes, microbatches=2, **fields), total, models.momentum())
    x = np.ones((4, 1), np.float32)
    state = pipe.init(jax.random.key(fields.get("seed", 0)), (x[:2], x[:2]))
    plain = jnp.tanh(x @ models.on_first_device(pipe.params(state))["in"]["w"])
    predicted = pipe.predict(state, x)
    np.testing.assert_array_equal(predicted, pipe.predict(state, x), "of one state and batch always the same")
    np.testing.assert_allclose(pipe.evaluate(state, (x, x)).loss, np.mean(predicted), rtol=1e-6)
    return (predicted - plain)[:, 0]


@pytest.mark.exhaustive
@pytest.mark.thinned(most=1)
@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("kind", SAMPLED)
def test_evaluations_draw_new_numbers_for_each_microbatch_and_layer(kind):
    draws_of_rows = sampled(kind, (4,), schedule="gpipe")
    assert len(np.unique(draws_of_rows.round(4))) == 4
    np.testing.assert_allclose(sampled(kind, (2, 2), schedule="pipedream_2bw"), draws_of_rows, rtol=1e-6)
    key, parts = jax.random.key(0), []
    stack = LayerStack({"first": SAMPLED["nnx"], "second": SAMPLED["nnx"]})
    for layer_id in stack.ids if kind == "nnx" else ():
        apply = functools.partial(stack.apply, [layer_id], {layer_id: {}}, {layer_id: {}}, jnp.zeros((1, 1)), train=False)
        parts.append([float(apply(key=key, microbatch=k)[0][0, 0]) for k in range(4)])
    if parts:
        np.testing.assert_allclose(draws_of_rows, np.sum(parts, axis=0), rtol=1e-5)
        assert not np.isclose(parts[0], parts[1]).any()


def test_users_layers_get_no_key_in_evaluation_unless_they_request_it():
    def apply(params, state, x, key, train):
        return x if key is None else x + jax.random.uniform(key), state

    def layer(**fields):
        return Layer(lambda key, x: ({}, {}), apply, stochastic=True, **fields)

    stack = LayerStack({"plain": layer(), "asks": layer(draws_in_evaluation=True)})
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", 2), total, models.momentum())
    x = np.ones((2, 1), np.float32)
    state = pipe.init(jax.random.key(0), (x, x))
    drawn = [float(jax.random.uniform(stack.draw_key(jax.random.key(0), "asks", k, False))) for k in range(2)]
    np.testing.assert_allclose(pipe.predict(state, x)[:, 0], 1 + np.array(drawn), rtol=1e-6)


def with_rngs(y, labels, rngs):
    """Return a sampling loss: the sum of the model's outputs times a random number."""
    return (y * jax.random.uniform(rngs())).sum(), 1.0


def with_key(y, labels, *, key=None):
    return (y * jax.random.uniform(key)).sum(), 1.0


def loss_of_key(y, key):
    """Compute a loss whose labels are called `key`."""
    return (y * key).sum(), 1.0


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("fields", [{"schedule": "gpipe"}, {"schedule": "pipedream_flush", "recompute": "full"}, {"schedule": "zb_h1"}])
@pytest.mark.parametrize("loss", [with_rngs, with_key, functools.partial(with_key)])
def test_a_random_loss_draws_new_numbers_for_each_microbatch(loss, fields):
    """The schedules have a fused last stage, none, and a split backward; the gradient uses the numbers of the forward."""
    stack = LayerStack({"in": models.dense(1, lambda x: x), "mid": lambda x: x, "out": lambda x: x})
    pipe = Pipeline(stack, models.cut(stack.ids, (1, 1, 1), microbatches=3, **fields), loss, optax.sgd(1.0))
    x = np.ones((3, 1), np.float32)
    state = pipe.init(jax.random.key(0), (x, x))
    w = float(pipe.params(state)["in"]["w"][0, 0])
    draws = {train: [_drawn(loss, stack.draw_key(jax.random.key(0), "", k, train)) for k in range(6)] for train in (True, False)}
    assert len({round(d, 5) for of in draws.values() for d in of}) == 12
    evaluation = pipe.evaluate(state, (np.ones((5, 1), np.float32),) * 2, {"again": with_key, "rngs": with_rngs, "plain": loss_of_key})
    np.testing.assert_allclose(evaluation.loss, w * np.mean(draws[False][:5]), rtol=1e-5)
    np.testing.assert_allclose(evaluation.metrics["plain"].mean, w, rtol=1e-5)
    for name, metric in (("again", with_key), ("rngs", with_rngs)):
        keys = [stack.draw_key(jax.random.key(0), name, k, False, of_metric=True) for k in range(5)]
        np.testing.assert_allclose(evaluation.metrics[name].mean, w * np.mean([_drawn(metric, key) for key in keys]), rtol=1e-5)
    for t in range(2):  # the bias moves as the weight does
        state, metrics = pipe.step(state, (x, x))
        mean_draw, moved = np.mean(draws[True][3 * t : 3 * t + 3]), np.mean(draws[True][:3]) if t else 0.0
        np.testing.assert_allclose(metrics.losses[t], (w - 2 * moved) * mean_draw, rtol=1e-5)
        np.testing.assert_allclose(pipe.params(state)["in"]["w"][0, 0], w - moved - mean_draw, rtol=1e-5)


def _drawn(loss, key) -> float:
    return float(jax.random.uniform(nnx.Rngs(key)() if loss is with_rngs else key))
