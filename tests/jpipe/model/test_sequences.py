"""Sequences of layers are models as they are, and modules that are built begin with their own arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jpipe import InputError, LayerStack, Pipeline, Plan, Tie
from tests.jpipe.models import batches_of, squares
from tests.jpipe.running import check_close, check_equal

pytestmark = pytest.mark.usefixtures("lenient")
BATCHES = batches_of(3, 4)


def sequential() -> nnx.Sequential:
    rngs = nnx.Rngs(5)
    return nnx.Sequential(nnx.Linear(3, 8, rngs=rngs), nnx.BatchNorm(8, momentum=0.5, rngs=rngs), jax.nn.relu, nnx.Linear(8, 3, rngs=rngs))


def pipeline(layers, **options) -> Pipeline:
    stack = LayerStack(layers, **options)
    return Pipeline(stack, Plan.even(stack.ids, 2, "pipedream_flush", 1), squares, optax.sgd(0.1))


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("kind", [lambda m: m, lambda m: m.layers, lambda m: list(m.layers), lambda m: tuple(m.layers)])
def test_a_sequence_of_built_modules_trains_as_with_flax(kind):
    module = sequential()
    pipe, expected = pipeline(kind(module)), sequential()
    assert pipe.stack.ids == ("0", "1", "2", "3")
    before = nnx.to_pure_dict(jax.tree.map(np.array, nnx.state(module)))
    state = pipe.init(jax.random.key(0), BATCHES[0])
    check_equal(pipe.params(state)["3"], nnx.to_pure_dict(nnx.state(module.layers[3], nnx.Param)))

    @nnx.jit
    def step(module, x, labels):
        gradients = nnx.grad(lambda module: jnp.mean((module(x) - labels) ** 2))(module)
        nnx.update(module, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(module, nnx.Param), gradients))

    for batch in BATCHES:
        state, _ = pipe.step(state, batch)
        step(expected, *batch)
    for layer_id in ("0", "1", "3"):
        check_close(pipe.params(state)[layer_id], nnx.to_pure_dict(nnx.state(expected.layers[int(layer_id)], nnx.Param)), 1e-5)
    check_equal(nnx.to_pure_dict(nnx.state(module)), before)


def test_a_built_module_begins_with_its_layer_state_and_the_explicit_parameters():
    module = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    module.mean[...] = jnp.arange(3.0)
    pipe = pipeline({"norm": module, "out": lambda rngs: nnx.Linear(3, 3, rngs=rngs)})
    state = pipe.init(jax.random.key(0), BATCHES[0], params={"norm": {"bias": np.full(3, 2, np.float32)}})
    check_equal(state.workers[0].layer_state["norm"]["mean"], np.arange(3, dtype=np.float32))
    check_equal(pipe.params(state)["norm"], {"bias": np.full(3, 2, np.float32), "scale": np.ones(3, np.float32)})
    layer_states = state.workers[0].layer_state
    evaluation, _ = pipe.stack.apply(("norm",), pipe.params(state), layer_states, X, **EVALUATION)
    module.bias[...] = jnp.full(3, 2.0)
    module.eval()
    check_close(evaluation, module(X), 1e-6)


X = BATCHES[0][0]
EVALUATION = {"key": None, "microbatch": 0, "train": False}


def test_a_linen_sequential_is_cut_into_its_layers():
    module = linen.Sequential([linen.Dense(8), linen.relu, linen.Dense(3)])
    stack = LayerStack(module)
    assert stack.ids == ("0", "1", "2")
    variables = module.init(jax.random.key(1), X)["params"]
    params = {"0": variables["layers_0"], "1": {}, "2": variables["layers_2"]}
    actual, _ = stack.apply(stack.ids, params, {layer_id: {} for layer_id in stack.ids}, X, **EVALUATION)
    check_equal(actual, module.apply({"params": variables}, X))


def test_a_module_in_two_places_of_a_sequence_is_refused():
    linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match=r"layers '0' and '2' share the parameter or module '.*', so two stages would train"):
        LayerStack([linear, jnp.tanh, linear])
    dense = linen.Dense(3)
    with pytest.raises(InputError, match=r"layers '0' and '1' share the parameter or module 'Dense'"):
        LayerStack(linen.Sequential([dense, dense]))
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    assert LayerStack([dropout, dropout]).is_stochastic("1")


def test_built_modules_with_a_tie_begin_with_equal_arrays():
    first, second = (nnx.Linear(3, 3, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    pipe = pipeline([first, second], ties=[Tie(("0", "kernel"), ("1", "kernel"))])
    with pytest.raises(InputError, match=r"'kernel' of layer '1' is 'kernel' of layer '0' .they are tied., but has other values"):
        pipe.init(jax.random.key(0), BATCHES[0])
    second.kernel[...] = first.kernel[...]
    pipe = pipeline([first, second], ties=[Tie(("0", "kernel"), ("1", "kernel"))])
    check_equal(pipe.params(pipe.init(jax.random.key(0), BATCHES[0]))["1"]["kernel"], first.kernel[...])


def test_a_subclass_of_a_sequential_is_no_sequence():
    class Residual(nnx.Sequential):
        def __call__(self, x):
            return x + super().__call__(x)

    with pytest.raises(InputError, match="a list of layers or a Sequential, found Residual"):
        LayerStack(Residual(nnx.Linear(3, 3, rngs=nnx.Rngs(0))))
