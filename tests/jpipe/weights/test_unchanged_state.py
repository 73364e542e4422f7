"""Layer state that a microbatch does not change is one array, which no program returns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jpipe import Layer, LayerStack, Pipeline, Plan, Precision
from jpipe.model.jaxprs._dependence import passed_on
from tests.jpipe import models, running


def scaled() -> Layer:
    """Return a dense layer with a scale in its state that never changes and a count that does."""
    inner = models.dense()

    def init(key, x):
        return inner.init(key, x)[0], {"scale": jax.random.normal(key, x.shape[-1:], x.dtype), "count": jnp.zeros((), x.dtype)}

    def apply(params, state, x, key, train):
        y, _ = inner.apply(params, {}, x * state["scale"][None, :], None, train)
        return y, {"scale": state["scale"], "count": state["count"] + x.mean()}

    return Layer(init, apply)


STACK = LayerStack({name: scaled() for name in "abc"})


def state_of(state):
    return [worker.layer_state for worker in state.workers]


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("fields", [{"schedule": "pipedream_2bw", "split_backward": "early"}, {"schedule": "gpipe"}, {"schedule": "zb_h1"}])
def test_unchanged_state_is_the_same_array_after_a_step(fields, recompute):
    plan = Plan.even(STACK.ids, 3, microbatches=4, recompute=recompute, **fields)
    pipe, batches = Pipeline(STACK, plan, models.masked_squares, models.momentum()), models.masked_batches(4, 4)
    expected = running.train_as_one_function(pipe, batches)
    state = running.fresh(pipe, batches)
    before = [layer_states[layer_id]["scale"] for layer_states in map(dict, state_of(state)) for layer_id in layer_states]
    running.check_close(running.train(pipe, batches, state), expected, 1e-5)
    state = running.fresh(pipe, batches)
    before = [layer_states[layer_id]["scale"] for layer_states in map(dict, state_of(state)) for layer_id in layer_states]
    for batch in batches:
        state, _ = pipe.step(state, batch)
    after = [layer_states[layer_id]["scale"] for layer_states in state_of(state) for layer_id in layer_states]
    assert all(one is other for one, other in zip(before, after, strict=True))
    for f in pipe.stage_functions(batches[0]):
        assert all(flags == (True, False) for flags in f.changed.chosen.values())  # count, scale


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_replicas_do_not_copy_unchanged_state():
    """Summing three copies and dividing by three would give another number."""
    plan = Plan.even(STACK.ids, 1, "pipedream_flush", 6, replicas=3)
    pipe, batches = Pipeline(STACK, plan, models.masked_squares, models.momentum()), models.masked_batches(3, 6, dtype=np.float64)
    state = running.fresh(pipe, batches)
    before = {layer_id: np.array(layer_state["scale"]) for layer_id, layer_state in state.workers[0].layer_state.items()}
    for batch in batches:
        state, _ = pipe.step(state, batch)
    for worker in state.workers:
        for layer_id, layer_state in worker.layer_state.items():
            assert np.array_equal(layer_state["scale"], before[layer_id])
            assert float(layer_state["count"]) == float(state.workers[0].layer_state[layer_id]["count"])


class Frozen(nnx.Module):
    """Batch statistics that are used and not updated, as in fine-tuning."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.BatchNorm(models.WIDTH, use_running_average=True, rngs=rngs)
        self.inner = nnx.Linear(models.WIDTH, models.WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.inner(self.norm(x))


class FrozenInLinen(linen.Module):
    """The same in Linen."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(models.WIDTH)(linen.BatchNorm(use_running_average=True)(x))


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("make", [lambda: Frozen, FrozenInLinen], ids=["NNX", "Linen"])
def test_frozen_batch_statistics_are_not_copied(make):
    stack = LayerStack({"a": make(), "b": make()})
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", 2), models.squares, optax.sgd(0.1), precision=Precision(params="bfloat16"))
    for f in pipe.stage_functions(models.batches_of(1, 4)[0]):
        assert not f.changed.has_any(f.specs.state)


def test_unchanged_outputs_of_a_jaxpr():
    def function(a, b, c):
        inner = jax.jit(lambda x, y: (y, x + 1))(a, b)
        saved = jax.checkpoint(lambda x: (x, jnp.sin(x)))(c)
        return a, inner[0], inner[1], saved[0], saved[1], 0.0, a

    jaxpr = jax.make_jaxpr(function)(1.0, 2.0, 3.0).jaxpr
    assert passed_on(jaxpr) == [0, 1, None, 2, None, None, 0]
