"""Pipelines inside JAX contexts that the user has set for other programs."""

import jax
import numpy as np
import pytest
from flax import nnx

import jpipe
from jpipe import InputError
from jpipe.context import Positions, noting_reads, traced_platform, traced_positions, tracing_at, tracing_for
from tests.jpipe import models, running

BATCH = models.batches_of(1, models.ROWS * 2)[0]


def built(**options):
    stack = jpipe.LayerStack({"a": models.noisy(), "b": models.dense()})
    plan = jpipe.Plan.even(stack.ids, 2, "pipedream_flush", 2)
    return jpipe.Pipeline(stack, plan, models.squares, models.momentum(), **options)


def everything(pipe, key):
    """Call the methods of a pipeline and return the evaluation loss, the parameters and the weights of its costs."""
    pipe.check(BATCH)
    state = pipe.init(key, BATCH)
    snapshot = pipe.snapshot(1)
    state, _ = pipe.step(state, BATCH, observe=snapshot)
    state = pipe.drain(state)
    result = pipe.evaluate(state, BATCH).loss, pipe.params(state)
    pipe.check_layers(BATCH, snapshot.layers(), 1)
    restored = pipe.restore(key, BATCH, snapshot.layers(), 1)
    pipe.step(restored, BATCH)
    return [float(jax.device_get(result[0])), result[1], [cost.weights for cost in pipe.costs(BATCH)]]


def mesh():
    return jax.set_mesh(jax.make_mesh((2,), ("data",), devices=jax.devices()[:2]))


@pytest.mark.parametrize(
    "context", [mesh, lambda: jax.transfer_guard("disallow"), lambda: jax.default_device(jax.devices()[1])], ids=["mesh", "guard", "device"]
)
def test_jax_contexts_of_the_caller_change_nothing(context):
    key = jax.random.key(3)
    expected = everything(built(), key)
    with context():
        actual = everything(built(), key)
    running.check_equal(actual, expected)


def test_the_mesh_of_the_user_is_restored_after_a_call():
    with mesh():
        before = jax.sharding.get_abstract_mesh()
        built().check(BATCH)
        assert jax.sharding.get_abstract_mesh() == before


def test_a_pipeline_inside_of_a_traced_function_is_refused():
    pipe = built()
    state = pipe.init(jax.random.key(0), BATCH)
    for transformation in (jax.jit, jax.grad):
        with pytest.raises(InputError, match=r"called inside a function that JAX traces .*call it outside"):
            transformation(lambda x: pipe.step(state, (x, BATCH[1]))[1].losses[0])(np.asarray(BATCH[0]))
    assert 0 in pipe.step(state, BATCH)[1].losses


def test_disable_jit_is_refused():
    pipe = built()
    with jax.disable_jit(), pytest.raises(InputError, match=r"jax_disable_jit is on, .* turn it off"):
        pipe.init(jax.random.key(0), BATCH)


def test_a_compiled_function_inside_of_a_layer_is_traced_for_each_context():
    @jax.jit
    def told(x):
        seen.append((traced_platform(), traced_positions()))
        return x

    seen, here = list[object](), jax.default_backend()
    for platform, at in (
        (here, None),
        ("tpu", None),
        ("tpu", Positions(0, 2, 4)),
        ("tpu", Positions(2, 4, 4)),
        ("tpu", Positions(0, 2, 4)),
    ):
        with tracing_for(platform), tracing_at(at):
            jax.eval_shape(told, 1.0)
    assert seen == [(here, None), ("tpu", None), ("tpu", Positions(0, 2, 4)), ("tpu", Positions(2, 4, 4))]
    with tracing_for("tpu"), tracing_at(Positions(0, 2, 4)), noting_reads() as reads:
        jax.eval_shape(told, 1.0)
    assert reads == [Positions(0, 2, 4)]


@pytest.mark.slow
def test_a_model_leaks_nothing_of_its_traces():
    with jax.checking_leaks():
        stack = jpipe.LayerStack({"a": lambda rngs: nnx.Linear(models.WIDTH, models.WIDTH, rngs=rngs), "b": lambda x: x * 2})
        assert stack.specs(BATCH[0])["b"].output.shape == BATCH[0].shape
