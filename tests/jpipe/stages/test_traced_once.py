"""Optimizers are probed, and backwards are checked, once for all that is equal, and again for all that differs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import InputError, Layer, LayerStack, Pipeline, Plan, Precision
from jpipe.model._subset import Subset
from jpipe.stages import _builder
from jpipe.stages._gradients import check_gradients

SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)
WHOLE = Subset()


def loss(y, labels):
    return (y.astype(jnp.float32) - labels.astype(jnp.float32)).sum(), 1.0


def scaling(traced=None):
    """Return a layer with one scale for each column, in the dtype of its input, which notes the inputs with which it is traced."""

    def apply(params, state, x, key, train):
        if traced is not None:
            traced.append(x.dtype)
        return params["scale"] * x, state

    return Layer(init=lambda key, x: ({"scale": jnp.ones((1, x.shape[-1]), x.dtype)}, {}), apply=apply)


def batch(rows, columns=4, dtype=np.float32):
    return jax.ShapeDtypeStruct((rows, columns), dtype), jax.ShapeDtypeStruct((rows, columns), dtype)


def costs(stack, schedule="gpipe", optimizer=SGD, data=None, **options):
    plan = Plan.even(stack.ids, 2, schedule, 2)
    return Pipeline(stack, plan, loss, optimizer, **options).costs(data or batch(4))


@pytest.fixture
def probed(monkeypatch):
    """Return the list of the optimizers that are probed from here on."""
    calls, find = [], _builder.find_layerwise
    monkeypatch.setattr(_builder, "find_layerwise", lambda rule, *arguments: calls.append(rule) or find(rule, *arguments))
    return calls


def test_an_optimizer_is_probed_once_for_all_plans_and_batches_of_a_model(probed):
    stack = LayerStack({"a": scaling(), "b": scaling()})
    for schedule in ("gpipe", "pipedream_flush"):
        for rows in (4, 8):
            costs(stack, schedule, data=batch(rows))
    assert probed == [SGD]


@pytest.mark.parametrize(
    "other",
    [
        {"optimizer": ADAM},
        {"data": batch(4, dtype=jnp.bfloat16)},
        {"data": batch(4, columns=6)},
        {"precision": Precision(params="bfloat16")},
    ],
)
def test_other_optimizers_dtypes_and_parameters_are_probed_by_themselves(probed, other):
    def fresh():
        return LayerStack({"a": scaling(), "b": scaling()})

    stack, expected = fresh(), costs(fresh(), **other)
    probed.clear()
    assert costs(stack) != expected
    assert costs(stack, **other) == expected
    assert probed == [SGD, other.get("optimizer", SGD)]


def checked(layers, trained=WHOLE):
    """Return a check of the gradients of a model, which is traced before as in a pipeline; its first stage is its first layer."""
    stack, (x, labels) = LayerStack(layers), batch(4)
    specs = stack.specs(x)
    return partial(check_gradients, stack, specs, 1, loss, labels, trained)


def test_the_backward_of_layers_that_are_one_object_is_checked_once():
    traced = []
    layer = scaling(traced)
    check = checked(dict.fromkeys("abcdef", layer))
    traced.clear()
    check()
    assert len(traced) == 3  # the first one, which needs no gradient of its input, the last one, and one in between


def test_layers_that_are_one_object_are_checked_for_each_dtype_and_for_other_trained_parameters():
    traced = []
    layer = scaling(traced)
    layers = {"in": scaling(), "a": layer, "b": layer, "half": lambda x: x.astype(jnp.bfloat16), "c": layer, "d": layer, "out": scaling()}
    check = checked(layers)
    traced.clear()
    check()
    assert traced == [np.float32, jnp.bfloat16]
    check = checked(layers, trained=Subset({"b": (False,), "d": (False,)}))
    traced.clear()
    check()
    assert traced == [np.float32, np.float32, jnp.bfloat16, jnp.bfloat16]


def test_a_backward_that_fails_only_with_trained_parameters_is_found_behind_a_frozen_equal_layer():
    def apply(params, state, x, key, train):
        scale = jax.lax.while_loop(lambda scale: scale.sum() < 0, lambda scale: 2 * scale, params["scale"])
        return scale * x, state

    layer = Layer(init=lambda key, x: ({"scale": jnp.ones((1, x.shape[-1]), x.dtype)}, {}), apply=apply)
    layers = {"in": scaling(), "frozen": layer, "trained": layer, "out": scaling()}
    checked({**layers, "trained": scaling()}, trained=Subset({"frozen": (False,)}))()
    with pytest.raises(InputError, match="layer 'trained': its backward fails"):
        checked(layers, trained=Subset({"frozen": (False,)}))()
