"""Layers cut from a model evaluate as the model does, whatever it does otherwise than in training."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jpipe
from jpipe import InputError, LayerStack, Pipeline, Plan

pytestmark = pytest.mark.usefixtures("lenient")
WIDTH, ROWS = 4, 2
X = np.random.default_rng(0).normal(size=(4 * ROWS, WIDTH)).astype(np.float32)


def linear(p, x):
    return x @ p["w"] + p["b"]


def early(p, x):
    return jnp.tanh(linear(p["a"], x))


def of_layers(outputs):
    """Return a model from its outputs, a function of its inputs and of what its three layers return."""

    def model(p, x):
        first = early(p, x)
        second = jnp.tanh(linear(p["b"], first))
        return outputs(x, first, second, linear(p["c"], second))

    return model


LAST = of_layers(lambda x, first, second, last: last)
FUNCTIONS = {
    "other names": (
        of_layers(lambda x, first, second, last: {"pred": last, "target": second}),
        of_layers(lambda x, first, second, last: {"ema_pred": second, "pred": 2 * last}),
    ),
    "tuple, array": (of_layers(lambda x, first, second, last: (last, second)), of_layers(lambda x, first, second, last: second + last)),
    "array, list": (LAST, of_layers(lambda x, first, second, last: [second, (last, {"x": x, "first": first})])),
    "other order": (of_layers(lambda x, first, second, last: (last, second)), of_layers(lambda x, first, second, last: (second, last))),
    "None": (of_layers(lambda x, first, second, last: (last, x)), of_layers(lambda x, first, second, last: (None, last))),
    "classes": (LAST, of_layers(lambda x, first, second, last: last.argmax(-1))),
    "bfloat16": (LAST, of_layers(lambda x, first, second, last: last.astype(jnp.bfloat16))),
    "one number": (LAST, of_layers(lambda x, first, second, last: last.sum(-1))),
    "input": (LAST, lambda p, x: x),
    "parameter and constant": (LAST, lambda p, x: (jnp.broadcast_to(p["c"]["b"], x.shape), jnp.ones(len(x)))),
    "first layer alone": (LAST, early),
    "last layer alone": (LAST, lambda p, x: linear(p["c"], x)),
    "without the middle": (LAST, lambda p, x: linear(p["c"], early(p, x))),
    "layer of training": (
        lambda p, x: (linear(p["b"], early(p, x)), linear(p["c"], early(p, x))),
        lambda p, x: linear(p["c"], early(p, x)),
    ),
    "layer of evaluation": (
        lambda p, x: linear(p["c"], early(p, x)),
        lambda p, x: {"b": linear(p["b"], early(p, x)), "c": linear(p["c"], early(p, x))},
    ),
}
"""By name the model in training and in evaluation, functions of parameters and inputs."""


def parameters():
    random = np.random.default_rng(1)
    return {name: {"w": random.normal(size=(WIDTH, WIDTH)).astype(np.float32), "b": np.ones(WIDTH, np.float32)} for name in "abc"}


def of_both(in_training, in_evaluation):
    return lambda p, x, train: in_training(p, x) if train else in_evaluation(p, x)


class Mean(nnx.Module):
    """Follows the kernel of its head, with which it evaluates; counts its forwards."""

    def __init__(self, rngs):
        self.a, self.b, self.c = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3))
        self.drop, self.norm = nnx.Dropout(0.5, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.mean, self.count = nnx.BatchStat(jnp.ones((WIDTH, WIDTH))), nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        h = self.drop(self.norm(jnp.tanh(self.b(jnp.tanh(self.a(x))))))
        if self.drop.deterministic:
            return {"mean": h @ self.mean[...] / self.count[...], "pred": self.c(h)}
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * self.c.kernel[...]
        self.count[...] = self.count[...] + 1
        return {"pred": self.c(h), "target": h}


class Heads(linen.Module):
    """Has a head in training that it leaves out in evaluation; batch statistics, dropout."""

    @linen.compact
    def __call__(self, x, train: bool):
        x = linen.BatchNorm(use_running_average=not train)(jnp.tanh(linen.Dense(WIDTH)(x)))
        x = linen.Dropout(0.5, deterministic=not train)(x)
        further = linen.Dense(2, name="further")(x) if train else None
        y = linen.Dense(3)(jnp.tanh(linen.Dense(WIDTH, name="last")(x)))
        return (y, further) if train else y


class Inference(eqx.Module):
    """Returns probabilities in evaluation."""

    a: eqx.nn.Linear
    b: eqx.nn.Linear
    drop: eqx.nn.Dropout

    def __init__(self, key):
        self.a, self.b = (eqx.nn.Linear(WIDTH, WIDTH, key=each) for each in jax.random.split(key))
        self.drop = eqx.nn.Dropout(0.5)

    def __call__(self, x, key=None):
        y = jax.vmap(self.b)(self.drop(jnp.tanh(jax.vmap(self.a)(x)), key=key))
        return jax.nn.softmax(y) if self.drop.inference else {"logits": y}


def evaluated_nnx(module, x):
    module.eval()
    return module(x)


MODELS = {
    "nnx": (Mean(nnx.Rngs(0)), evaluated_nnx),
    "linen": (Heads(), lambda variables, x: Heads().apply(variables, x, train=False)),
    "equinox": (Inference(jax.random.key(0)), lambda model, x: eqx.nn.inference_mode(model)(x)),
}
"""By name a model, and what it returns in evaluation, from the model as `Pipeline.model` gives it back."""


def check_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_allclose(np.float32(one), np.float32(other), rtol=1e-5, atol=1e-6)


def total(outputs, labels):
    """Return a loss of outputs of any structure, in which each array counts otherwise."""
    sums = [(i + 1) * jnp.square(leaf.astype(jnp.float32)).sum() for i, leaf in enumerate(jax.tree.leaves(outputs))]
    return sum(sums), jnp.float32(len(labels))


def test_the_layers_of_functions_return_what_the_function_does_in_evaluation():
    params, stacks = parameters(), {}
    for name, both in FUNCTIONS.items():
        cuts = ["c"] if "layer of" in name else ["b", "c"]
        stacks[name] = LayerStack.from_function(of_both(*both), params, X, cuts=cuts)
    layers = {name: {layer_id: tree for layer_id, (tree, _) in stack.initial.items()} for name, stack in stacks.items()}

    @jax.jit
    def evaluate(layers, params, x):
        of_layers, of_functions = {}, {}
        for name, stack in stacks.items():
            whole = {layer_id: stack.ties.whole(layer_id, layers[name]) for layer_id in stack.ids}
            of_layers[name] = stack.apply(
                stack.ids, whole, {layer_id: {} for layer_id in stack.ids}, x, key=None, microbatch=None, train=False
            )[0]
            of_functions[name] = FUNCTIONS[name][1](params, x)
        return of_layers, of_functions

    actual, expected = evaluate(layers, params, X)
    for name, stack in stacks.items():
        check_same(actual[name], expected[name])
        assert stack.specs(X)[stack.ids[-1]].evaluated == jax.eval_shape(lambda x=expected[name]: x), name


def trained(stack, schedule):
    """Return a pipeline with a stage for each layer, and its state after a step."""
    pipe = Pipeline(stack, Plan.even(stack.ids, len(stack.ids), schedule, 2), total, optax.sgd(0.01, momentum=0.9))
    state, _ = pipe.step(pipe.init(jax.random.key(0), (X[: 2 * ROWS], X[: 2 * ROWS])), (X[: 2 * ROWS], X[: 2 * ROWS]))
    return pipe, pipe.drain(state)


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize("schedule", ["pipedream", "zb_h1"])
@pytest.mark.parametrize("name", MODELS)
def test_predictions_and_evaluations_are_those_of_the_model(name, schedule):
    model, evaluated = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pipe, state = trained(LayerStack.from_model(model, X[:ROWS], granularity="finest"), schedule)
    expected = evaluated(pipe.model(state), jnp.asarray(X))
    check_same(pipe.predict(state, X), expected)
    evaluation = pipe.evaluate(state, (X, X), {"first": lambda y, labels: (jax.tree.leaves(y)[0].sum(), len(labels))})
    np.testing.assert_allclose(float(evaluation.loss), total(expected, X)[0] / len(X), rtol=1e-5)
    np.testing.assert_allclose(float(evaluation.metrics["first"].mean), jax.tree.leaves(expected)[0].sum() / len(X), rtol=1e-5)


def test_a_loss_that_takes_the_outputs_of_training_alone_trains_and_predicts():
    in_training, in_evaluation = FUNCTIONS["other names"]
    stack = LayerStack.from_function(of_both(in_training, in_evaluation), parameters(), X[:ROWS], cuts=["c"])
    plan = Plan.even(stack.ids, 2, "gpipe", 2)
    pipe = Pipeline(stack, plan, lambda y, labels: (jnp.square(y["pred"] - y["target"]).sum(), len(labels)), optax.sgd(0.1))
    batch = X[: 2 * ROWS], X[: 2 * ROWS]
    state, _ = pipe.step(pipe.init(jax.random.key(0), batch), batch)
    check_same(pipe.predict(state, X), jax.jit(in_evaluation)(pipe.model(state), X))
    pipe.check(batch)
    message = (
        r"^loss: the function does not take outputs \['ema_pred'\] .* of layer 'c' in evaluation and labels .*; it raises .*'target'.*; fix"
    )
    for evaluate in (lambda: pipe.evaluate(state, batch), lambda: pipe.check(batch, {})):
        with pytest.raises(InputError, match=message):
            evaluate()


def test_a_layer_between_others_returns_the_same_in_evaluation():
    stack = LayerStack(
        {"a": jpipe.Layer(lambda key, x: ({}, {}), lambda p, s, x, key, train: ((x, x) if train else x, s)), "b": jax.tree.leaves}
    )
    with pytest.raises(InputError, match=r"^layer 'a': its output in evaluation has other shapes or dtypes than its output in training"):
        stack.specs(X)
