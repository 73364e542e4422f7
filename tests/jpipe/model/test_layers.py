"""NNX, Linen, functions and `Layer`s in one stack; layer state; errors of a stack."""

import json
import re
import types
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jpipe import InputError, Layer, LayerStack, Pipeline, Plan
from tests.jpipe import models
from tests.jpipe.running import check_against_reference, check_close, check_equal, fresh, layer_state, train, train_as_one_function


class LinenBlock(linen.Module):
    width: int
    has_norm: bool = True
    dtype: Any = jnp.float32

    @linen.compact
    def __call__(self, x, train):
        x = linen.Dense(self.width, param_dtype=self.dtype)(x)
        x = linen.BatchNorm(use_running_average=not train, momentum=0.9)(x) if self.has_norm else x
        return linen.Dropout(0.3, deterministic=not train)(x)


class NnxBlock(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs, *, has_norm: bool = True, dtype: Any = jnp.float32) -> None:
        self.linear = nnx.Linear(width, width, param_dtype=dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs) if has_norm else jnp.sin
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def mixed_stack() -> LayerStack:
    return LayerStack(
        {
            "layer": models.dense(4),
            "linen": LinenBlock(4, has_norm=False, dtype=jnp.float64),
            "nnx": lambda rngs: NnxBlock(4, rngs, has_norm=False, dtype=jnp.float64),
            "function": jnp.tanh,
            "linear": lambda rngs: nnx.Linear(4, models.WIDTH, param_dtype=jnp.float64, rngs=rngs),
        }
    )


@pytest.mark.thinned(most=1)
@pytest.mark.oldest
@pytest.mark.parametrize("variant", ["pipedream_flush", "pipedream_2bw"])
@pytest.mark.exhaustive
def test_all_kinds_of_layers_train_in_one_stack(variant, float64):
    stack, m = mixed_stack(), 3
    pipe = Pipeline(stack, models.cut(stack.ids, (2, 1, 2), microbatches=m, **models.VARIANTS[variant]), models.squares, optax.adam(0.01))
    batches = models.batches_of(4, 4 * m, dtype=np.float64)
    check_close(train(pipe, batches), train_as_one_function(pipe, batches))


class Tower(nnx.Module):
    """More sublayers than one digit can count, with paths that sort differently as text."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.parts = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(12)])

    def __call__(self, x):
        for part in self.parts:
            x = jnp.sin(part(x))
        return x


def test_an_nnx_layer_computes_what_the_module_computes():
    stack = LayerStack({"tower": lambda rngs: Tower(rngs)})
    x = jnp.asarray(models.batches_of(1, 5)[0][0])
    params, state = stack.init_layer("tower", jax.random.key(0), x)
    y, _ = jax.jit(lambda p, s, x: stack.apply(("tower",), {"tower": p}, {"tower": s}, x, key=None, microbatch=None, train=True))(
        params, state, x
    )
    module = Tower(nnx.Rngs(0))
    _, form = nnx.split(module)
    nnx.update(module, jax.tree.unflatten(jax.tree.structure(form), jax.tree.leaves(params)))
    for i, part in enumerate(module.parts):
        check_equal(part.kernel[...], params["parts"][i]["kernel"])
    np.testing.assert_allclose(y, module(x), rtol=1e-6)


class LinenNorm(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        return linen.BatchNorm(use_running_average=not train, momentum=0.8)(x)


NORMS = {"nnx": lambda rngs: nnx.BatchNorm(3, momentum=0.8, rngs=rngs), "linen": LinenNorm()}


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.oldest)])
@pytest.mark.parametrize("variant", ["gpipe", "pipedream", "pipedream_2bw"])
@pytest.mark.parametrize("kind", NORMS)
def test_batch_statistics_advance_once_for_each_microbatch_in_order(kind, variant, recompute):
    """The norm comes first, so its running mean and variance are those of the raw inputs, computed by hand with NumPy."""
    stack, m = LayerStack({"norm": NORMS[kind], "first": models.dense(), "second": models.dense()}), 3
    plan = models.cut(stack.ids, (1, 1, 1), microbatches=m, recompute=recompute, **models.VARIANTS[variant])
    batches = models.batches_of(4, 4 * m)
    actual = train(Pipeline(stack, plan, models.squares, models.momentum()), batches).layer_state["norm"]
    actual = actual["batch_stats"]["BatchNorm_0"] if kind == "linen" else actual
    mean, var = np.zeros(3), np.ones(3)
    for x, _ in batches:
        for microbatch in np.split(x.astype(np.float64), m):
            mean, var = 0.8 * mean + 0.2 * microbatch.mean(0), 0.8 * var + 0.2 * microbatch.var(0)
    np.testing.assert_allclose(actual["mean"], mean, rtol=1e-5, atol=1e-7)  # Flax keeps them in float32 always
    np.testing.assert_allclose(actual["var"], var, rtol=1e-5, atol=1e-7)


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("variant", ["gpipe", "pipedream", "pipedream_2bw"])
def test_batch_norm_equals_the_sequential_reference_bit_for_bit(variant, recompute):
    stack = LayerStack({"in": models.dense(), "nnx": lambda rngs: NnxBlock(3, rngs), "linen": LinenBlock(3), "out": models.dense()})
    check_against_reference(
        stack, Plan.even(stack.ids, 4, microbatches=4, recompute=recompute, **models.VARIANTS[variant]), drain_after={3}
    )


def test_evaluation_uses_the_running_statistics_and_leaves_them():
    stack = LayerStack({"norm": lambda rngs: nnx.BatchNorm(3, momentum=0.5, rngs=rngs), "drop": lambda rngs: nnx.Dropout(0.5, rngs=rngs)})
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", 2), models.squares, optax.sgd(0.0))
    batches = models.batches_of(2, 4)
    state, _ = pipe.step(fresh(pipe, batches), batches[0])
    before = models.copied(layer_state(state))
    x, labels = batches[1]
    stats = jax.tree.map(np.asarray, before["norm"])
    expected = (((x - stats["mean"]) / np.sqrt(stats["var"] + 1e-5) - labels) ** 2).mean()
    np.testing.assert_allclose(pipe.evaluate(state, batches[1]).loss, expected, rtol=1e-6)
    check_equal(layer_state(state), before)


# What a stack refuses --------------------------------------------------------------------------------------------------


def test_a_shared_nnx_parameter_is_refused():
    shared = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    class Uses(nnx.Module):
        def __init__(self, rngs):
            self.inner = shared

        def __call__(self, x):
            return self.inner(x)

    with pytest.raises(
        InputError, match=r"layers 'a' and 'b' share the parameter or module 'inner\.(kernel|bias)'.*two copies of it; give 'b' its own"
    ):
        LayerStack({"a": lambda rngs: Uses(rngs), "b": lambda rngs: Uses(rngs)})


def test_a_linen_module_given_twice_is_refused():
    module = linen.Dense(3)
    with pytest.raises(InputError, match=r"layers 'a' and 'c' share the parameter or module 'Dense'.*module\.clone\(\)"):
        LayerStack({"a": module, "b": jnp.tanh, "c": module})
    LayerStack({"a": module, "b": module.clone()})


def test_functions_and_layers_may_be_used_twice():
    assert LayerStack({"a": jnp.tanh, "b": jnp.tanh, "c": models.dense(), "d": models.dense()}).ids == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({}, r"expected at least one layer, found none"),
        ({"": jnp.tanh}, r"a layer id is a non-empty string, found ''"),
        ({"a": 5}, r"layer 'a' is int; expected an NNX module or its constructor.*or a jpipe\.Layer"),
        (
            {"a": nnx.eval_shape(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)))},
            r"layer 'a' is an abstract NNX module, which has no arrays; give its constructor, lambda rngs: Linear\(…, rngs=rngs\)",
        ),
        (
            nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
            r"LayerStack: expected a dict of layers by id, a list of layers or a Sequential, found Linear",
        ),
        (linen.Sequential([jnp.tanh]).bind({}), r"LayerStack: the nn.Sequential is bound to variables"),
        ({"a": lambda rngs: None}, r"layer 'a': its constructor returned NoneType, expected a flax\.nnx\.Module"),
        ({"a": lambda rngs: 1 / 0}, r"layer 'a': its constructor fails: ZeroDivisionError: division by zero"),
    ],
)
def test_invalid_layers_are_refused(layers, message):
    with pytest.raises(InputError, match=message):
        LayerStack(layers)


def test_layers_that_do_not_fit_are_named_with_their_shapes():
    stack = LayerStack({"narrow": models.dense(4), "wide": lambda rngs: nnx.Linear(5, 3, rngs=rngs)})
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", 2), models.squares, models.momentum())
    with pytest.raises(
        InputError,
        match=r"layer 'wide' does not take its input, float32\[2, 4\] from 'narrow'; it raises .*5.*make the output of 'narrow' fit",
    ):
        pipe.check(models.batches_of(1, 4)[0])


def test_a_first_layer_that_does_not_fit_the_batch_is_named():
    stack = LayerStack({"first": lambda rngs: nnx.Linear(5, 3, rngs=rngs)})
    pipe = Pipeline(stack, Plan.even(stack.ids, 1, "gpipe", 2), models.squares, models.momentum())
    with pytest.raises(InputError, match=r"layer 'first' does not take its input, float32\[2, 3\] from 'the batch'"):
        pipe.check(models.batches_of(1, 4)[0])


def breaks(x):
    return {}["mask"] * x


def fails_while_built(rngs):
    raise KeyError("width")


def line_of(function) -> str:
    """Return `file:line` of the body of a function with one statement."""
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno + 1}"


def test_a_mistake_in_a_layer_is_reported_with_its_place_and_without_advice_about_shapes():
    stack = LayerStack({"first": models.dense(), "broken": breaks})
    with pytest.raises(InputError) as refused:
        stack.specs(np.zeros((2, 3), np.float32))
    assert str(refused.value) == (
        f"layer 'broken' does not take its input, float32[2, 3] from 'first'; it raises KeyError: 'mask' ({line_of(breaks)}); fix 'broken'"
    )


def test_a_mistake_in_a_constructor_is_reported_with_its_place():
    with pytest.raises(InputError) as refused:
        LayerStack({"broken": fails_while_built})
    assert str(refused.value) == (
        f"layer 'broken': its constructor fails: KeyError: 'width' ({line_of(fails_while_built)}); fix the constructor"
    )


def test_a_mistake_in_a_loss_is_reported_with_its_place():
    def loss(y, labels):
        return breaks(y), y.size

    stack = LayerStack({"only": models.dense()})
    with pytest.raises(InputError) as refused:
        Pipeline(stack, Plan.even(stack.ids, 1, "gpipe", 2), loss, models.momentum()).check(models.batches_of(1, 4)[0])
    assert str(refused.value) == (
        "loss: the function does not take outputs float32[2, 3] of layer 'only' and labels float32[2, 3]; "
        f"it raises KeyError: 'mask' ({line_of(breaks)}); fix the function"
    )


@pytest.mark.parametrize("name", ["jax", "json", "typed in"])
def test_a_place_outside_the_callers_files_is_left_out(name):
    """Code that the user's code calls is not the place of the mistake, and code without a file has no place."""
    calls = {"jax": lambda x: jnp.dot(x, x), "json": lambda x: json.loads("?"), "typed in": lambda x: x.nothing}
    typed_in = types.FunctionType(calls[name].__code__.replace(co_filename="<string>"), globals())
    with pytest.raises(InputError) as refused:
        LayerStack({"broken": typed_in}).specs(np.zeros((2, 3), np.float32))
    assert re.search(r"it raises (TypeError|JSONDecodeError|AttributeError): ", str(refused.value))
    assert ".py" not in str(refused.value)
    assert "<string>" not in str(refused.value)


def test_the_place_of_a_mistake_that_a_library_finds_is_where_the_own_code_called_it():
    def parses(x):
        return json.loads("?")

    with pytest.raises(InputError, match=re.escape(f"({line_of(parses)}); make the output of 'the batch' fit the input of 'broken'")):
        LayerStack({"broken": parses}).specs(np.zeros((2, 3), np.float32))


def test_complex_parameters_are_refused():
    """The optimizer would update their real parts only."""
    turned = Layer(lambda key, x: ({"w": jnp.ones(3, jnp.complex64)}, {}), lambda params, state, x, key, train: (x, state))
    with pytest.raises(InputError, match=r"parameter a\['w'\] is complex64: only real .*; keep its real and imaginary parts as two"):
        LayerStack({"a": turned}).specs(np.zeros((2, 3), np.float32))


@pytest.mark.parametrize("optimizer", [optax.adam(0.1), optax.sgd(0.1), optax.lamb(0.1)], ids=["adam", "sgd", "lamb"])
def test_integer_parameters_cannot_be_trained(optimizer):
    counted = Layer(lambda key, x: ({"count": jnp.zeros(3, jnp.int32)}, {}), lambda params, state, x, key, train: (x, state))
    pipe = Pipeline(LayerStack({"a": counted}), Plan.even(["a"], 1, "gpipe", 1), models.squares, optimizer)
    with pytest.raises(InputError, match=r"parameter a\['count'\] is int32: only real floating.*make it layer state, or freeze it"):
        pipe.check((np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)))


def test_planning_allocates_nothing():
    before = len(jax.live_arrays())
    stack = LayerStack({f"big{i}": lambda rngs: nnx.Linear(100_000, 100_000, rngs=rngs) for i in range(2)})
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", 2), models.squares, models.momentum())
    pipe.check((np.zeros((2, 100_000), np.float32), np.zeros((2, 100_000), np.float32)))
    assert len(jax.live_arrays()) == before


@pytest.mark.slow
def test_layers_of_one_constructor_are_traced_once():
    calls = {"built": 0, "forward": 0}

    class Block(nnx.Module):
        def __init__(self, *, rngs):
            calls["built"] += 1
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            calls["forward"] += 1
            return self.linear(x)

    block = partial(Block)
    shared = LayerStack({"in": jnp.tanh, **{f"block {i}": block for i in range(50)}})
    x = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    specs = shared.specs(x)
    assert shared.specs(x) == specs
    assert calls["built"] < 10
    assert calls["forward"] < 10
    reference = LayerStack({"in": jnp.tanh, **{f"block {i}": partial(Block) for i in range(50)}})
    assert specs == reference.specs(x)
    assert calls["forward"] >= 100
    key = jax.random.key(0)
    first, second = (shared.init_layer(f"block {i}", key, jnp.ones((2, 4)))[0]["linear"]["kernel"] for i in (0, 1))
    assert not jnp.array_equal(first, second)  # each has parameters of its own
