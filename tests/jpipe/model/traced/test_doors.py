"""Whole models of all kinds as one layer: they compute what the model computes, and become the model again."""

import functools
import itertools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from jpipe import InputError, LayerStack
from jpipe.model.traced.frontends._frontends import open_function, open_model
from tests.jpipe.running import check_equal

pytestmark = pytest.mark.usefixtures("lenient")
KEY = jax.random.key(5)
X = jax.random.normal(jax.random.key(1), (4, 3))
SPEC = jax.ShapeDtypeStruct(X.shape, X.dtype)


def leaves_are(actual, expected):
    """Check that two trees hold the same arrays, not copies."""
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one is other


# NNX


class Net(nnx.Module):
    """Dropout, batch statistics, modules in a list, a shared kernel, an array outside of variables."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(3, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(3, 3, rngs=rngs)])
        self.tied = self.blocks[0]
        self.steps = nnx.Variable(jnp.arange(2))
        self.name = "net"

    def __call__(self, x, mask=None):
        x = self.dropout(self.norm(self.inner(x if mask is None else x * mask)))
        return self.tied(self.blocks[0](x))


def params_of(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def without_random_numbers(module):
    return nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Any(nnx.Param, nnx.RngState))))


def test_a_constructor_begins_with_the_weights_of_its_module():
    whole = open_model(Net, (SPEC,))
    assert whole.params is whole.state is None
    params, state = whole.layer.init(KEY, X)
    expected = Net(rngs=nnx.Rngs(KEY))
    check_equal(params, params_of(expected))
    check_equal(state, without_random_numbers(expected))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), whole.specs) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), (params, state)
    )
    check_equal(whole.layer.apply(params, state, X, KEY, False)[0], evaluated(expected, X))


def evaluated(module, *inputs):
    module = nnx.clone(module)
    module.eval()
    return module(*inputs)


def test_a_built_module_is_not_copied_or_changed_and_comes_back_with_other_arrays():
    module = Net(nnx.Rngs(1))
    graph, before = nnx.split(module)
    whole = open_model(module, (SPEC,))
    leaves_are(whole.params, params_of(module))
    leaves_are(whole.state, without_random_numbers(module))
    leaves_are(whole.layer.init(KEY, X), (whole.params, whole.state))
    _, state = whole.layer.apply(whole.params, whole.state, X, KEY, True)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, whole.params)
    rebuilt = whole.rebuild(doubled, state)
    assert type(rebuilt) is Net
    assert rebuilt is not module
    assert rebuilt.name == "net"
    assert rebuilt.tied is rebuilt.blocks[0]
    assert not rebuilt.dropout.deterministic
    check_equal(params_of(rebuilt), doubled)
    assert np.any(rebuilt.norm.mean[...] != module.norm.mean[...])
    check_equal(nnx.state(rebuilt, nnx.RngState), nnx.state(module, nnx.RngState))
    check_equal(whole.layer.apply(doubled, state, X, KEY, False)[0], evaluated(rebuilt, X))
    after_graph, after = nnx.split(module)
    assert after_graph == graph
    leaves_are(after, before)
    check_equal(whole.from_user(rebuilt), (doubled, state))
    check_equal(whole.from_user(nnx.state(rebuilt)), (doubled, state))
    check_equal(whole.from_user(whole.to_user(doubled))[0], doubled)


def test_parts_that_evaluate_stay_so_in_training_and_afterwards():
    module = Net(nnx.Rngs(1))
    module.dropout.eval()
    whole = open_model(module, (SPEC,))
    outputs = [whole.layer.apply(whole.params, whole.state, X, jax.random.key(seed), True)[0] for seed in range(2)]
    check_equal(*outputs)
    assert whole.rebuild(whole.params, whole.state).dropout.deterministic


def test_dropout_draws_from_the_key_of_the_microbatch():
    whole = open_model(Net(nnx.Rngs(1)), (SPEC,))
    first, second, again = (whole.layer.apply(whole.params, whole.state, X, jax.random.key(seed), True)[0] for seed in (0, 1, 0))
    check_equal(first, again)
    assert np.any(first != second)


def test_an_abstract_module_has_specs_alone():
    whole = open_model(nnx.eval_shape(lambda: Net(nnx.Rngs(0))), (SPEC,))
    module = Net(nnx.Rngs(0))
    assert whole.params is whole.state is None
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(whole.specs))
    with pytest.raises(InputError, match=r"the model: an abstract model .*give init\(…, params=…\), or the constructor lambda rngs: Net"):
        whole.layer.init(KEY, X)
    params, state = whole.from_user(module)
    leaves_are(params, params_of(module))
    check_equal(evaluated(whole.rebuild(params, state), X), evaluated(module, X))


def test_an_array_that_an_abstract_module_lost_is_named():
    class Lost(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.List([nnx.Linear(3, 3, rngs=rngs)])
            self.inner[0].table = jnp.ones(3)

    with pytest.raises(InputError, match=r"the model: its array 'inner.0.table' is in no nnx.Variable, so nnx.eval_shape loses it"):
        open_model(nnx.eval_shape(lambda: Lost(nnx.Rngs(0))), (SPEC,))


def test_a_model_of_several_inputs_gets_each():
    module = Net(nnx.Rngs(1))
    whole = open_model(module, (SPEC, SPEC))
    y, _ = whole.layer.apply(whole.params, whole.state, (X, 2 * X), KEY, False)
    check_equal(y, evaluated(module, X, 2 * X))


def test_a_call_with_rngs_gets_them_in_training():
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x, *, rngs=None):
            return self.linear(x) + (0 if rngs is None else jax.random.normal(rngs.noise(), x.shape))

    module = Noisy(nnx.Rngs(0))
    whole = open_model(module, (SPEC,))
    assert (whole.layer.stochastic, whole.layer.draws_in_evaluation) == (True, False)
    check_equal(whole.layer.apply(whole.params, whole.state, X, KEY, True)[0], module(X, rngs=nnx.Rngs(KEY)))
    check_equal(whole.layer.apply(whole.params, whole.state, X, None, False)[0], module(X))


def test_sow_is_refused_by_name():
    class Sowing(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(3, 3, rngs=rngs)

        def __call__(self, x):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.sow(nnx.Intermediate, "seen", x)
            return self.linear(x)

    whole = open_model(Sowing(nnx.Rngs(0)), (SPEC,))
    with pytest.raises(InputError, match=r"the model: its forward stores something new in the nnx.Intermediate 'seen', as nnx.Module.sow"):
        whole.layer.apply(whole.params, whole.state, X, KEY, True)


# Linen


class LinenNet(linen.Module):
    """Batch statistics, dropout, a random stream of its own, and two inputs."""

    @linen.compact
    def __call__(self, x, scale, train: bool):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(4)(x * scale))
        x = linen.Dropout(0.5, deterministic=not train)(x)
        return x + jax.random.normal(self.make_rng("noise"), x.shape) if train else x


def test_a_linen_module_begins_with_the_variables_of_its_init():
    module = LinenNet()
    whole = open_model(module, (SPEC, SPEC))
    assert whole.params is whole.state is None
    params, state = whole.layer.init(KEY, (X, X))
    variables = module.init(KEY, X, X, train=True)
    check_equal({"params": params, **state}, variables)
    check_equal(whole.layer.apply(params, state, (X, X), KEY, False)[0], module.apply(variables, X, X, train=False))
    outputs = [whole.layer.apply(params, state, (X, X), jax.random.key(seed), True)[0] for seed in (0, 1)]
    assert np.any(outputs[0] != outputs[1])
    _, changed = whole.layer.apply(params, state, (X, X), KEY, True)
    assert np.any(changed["batch_stats"]["BatchNorm_0"]["mean"] != 0)
    check_equal(whole.rebuild(params, changed), {"params": params, **changed})


def test_linen_dropout_draws_as_with_the_key_itself():
    class Drops(linen.Module):
        @linen.compact
        def __call__(self, x, deterministic):
            return linen.Dropout(0.5)(linen.Dense(3)(x), deterministic=deterministic)

    variables = Drops().init(KEY, X, True)
    whole = open_model(Drops(), (SPEC,), variables=variables)
    expected = Drops().apply(variables, X, False, rngs={"dropout": jax.random.key(2)})
    check_equal(whole.layer.apply(whole.params, whole.state, X, jax.random.key(2), True)[0], expected)


@pytest.mark.parametrize("bind", [False, True])
def test_variables_of_a_linen_module_are_referred_to(bind):
    module = LinenNet()
    variables = module.init(KEY, X, X, train=True)
    whole = open_model(module.bind(variables), (SPEC, SPEC)) if bind else open_model(module, (SPEC, SPEC), variables=variables)
    leaves_are((whole.params, whole.state["batch_stats"]), (variables["params"], variables["batch_stats"]))
    leaves_are(whole.from_user(variables), (whole.params, whole.state))
    leaves_are(whole.from_user(variables["params"])[0], whole.params)
    leaves_are(whole.to_user(whole.params), variables["params"])


def test_variables_of_a_linen_module_may_have_another_dtype():
    """As the module itself takes them."""
    module = linen.Dense(4)
    variables = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), module.init(KEY, X))
    whole = open_model(module, (SPEC,), variables=variables)
    assert {leaf.dtype for leaf in jax.tree.leaves((whole.params, whole.specs[0]))} == {jnp.dtype(jnp.bfloat16)}


def test_wrong_variables_are_named():
    module, sizes = LinenNet(), (SPEC, SPEC)
    variables = module.init(KEY, X, X, train=True)
    with pytest.raises(
        InputError, match=r"variables: expected 'batch_stats/BatchNorm_0/mean', found none; give all variables that module.init returns"
    ):
        open_model(module, sizes, variables={"params": variables["params"]})
    wrong = {**variables, "params": {**variables["params"], "Dense_0": {"kernel": np.ones(3)}}}
    with pytest.raises(
        InputError, match=r"variables: params: expected 'Dense_0/kernel' as in the model, float32\[3, 4\], found float64\[3\]"
    ):
        open_model(module, sizes, variables=wrong)
    with pytest.raises(InputError, match=r"variables: expected None, because only a Linen module takes separate variables, found Net"):
        open_model(Net(nnx.Rngs(0)), (SPEC,), variables=variables)


def test_inputs_that_do_not_fit_a_linen_module_are_named():
    with pytest.raises(InputError, match=r"the model does not take its inputs, float32\[4, 3\]; it raises TypeError: .*scale"):
        open_model(LinenNet(), (SPEC,))


# Equinox and other pytrees


class EquinoxNet(eqx.Module):
    """A pytree with functions, flags and integers among its leaves."""

    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    rows: jax.Array

    def __call__(self, x, *, key=None):
        return self.dropout(jax.vmap(self.mlp)(x), key=key)[self.rows]


def equinox_net():
    return EquinoxNet(eqx.nn.MLP(3, 3, 4, 2, key=KEY), eqx.nn.Dropout(0.5), jnp.arange(4)[::-1])


def test_an_equinox_module_computes_what_it_computes():
    module = equinox_net()
    whole = open_model(module, (SPEC,))
    leaves_are(whole.params, eqx.filter(module, eqx.is_inexact_array))
    leaves_are(whole.state, module.rows)
    assert (whole.layer.stochastic, whole.layer.draws_in_evaluation) == (True, False)
    y, state = whole.layer.apply(whole.params, whole.state, X, KEY, True)
    check_equal(y, module(X, key=KEY))
    leaves_are(state, whole.state)
    check_equal(whole.layer.apply(whole.params, whole.state, X, None, False)[0], eqx.nn.inference_mode(module)(X))


def test_a_module_of_one_row_is_to_be_mapped_over_rows():
    message = r"it takes one row, float32\[5\], but .* map it over rows: from_function\(lambda model, x: jax.vmap"
    with pytest.raises(InputError, match=message):
        LayerStack.from_model(eqx.nn.MLP(5, 3, 4, 2, key=KEY), jnp.ones((4, 5)))


def test_an_equinox_module_comes_back_with_other_arrays():
    module = equinox_net()
    whole = open_model(module, (SPEC,))
    doubled = jax.tree.map(lambda leaf: 2 * leaf, whole.params)
    rebuilt = whole.rebuild(doubled, whole.state)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(module)
    assert rebuilt.dropout.inference is False
    check_equal(eqx.filter(rebuilt, eqx.is_inexact_array), doubled)
    leaves_are(rebuilt.rows, module.rows)
    check_equal(whole.from_user(rebuilt), (doubled, whole.state))
    check_equal(whole.to_user(doubled)(X, key=KEY), rebuilt(X, key=KEY))
    abstract = open_model(eqx.filter_eval_shape(equinox_net), (SPEC,))
    assert abstract.params is abstract.state is None
    leaves_are(abstract.from_user(module), (whole.params, whole.state))
    with pytest.raises(InputError, match="the model: an abstract model"):
        abstract.layer.init(KEY, X)


def test_a_partial_of_arrays_is_a_model():
    weights = jnp.ones((3, 3))
    whole = open_model(jax.tree_util.Partial(lambda w, x: x @ w, weights), (SPEC,))
    leaves_are(whole.params, weights)
    check_equal(whole.layer.apply(whole.params, whole.state, X, None, True)[0], X @ weights)


# Functions

PARAMS = {"w": np.ones((3, 3), np.float32), "order": np.array([2, 0, 1]), "activation": jnp.tanh}


def scaled(params, x):
    return params["activation"](x @ params["w"])[:, params["order"]]


def test_a_function_keeps_integers_and_objects_of_its_parameters():
    whole = open_function(scaled, PARAMS, (SPEC,))
    leaves_are(whole.params, PARAMS["w"])
    assert jax.tree.map(lambda leaf: leaf.shape, whole.specs[0]) == {"w": (3, 3), "order": None, "activation": None}
    y, state = whole.layer.apply(whole.params, whole.state, X, None, True)
    check_equal(y, scaled(PARAMS, X))
    leaves_are(state, whole.state)
    assert not whole.layer.stochastic
    rebuilt = whole.rebuild({**whole.params, "w": 2 * PARAMS["w"]}, whole.state)
    check_equal(scaled(rebuilt, X), scaled({**PARAMS, "w": 2 * PARAMS["w"]}, X))
    assert rebuilt.keys() == whole.to_user(whole.params).keys() == PARAMS.keys()
    check_equal(whole.layer.init(KEY, X), (whole.params, whole.state))


NOISE = {
    "as Haiku": lambda params, rng, x: x @ params["w"] + jax.random.normal(rng, x.shape),
    "at the end": lambda params, x, key: x @ params["w"] + jax.random.normal(key, x.shape),
    "by keyword": lambda params, x, *, dropout_rng: x @ params["w"] + jax.random.normal(dropout_rng, x.shape),
    "of a stream": lambda params, x, rngs: x @ params["w"] + jax.random.normal(rngs.default(), x.shape),
    "first": lambda key, params, x: x @ params["w"] + jax.random.normal(key, x.shape),
    "bound": functools.partial(lambda scale, params, rng, x: scale * x @ params["w"] + jax.random.normal(rng, x.shape), 1.0),
}


@pytest.mark.parametrize("function", NOISE.values(), ids=NOISE)
def test_a_function_gets_random_numbers_wherever_it_asks_for_them(function):
    whole = open_function(function, {"w": np.eye(3, dtype=np.float32)}, (SPEC,))
    assert whole.layer.stochastic
    assert whole.layer.draws_in_evaluation
    key = nnx.Rngs(KEY).default() if function is NOISE["of a stream"] else KEY
    for train in (True, False):
        y, _ = whole.layer.apply(whole.params, whole.state, X, KEY, train)
        np.testing.assert_allclose(y, X + jax.random.normal(key, X.shape), rtol=1e-6)


FLAGS = {
    "train": lambda params, x, train: x * params if train else x,
    "training": lambda params, x, *, training=False: x * params if training else x,
    "is_training": lambda params, is_training, x: x * params if is_training else x,
    "deterministic": lambda params, x, deterministic=True: x if deterministic else x * params,
}


@pytest.mark.parametrize("function", FLAGS.values(), ids=FLAGS)
def test_a_function_gets_whether_it_trains(function):
    whole = open_function(function, np.full((), 3, np.float32), (SPEC,))
    trained, evaluated = (whole.layer.apply(whole.params, whole.state, X, None, train)[0] for train in (True, False))
    check_equal((trained, evaluated), (3 * X, X))


def test_a_flag_of_another_name_is_refused():
    with pytest.raises(
        InputError, match=r"the model: expected one of train, training, .* as the parameter that selects .*, found 'is_eval'"
    ):
        open_function(lambda params, x, is_eval: x, {}, (SPEC,))


def counting(params, state, rng, x, is_training):
    return x @ params["w"] + state["count"], {"count": state["count"] + is_training, "name": "counter"}


def test_a_function_with_a_state_passes_it_on_in_training():
    state = {"count": jnp.zeros(()), "name": "counter"}
    whole = open_function(counting, {"w": np.eye(3, dtype=np.float32), "n": np.arange(2)}, (SPEC,), state=state)
    current = whole.state
    for number, train in itertools.product(range(2), (True, False)):
        y, current = whole.layer.apply(whole.params, current, X, KEY, train)
        check_equal(y, X + number + (not train))
    params, changed = whole.rebuild(whole.params, current)
    assert params.keys() == {"w", "n"}
    assert (float(changed["count"]), changed["name"]) == (2, "counter")


def test_what_a_function_returns_in_place_of_a_state_is_named():
    x = (SPEC,)
    alone = open_function(lambda params, state, x: x, {"w": np.ones(3)}, x, state={"a": np.ones(2)})
    with pytest.raises(InputError, match=r"with a state, the function has to return a pair, \(outputs, new state\), found "):
        alone.layer.apply(alone.params, alone.state, X, None, True)
    other = open_function(lambda params, state, x: (x, {"b": state["a"]}), {"w": np.ones(3)}, x, state={"a": np.ones(2)})
    with pytest.raises(InputError, match=r"expected a new state with the structure of the old one, \['a'\] float.*, found \['b'\]"):
        other.layer.apply(other.params, other.state, X, None, True)


def test_wrong_models_are_refused_with_advice():
    cases = {
        "found function; for a function of parameters and inputs use from_function": lambda x: x,
        "found the class Dense; give an instance of Dense": linen.Dense,
        "found int": 3,
        "'rngs'; it also needs 'width'; give lambda rngs": lambda rngs, width: None,
    }
    for message, model in cases.items():
        with pytest.raises(InputError, match=f"the model.*{message}"):
            open_model(model, (SPEC,))
    with pytest.raises(InputError, match="the model is a method of the Linen module Dense; give the module itself"):
        open_function(linen.Dense(3).apply, {}, (SPEC,))
    with pytest.raises(InputError, match="the model: expected a function of parameters and inputs, found int"):
        open_function(3, {}, (SPEC,))
    with pytest.raises(InputError, match="the model: parameter 'w' is complex64: only real floating-point parameters can be trained"):
        open_function(scaled, {"w": np.ones(3, np.complex64)}, (SPEC,))
    with pytest.raises(InputError, match=r"params: 'v' is not in the model; did you mean|params: 'v' is not in the model; known: order, w"):
        open_function(scaled, PARAMS, (SPEC,)).from_user({"v": np.ones(3)})
