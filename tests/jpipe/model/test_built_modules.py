"""Parameters in the closure of a layer are detected, because training would not update them."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jpipe
from jpipe import InputError
from tests.jpipe import models, running

X = jnp.ones((2, models.WIDTH))


@functools.cache
def built():
    return nnx.Linear(models.WIDTH, models.WIDTH, rngs=nnx.Rngs(0))


@functools.cache
def variables():
    return jax.jit(linen.Dense(models.WIDTH).init)(jax.random.key(0), X)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OwnModule:
    """A module as other libraries have them: a pytree that can be called."""

    weight: jax.Array

    def __call__(self, x):
        return x @ self.weight


class Holder:
    """An object that holds a module."""

    def __init__(self, module):
        self.module = module

    def __call__(self, x):
        return self.module(x)


TABLE = jnp.ones((models.WIDTH, models.WIDTH))


def by_name(x):
    return x @ TABLE


def scanned(x):
    return jax.lax.scan(lambda carry, _: (carry @ TABLE, None), x, None, length=2)[0]


def module_of_own_class():
    return OwnModule(TABLE)


def closing_over(module):
    return lambda x: module(x)


def of_numpy():
    module = nnx.clone(built())
    nnx.update(module, jax.tree.map(np.array, nnx.state(module)))
    assert type(module.kernel.get_value()) is np.ndarray
    return module


def scale():
    scale = nnx.Param(jnp.ones(()))
    return lambda x: x * scale[...]


WAYS = {
    "closure": (lambda: closing_over(built()), r"module.kernel of a Linear.* lambda rngs: Linear\(…, rngs=rngs\)"),
    "bound method": (lambda: built().__call__, "kernel of a Linear"),
    "a bound method that takes rngs": (lambda: nnx.Sequential(built()).__call__, r"kernel of a Sequential"),
    "partial": (lambda: functools.partial(lambda module, x: module(x), built()), r"args\[0\].kernel of a Linear"),
    "partial by keyword": (lambda: functools.partial(lambda x, module: module(x), module=built()), r"module.kernel of a Linear"),
    "callable object": (lambda: Holder(built()), r"module.kernel of a Linear"),
    "in a list": (lambda: functools.partial(lambda modules, x: modules[0](x), [built()]), r"args\[0\]\[0\].kernel of a Linear"),
    "in a dict of a closure": (lambda: closing_over(Holder({"m": built()}.get("m"))), r"module.module.kernel of a Linear"),
    "jax.jit": (lambda: jax.jit(closing_over(built())), "kernel of a Linear"),
    "nnx.jit": (lambda: nnx.jit(closing_over(built())), "kernel of a Linear"),
    "jax.checkpoint": (lambda: jax.checkpoint(closing_over(built())), "kernel of a Linear"),
    "with arrays of NumPy": (lambda: closing_over(of_numpy()), "module.kernel of a Linear"),
    "one number": (scale, "scale of a Param"),
    "another library's": (module_of_own_class, r"float32\[3, 3\], weight\), .* a jpipe.Layer with an init .* NumPy array"),
    "another library's in a closure": (lambda: closing_over(module_of_own_class()), r"float32\[3, 3\], module.weight"),
    "another library's method": (lambda: module_of_own_class().__call__, r"float32\[3, 3\], weight"),
    "Linen apply": (lambda: functools.partial(linen.Dense(models.WIDTH).apply, variables()), r"args\[0\]\['params'\]\['kernel'\]"),
    "Linen apply with arrays of NumPy": (
        lambda: functools.partial(linen.Dense(models.WIDTH).apply, jax.tree.map(np.array, variables())),
        r"args\[0\]\['params'\]\['kernel'\]\).*the Linen module itself",
    ),
    "bound Linen module in a closure": (
        lambda: closing_over(linen.Dense(models.WIDTH).bind(variables())),
        r"module.params.kernel of a Dense.*variables\['params'\]",
    ),
    "a Layer's apply": (lambda: jpipe.Layer(lambda key, x: ({}, {}), lambda p, s, x, k, t: (built()(x), s)), r"float32\[3, 3\]"),
    "a global array": (lambda: by_name, r"float32\[3, 3\], TABLE"),
    "a global array in a loop": (lambda: scanned, r"float32\[3, 3\], TABLE"),
}


@pytest.mark.parametrize(("way", "message"), WAYS.values(), ids=WAYS)
def test_parameters_of_a_closure_are_refused(way, message):
    stack = jpipe.LayerStack({"first": models.dense(), "b": way()})
    with pytest.raises(InputError, match=r"layer 'b': its forward reads an array from outside .*" + message):
        stack.specs(X)


def test_a_module_whose_state_a_forward_changes_is_refused_as_one_that_is_built():
    norm = nnx.BatchNorm(models.WIDTH, rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match=r"layer 'b' .*it holds 'module', a BatchNorm, which is already built: give the constructor"):
        jpipe.LayerStack({"b": closing_over(norm)}).specs(X)


def test_a_bound_linen_module_is_refused():
    with pytest.raises(InputError, match=r"layer 'b' is a Linen Dense that is bound to variables.*params=\{'b': variables\['params'\]\}"):
        jpipe.LayerStack({"b": linen.Dense(models.WIDTH).bind(variables())})


@functools.cache
def numbers():
    """Compute an array at its first use, possibly while a layer is traced."""
    with jax.ensure_compile_time_eval():
        return np.asarray(jnp.arange(models.WIDTH * 1.0))


CONSTANTS = {
    "NumPy": lambda x: x @ np.ones((models.WIDTH, models.WIDTH), np.float32),
    "made in the forward": lambda x: x @ jnp.ones((models.WIDTH, models.WIDTH)),
    "computed while it is traced": lambda x: x + numbers()[None, :],
    "a list": lambda x: x + jnp.array([[1.0] * models.WIDTH]),
    "a few numbers": functools.partial(lambda mean, x: x - mean[None, :], jnp.ones(models.WIDTH)),
    "integers": functools.partial(lambda permutation, x: x[:, permutation], jnp.arange(models.WIDTH)),
}


@pytest.mark.parametrize("function", CONSTANTS.values(), ids=CONSTANTS)
def test_functions_with_constants_are_accepted(function):
    assert jpipe.LayerStack({"a": function}).specs(X)["a"].params == {}


def test_arrays_made_while_a_forward_is_traced_are_constants():
    def forward(x):
        with jax.ensure_compile_time_eval():
            table = jnp.ones((models.WIDTH, models.WIDTH)) * 2
        return x @ table

    assert jpipe.LayerStack({"a": forward}).specs(X)["a"].params == {}


def test_a_constructor_may_return_an_existing_module():
    """The module's weights are the initial ones for any key; training does not change the module itself."""
    module = nnx.Sequential(nnx.Linear(models.WIDTH, models.WIDTH, rngs=nnx.Rngs(5)), nnx.Dropout(0.5, rngs=nnx.Rngs(5)))
    module.eval()
    before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(module, nnx.Param)))
    stack = jpipe.LayerStack({"first": models.dense(), "b": lambda rngs: module})
    pipe = jpipe.Pipeline(stack, jpipe.Plan.even(stack.ids, 2, "gpipe", 2), models.squares, models.momentum())
    batch = models.batches_of(1, models.ROWS * 2)[0]
    state = pipe.init(jax.random.key(7), batch)
    running.check_equal(jax.tree.map(np.array, pipe.params(state)["b"]), before)
    state, _ = pipe.step(state, batch)
    assert not np.array_equal(pipe.params(state)["b"]["layers"][0]["kernel"], before["layers"][0]["kernel"])
    running.check_equal(jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(module, nnx.Param))), before)
    assert module.layers[1].deterministic


class Sowing(nnx.Module):
    def __init__(self, rngs, has_intermediate=False):
        self.linear = nnx.Linear(models.WIDTH, models.WIDTH, rngs=rngs)
        if has_intermediate:
            self.seen = nnx.Intermediate(())

    def __call__(self, x):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Flax would have it in nnx.capture
            self.sow(nnx.Intermediate, "seen", x)
        return self.linear(x)


class LinenSowing(linen.Module):
    @linen.compact
    def __call__(self, x):
        self.sow("losses", "balance", x.mean())
        return linen.Dense(models.WIDTH)(x)


@pytest.mark.parametrize(
    ("layer", "where"),
    [
        (lambda rngs: Sowing(rngs), "the nnx.Intermediate 'seen'"),
        (lambda rngs: Sowing(rngs, has_intermediate=True), "the nnx.Intermediate 'seen'"),
        (LinenSowing(), "the collection 'losses'"),
    ],
    ids=["NNX", "NNX, in the constructor", "Linen"],
)
def test_sow_is_refused_by_name(layer, where):
    with pytest.raises(
        InputError, match=f"layer 'a': its forward stores something new in {where}, as .*sow does.*return the value as a part of"
    ):
        jpipe.LayerStack({"a": layer}).specs(X)


class DrawingCall(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, *, rngs):
        return self.dropout(x, rngs=rngs)


def test_a_function_that_takes_rngs_is_refused_with_advice():
    def drop(x, *, rngs=None):
        return x

    with pytest.raises(InputError, match=r"layer 'a' has a parameter 'rngs'.*also needs 'x'.*draw random numbers in an NNX module"):
        jpipe.LayerStack({"a": drop})
    with pytest.raises(InputError, match=r"layer 'a'.*'rngs'; a layer is called only with its input: pass rngs to its parts in the constr"):
        jpipe.LayerStack({"a": lambda rngs: DrawingCall(rngs)}).specs(X)
