"""Runs that start from the caller's parameters use them and do not modify them."""

import jax
import numpy as np
import pytest
from flax import nnx

import jpipe
from jpipe import InputError
from tests.jpipe import models, running

BATCHES = models.batches_of(3, models.ROWS * 2)


def pipeline(**fields):
    stack = models.plain_stack(2)
    plan = jpipe.Plan.even(stack.ids, 2, **({"schedule": "pipedream_2bw", "microbatches": 2} | fields))
    return jpipe.Pipeline(stack, plan, models.squares, models.momentum())


def started(pipe, params, seed=0):
    return pipe.init(jax.random.key(seed), BATCHES[0], params)


def on_host(tree):
    return jax.tree.map(np.array, tree)


def test_a_run_with_the_initial_parameters_of_another_run_equals_it():
    """In a model without dropout the key determines only the initial parameters."""
    pipe = pipeline(schedule="pipedream", replicas=[2, 1])
    expected = running.train(pipe, BATCHES, started(pipe, None, seed=1))
    actual = running.train(pipe, BATCHES, started(pipe, pipe.params(started(pipe, None, seed=1))))
    assert actual.losses == expected.losses
    running.check_equal(actual.params, expected.params)
    assert actual.losses != running.train(pipe, BATCHES, started(pipe, None)).losses


@pytest.mark.parametrize("kind", [np.array, jax.numpy.array], ids=["NumPy", "JAX"])
def test_initial_parameters_of_the_caller_are_not_modified(kind):
    pipe = pipeline()
    params = jax.tree.map(kind, on_host(pipe.params(started(pipe, None, seed=1))))
    before = on_host(params)
    running.train(pipe, BATCHES, started(pipe, params))
    running.check_equal(params, before)


def test_missing_parameters_are_fresh():
    pipe = pipeline()
    fresh, ones = on_host(pipe.params(started(pipe, None))), np.ones((models.WIDTH, models.WIDTH), np.float32)
    actual = on_host(pipe.params(started(pipe, {"layer1": {"w": ones}})))
    running.check_equal(actual, fresh | {"layer1": fresh["layer1"] | {"w": ones}})


def nested() -> jpipe.Layer:
    """Return a dense layer whose parameters are a list in a dict."""
    inner = models.dense()

    def init(key, x):
        params, state = inner.init(key, x)
        return {"parts": [params["w"], {"b": params["b"]}]}, state

    def apply(params, state, x, key, train):
        w, remaining = params["parts"]
        return inner.apply({"w": w, **remaining}, state, x, key, train)

    return jpipe.Layer(init, apply)


def test_parameters_go_by_their_paths():
    """As in a file, plain dicts may be nested in any way or not at all."""
    stack = jpipe.LayerStack({"a": nested(), "b": nested()})
    pipe = jpipe.Pipeline(stack, jpipe.Plan.even(stack.ids, 2, "gpipe", 2), models.squares, models.momentum())
    params = on_host(pipe.params(started(pipe, None, seed=1)))
    w, remaining = params["a"]["parts"]
    by_path = {
        "a": {"parts": {"0": w, "1": remaining}},
        "b": {"parts/0": params["b"]["parts"][0], "parts/1/b": params["b"]["parts"][1]["b"]},
    }
    running.check_equal(on_host(pipe.params(started(pipe, by_path))), params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"layer9": {}}, r"params: the model has no layer 'layer9'; did you mean 'layer"),
        ({"layer1": {"v": np.ones(3, np.float32)}}, r"params: layer 'layer1': 'v' is not in the model"),
        (
            {"layer1": {"w": np.ones((3, 4), np.float32)}},
            r"params: layer 'layer1': expected 'w' as in the model, float32\[3, 3\], found float32\[3, 4\]",
        ),
        (
            {"layer1": {"w": np.ones((3, 3))}},
            r"params: layer 'layer1': expected 'w' as in the model, float32\[3, 3\], found float64\[3, 3\]",
        ),
        ({"layer1": {"w": 1.0}}, r"params: layer 'layer1': expected an array as 'w', found float"),
    ],
)
def test_parameters_of_another_model_are_refused_before_anything_is_compiled(params, message, monkeypatch):
    pipe = pipeline()
    monkeypatch.setattr(pipe, "_compile", lambda batch: pytest.fail("compiled"))
    with pytest.raises(InputError, match=message):
        started(pipe, params)


def from_flax():
    stack = jpipe.LayerStack(
        {"a": lambda rngs: nnx.Linear(models.WIDTH, models.WIDTH, rngs=rngs), "b": lambda rngs: nnx.BatchNorm(models.WIDTH, rngs=rngs)}
    )
    return jpipe.Pipeline(stack, jpipe.Plan.even(stack.ids, 1, "gpipe", 2), models.squares, models.momentum())


@pytest.mark.parametrize("convert", [lambda m: m, nnx.state, lambda m: nnx.state(m, nnx.Param)], ids=["module", "state", "its parameters"])
def test_parameters_of_an_nnx_module_are_accepted(convert):
    module = nnx.Linear(models.WIDTH, models.WIDTH, rngs=nnx.Rngs(3))
    pipe = from_flax()
    actual = on_host(pipe.params(started(pipe, {"a": convert(module)})))["a"]
    running.check_equal(actual, on_host(nnx.to_pure_dict(nnx.state(module, nnx.Param))))


def test_other_flax_variables_than_parameters_are_refused():
    pipe = from_flax()
    norm = nnx.BatchNorm(models.WIDTH, rngs=nnx.Rngs(3))
    with pytest.raises(
        InputError, match=r"layer 'b': expected nnx.Param variables, found 'mean', a BatchStat.*nnx.state\(module, nnx.Param\)"
    ):
        started(pipe, {"b": nnx.state(norm)})
    with pytest.raises(InputError, match=r"layer 'a': .*all collections of its variables; give only the value of the key 'params'"):
        started(pipe, {"a": {"params": {}}})


def slashed() -> jpipe.Layer:
    """Return a dense layer with a parameter "a/b" and a parameter "b" inside "a"."""
    inner = models.dense()

    def init(key, x):
        params, state = inner.init(key, x)
        return {"a/b": params["w"], "a": {"b": params["b"]}}, state

    return jpipe.Layer(init, lambda params, *arguments: inner.apply({"w": params["a/b"], "b": params["a"]["b"]}, *arguments))


def test_a_slash_in_the_name_of_a_parameter_is_no_path():
    stack = jpipe.LayerStack({"x": slashed(), "y": models.dense()})
    pipe = jpipe.Pipeline(stack, jpipe.Plan.even(stack.ids, 2, "gpipe", 2), models.squares, models.momentum())
    state = started(pipe, None, seed=1)
    params, snapshot = on_host(pipe.params(state)), pipe.snapshot(1)
    running.check_equal(on_host(pipe.params(started(pipe, params))), params)
    state, _ = pipe.step(state, BATCHES[0], observe=snapshot)
    running.check_equal(pipe.params(pipe.restore(jax.random.key(1), BATCHES[0], snapshot.layers(), 1)), pipe.params(state))
    tied = jpipe.LayerStack({"x": slashed(), "y": models.dense()}, ties=[jpipe.Tie(("x", "a/b"), ("y", "w"))])
    with pytest.raises(InputError, match=r"ties: layer 'x' has 2 parameters 'a/b'; rename"):
        tied.specs(BATCHES[0][0])
