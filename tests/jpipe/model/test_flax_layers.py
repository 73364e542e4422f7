"""Flax modules train with the same numbers as with Flax alone, or are refused with a message."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jpipe import InputError, LayerStack, Pipeline, Plan
from jpipe.runtime._plain import to_plain
from tests.jpipe.models import batches_of, squares
from tests.jpipe.running import KEY, check_close, check_equal, layer_state, train

pytestmark = pytest.mark.usefixtures("lenient")


class Positions(nnx.Module):
    """Arrays outside of any `nnx.Variable`: one in a container, one of NumPy, and one that forwards change."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense = nnx.Linear(3, 3, rngs=rngs)
        self.positions = jnp.arange(3.0)
        self.features = nnx.List([jax.random.normal(rngs.params(), (3,))])
        self.offsets = np.arange(3, dtype=np.float32)
        self.numbers = jnp.arange(2)
        self.mean = jnp.zeros((3,))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.dense(x - self.mean) + self.positions * self.features[0] + self.offsets


def weight_norm(rngs: nnx.Rngs) -> nnx.Module:
    return nnx.WeightNorm(nnx.Linear(3, 3, rngs=rngs), rngs=rngs)


def trained_by_flax(module: nnx.Module, batches: list, *, keeps_params: bool) -> tuple[list[float], nnx.Module]:
    """Train by plain SGD with Flax and return the losses and the module; `keeps_params` drops writes of forwards to parameters."""

    @nnx.jit
    def step(module: nnx.Module, x: jax.Array, labels: jax.Array) -> jax.Array:
        before = jax.tree.map(jnp.copy, nnx.state(module, nnx.Param))
        loss, gradients = nnx.value_and_grad(lambda module: jnp.mean((module(x) - labels) ** 2))(module)
        start = before if keeps_params else nnx.state(module, nnx.Param)
        nnx.update(module, jax.tree.map(lambda p, g: p - 0.1 * g, start, gradients))
        return loss

    return [float(step(module, *batch)) for batch in batches], module


@pytest.mark.parametrize("kind", [Positions, weight_norm])
def test_an_nnx_module_trains_as_with_flax(kind):
    stack = LayerStack({"a": kind})
    pipe = Pipeline(stack, Plan.even(stack.ids, 1, "gpipe", 1), squares, optax.sgd(0.1))
    batches = batches_of(3, 4)
    state = pipe.init(jax.random.key(KEY), batches[0])
    module = kind(rngs=nnx.Rngs(stack.init_key("a", jax.random.key(KEY))))
    check_close(pipe.params(state)["a"], nnx.to_pure_dict(nnx.state(module, nnx.Param)), 1e-6)
    actual = train(pipe, batches, state)
    losses, module = trained_by_flax(module, batches, keeps_params=kind is weight_norm)
    np.testing.assert_allclose(actual.losses, losses, rtol=1e-5)
    check_close(actual.params["a"], nnx.to_pure_dict(nnx.state(module, nnx.Param)), 1e-5)
    check_close(actual.layer_state["a"], nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param))), 1e-5)


@pytest.mark.slow
def test_arrays_of_a_module_survive_replicas_and_checkpoints():
    stack = LayerStack({"a": Positions, "norm": weight_norm})
    plan = Plan.even(stack.ids, 1, "gpipe", 2, replicas=2)
    pipe, batches = Pipeline(stack, plan, squares, optax.sgd(0.1)), batches_of(3, 4)
    state, _ = pipe.step(pipe.init(jax.random.key(KEY), batches[0]), batches[0])
    cut = pipe.snapshot(2)
    state, _ = pipe.step(state, batches[1], observe=cut)
    layers = jax.device_get(cut.layers())
    assert sorted(layers["a"]["state"]) == ["features", "mean", "numbers", "offsets", "positions"]
    check_equal(layers["a"]["state"]["positions"], np.arange(3.0, dtype=np.float32))
    restored, _ = pipe.step(pipe.restore(jax.random.key(KEY), batches[0], layers, 2), batches[2])
    state, _ = pipe.step(state, batches[2])
    check_equal(pipe.params(restored), pipe.params(state))
    check_equal(to_plain(layer_state(restored)), to_plain(layer_state(state)))


class AttentionWithDropout(nnx.Module):
    """Attention with dropout and no argument that says whether to train."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(num_heads=3, in_features=3, dropout_rate=0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.attention(x[:, None].repeat(4, 1))[:, 0]


def outputs(layer: Any, x: jax.Array, *, train: bool, microbatch: int = 0) -> jax.Array:
    """Initialize a layer and return its output for `x`."""
    stack = LayerStack({"a": layer})
    params, state = stack.init_layer("a", jax.random.key(0), x)
    everything = {"a": params}, {"a": state}
    return stack.apply(("a",), *everything, x, key=jax.random.key(1), microbatch=microbatch, train=train)[0]


def test_attention_drops_in_training_and_not_in_evaluation():
    x = jnp.asarray(batches_of(1, 4)[0][0])
    module = AttentionWithDropout(nnx.Rngs(LayerStack({"a": AttentionWithDropout}).init_key("a", jax.random.key(0))))
    module.eval(decode=False)
    np.testing.assert_allclose(outputs(AttentionWithDropout, x, train=False), module(x), rtol=1e-5)
    assert not jnp.allclose(outputs(AttentionWithDropout, x, train=True), module(x))
    assert not jnp.allclose(outputs(AttentionWithDropout, x, train=True), outputs(AttentionWithDropout, x, train=True, microbatch=1))


class OwnMode(nnx.Module):
    """A module that defines its training mode itself, as one with a frozen part may."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def train(self, **attributes: Any) -> None:
        super().train(**attributes)
        self.dropout.deterministic = True

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(x)


def test_modes_are_set_as_the_module_says():
    x = jnp.ones((4, 3))
    check_equal(outputs(OwnMode, x, train=True), x)
    check_equal(outputs(lambda rngs: nnx.Dropout(0.5, deterministic=True, rngs=rngs), x, train=True), x)
    assert not jnp.array_equal(outputs(lambda rngs: nnx.Dropout(0.5, rngs=rngs), x, train=True), x)


def linen_block(trains: Any, call: Any) -> linen.Module:
    """Return a Linen module of a dense layer, batch norm and dropout, whose `__call__` is `call` of its forward."""

    def block(module: linen.Module, x: jax.Array, train: bool) -> jax.Array:
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(3)(x))
        return linen.Dropout(0.5, deterministic=not train)(x)

    return type("Block", (linen.Module,), {"__call__": linen.compact(call(block)), "trains": trains, "__annotations__": {}})()


def _train(block):
    return lambda self, x, train: block(self, x, train)


CALLS = {
    "training": lambda block: lambda self, x, training=False: block(self, x, training),
    "is_training": lambda block: lambda self, x, *, is_training: block(self, x, is_training),
    "deterministic": lambda block: lambda self, x, deterministic=True: block(self, x, not deterministic),
    "use_running_average": lambda block: lambda self, x, use_running_average=False: block(self, x, not use_running_average),
    "both": lambda block: lambda self, x, train, deterministic: block(self, x, train and not deterministic),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_linen_module_is_told_whether_it_trains(name):
    x = jnp.asarray(batches_of(1, 4)[0][0])
    for train_now in (True, False):
        expected = outputs(linen_block(None, _train), x, train=train_now)
        check_equal(outputs(linen_block(None, CALLS[name]), x, train=train_now), expected)
    assert not jnp.allclose(expected, outputs(linen_block(None, _train), x, train=True))


@pytest.mark.parametrize(
    ("layer", "in_training", "in_evaluation"),
    [
        (linen.BatchNorm(epsilon=0.0), lambda x: (x - x.mean(0)) / x.std(0), lambda x: x),
        (linen.Dropout(1.0), lambda x: 0 * x, lambda x: x),
        (lambda x, train: 2 * x if train else x, lambda x: 2 * x, lambda x: x),
    ],
)
def test_bare_modules_and_functions_receive_the_mode(layer, in_training, in_evaluation):
    x = jnp.asarray(batches_of(1, 4)[0][0])
    np.testing.assert_allclose(outputs(layer, x, train=True), in_training(x), atol=1e-5)
    np.testing.assert_allclose(outputs(layer, x, train=False), in_evaluation(x), atol=1e-5)


@pytest.mark.slow
def test_linens_batch_norm_in_float64_as_with_flax(float64):
    stack = LayerStack({"norm": linen.BatchNorm(momentum=0.8)})
    pipe = Pipeline(stack, Plan.even(stack.ids, 1, "gpipe", 1), squares, optax.sgd(0.1))
    batches = batches_of(3, 4, dtype=np.float64)
    actual = train(pipe, batches)
    variables = linen.BatchNorm().init(jax.random.key(0), batches[0][0], use_running_average=False)
    for x, labels in batches:

        def loss(params, x=x, labels=labels, stats=variables["batch_stats"]):
            norm = linen.BatchNorm(momentum=0.8, use_running_average=False)
            y, changed = norm.apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])
            return ((y - labels) ** 2).mean(), changed

        gradients, changed = jax.grad(loss, has_aux=True)(variables["params"])
        variables = {"params": jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], gradients), **changed}
    assert actual.layer_state["norm"]["batch_stats"]["mean"].dtype == np.float64
    check_close(actual.layer_state["norm"]["batch_stats"], variables["batch_stats"], 1e-7)  # Flax's first momentum is a float32
    check_close(actual.params["norm"], variables["params"], 1e-6)


# What is refused -------------------------------------------------------------------------------------------------------


def check(layers: dict[str, Any], loss: Any = squares, depth: int = 1) -> None:
    """Call `Pipeline.check` with a stack of these layers."""
    stack = LayerStack(layers)
    Pipeline(stack, Plan.even(stack.ids, depth, "gpipe", 2), loss, optax.sgd(0.1)).check(batches_of(1, 4)[0])


def changing(change: Any, **attributes: Any) -> Any:
    """Return the class of a module whose forward calls `change` with the module and its input."""

    class Changes(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.dense = nnx.Linear(3, 3, rngs=rngs)
            for name, value in attributes.items():
                setattr(self, name, value)

        def __call__(self, x: jax.Array) -> jax.Array:
            change(self, x)
            return self.dense(x)

    return Changes


def counts(module: Any, x: jax.Array) -> None:
    module.count += 1


def learns(module: Any, x: jax.Array) -> None:
    module.dense.kernel[...] += x.mean()


class Halt(BaseException):
    """An error that is not an `Exception`."""


def halts(*_: Any) -> Any:
    raise Halt("enough")


def doubled(x: jax.Array) -> jax.Array:
    return jax.lax.while_loop(lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, 2 * carry[1]), (0, x))[1]


def called_back(x: jax.Array) -> jax.Array:
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def unknown(name: str, default: Any) -> linen.Module:
    def call(self: Any, x: Any, **_: Any) -> Any:
        return x

    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD
    call.__signature__ = inspect.Signature(
        [inspect.Parameter("self", kinds), inspect.Parameter("x", kinds), inspect.Parameter(name, kinds, default=default)]
    )
    return type("Odd", (linen.Module,), {"__call__": call, "__annotations__": {}})()


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (changing(counts, count=0), r"^layer 'a': its forward changes the attribute 'count' from 0 to 1, which would be lost"),
        (
            changing(lambda module, x: module.seen.append(x.shape), seen=[]),
            r"^layer 'a': its forward changes the attribute 'seen' from \[\] to \[\(2, 3\)\]",
        ),
        (
            changing(lambda module, x: module.seen["shapes"].append(x.shape), seen={"shapes": []}),
            r"attribute 'seen' from \{'shapes': \[\]\} to",
        ),
        (changing(lambda module, x: setattr(module, "last", x)), r"^layer 'a': its forward changes the attribute 'last' from nothing to"),
        (changing(lambda module, x: setattr(module, "last", x), last=None), r"changes the attribute 'last' from None to 'an array'"),
        (
            changing(learns),
            r"^layer 'a': its forward writes values computed from its input into the parameter \['dense'\]\['kernel'\], but",
        ),
        (linen.Dense, r"^layer 'a' is the Linen class Dense; give an instance of it, such as Dense\(…\)$"),
        (
            unknown("is_train", True),
            r"^layer 'a': expected one of train, training, .* selects training, found 'is_train'; rename the parameter",
        ),
        (unknown("mode", "train"), r"^layer 'a': expected one of train, .* found 'mode'"),
        (unknown("use_dropout", False), r"^layer 'a': expected one of train, .* found 'use_dropout'"),
        (linen.Dropout(0.5, deterministic=False), r"^layer 'a' draws random numbers in evaluation, .* pass deterministic=not train"),
        (
            lambda x: (x, 1.0),
            r"^layer 'a': expected the output to be arrays, found the Python float 1.0 at \[1\]; return an array, such as",
        ),
        (lambda x: {"x": x, "y": "text"}, r"^layer 'a': expected the output to be arrays, found the Python str 'text' at \['y'\]"),
        (halts, r"^layer 'a' does not take .*; it raises Halt: enough \(.*test_flax_layers\.py:\d+\); fix 'a'$"),
        (lambda rngs: halts(), r"^layer 'a': its constructor fails: Halt: enough \(.*test_flax_layers\.py:\d+\); fix the constructor$"),
        (doubled, r"^layer 'a': its backward fails: ValueError: Reverse-mode differentiation .*while_loop.*; use operations that JAX"),
        (called_back, r"^layer 'a': its backward fails: ValueError: Pure callbacks .*; use operations that JAX"),
    ],
)
def test_unsupported_module_features_are_refused_with_the_layer(layer, message):
    with pytest.raises(InputError, match=message):
        check({"in": lambda rngs: nnx.Linear(3, 3, rngs=rngs), "a": layer, "out": lambda x: x})


def test_a_backward_that_is_never_used_need_not_exist():
    layers = {"first": lambda x: x, "double": doubled, "dense": lambda rngs: nnx.Linear(3, 3, rngs=rngs)}
    check(layers)
    with pytest.raises(InputError, match=r"^layer 'double': its backward fails"):
        check(layers, depth=3)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, labels: ((y > labels).sum(), 1.0), r"^loss: expected the sum of the losses to be a real floating-point number.* int32;"),
        (lambda y, labels: ((1j * y).sum(), 1.0), r"^loss: expected the sum of the losses to be a real .* found complex64;"),
        (lambda y, labels: (y.sum(), 1j), r"^loss: expected the weight to be a real number, found complex64; return a count"),
        (
            lambda y, labels: (y.sum(), "1"),
            r"^loss: expected \(sum of the losses, weight\), two scalars, found \[0\] float32\[\], \[1\] str;",
        ),
        (halts, r"^loss: the function does not take .*; it raises Halt: enough \("),
        (lambda y, labels: (doubled(y).sum(), 1.0), r"^loss: its backward fails: ValueError: Reverse-mode"),
    ],
)
def test_a_loss_without_a_gradient_is_refused(loss, message):
    with pytest.raises(InputError, match=message):
        check({"a": lambda rngs: nnx.Linear(3, 3, rngs=rngs)}, loss)
