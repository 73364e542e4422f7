"""Flat jaxprs of models: scans over layers unrolled, slices of their leaves as inputs, the same numbers."""

import dataclasses
import warnings

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jpipe.model.traced.flat._flatten import CUT, Leaf, flatten, stack_slices, take_slice

L, D = 3, 4
UNFUSED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # fused operations may round differently


def draw(*shape):
    """Return an array of random numbers that depend on its shape only."""
    return jax.random.normal(jax.random.key(sum(shape)), shape) / 2


def primitives(flat):
    return [equation.primitive.name for equation in flat.closed.jaxpr.eqns]


def flat_of(function, leaves, *inputs, **options):
    tree = jax.tree.leaves(leaves)
    return flatten(jax.make_jaxpr(function)(leaves, *inputs), len(tree), **options)


def evaluate(flat, leaves, *inputs):
    """Return the outputs of a flat jaxpr, with their slices stacked again."""
    tree = jax.tree.leaves(leaves)
    arguments = [take_slice(leaf, tree[leaf.number]) for leaf in flat.leaves]
    values = jex.jaxpr_as_fun(flat.closed)(*arguments, *jax.tree.leaves(inputs))
    outputs = {}
    for leaf, value in zip(flat.results, values, strict=True):
        outputs.setdefault(leaf.number, {})[leaf] = value
    return [stack_slices(slices, jnp.stack) for slices in outputs.values()]


def check_equal(function, leaves, *inputs, **options):
    """Check that a flat jaxpr gives the values of the function, and its gradients to rounding; return it."""
    flat = flat_of(function, leaves, *inputs, **options)
    expected = jax.jit(lambda *arguments: jax.tree.leaves(function(*arguments)), compiler_options=UNFUSED)(leaves, *inputs)
    actual = jax.jit(lambda *arguments: evaluate(flat, *arguments), compiler_options=UNFUSED)(leaves, *inputs)
    assert [leaf.number for leaf in flat.leaves if not any(leaf.index)] == list(range(len(jax.tree.leaves(leaves))))
    for a, b in zip(actual, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(*(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in (a, b)))
    trained = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(leaves)]

    def gradient(evaluated):
        def loss(floats):
            values = iter(floats)
            tree = [next(values) if is_float else leaf for is_float, leaf in zip(trained, jax.tree.leaves(leaves), strict=True)]
            outputs = evaluated(jax.tree.unflatten(jax.tree.structure(leaves), tree), *inputs)
            return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.floating))

        return jax.jit(jax.grad(loss))([leaf for is_float, leaf in zip(trained, jax.tree.leaves(leaves), strict=True) if is_float])

    for a, b in zip(gradient(lambda *arguments: evaluate(flat, *arguments)), gradient(function), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)
    return flat


def block(x, w, b):
    return x + jnp.tanh(x @ w) * b[None]


def scanned(params, x, **options):
    return lax.scan(lambda x, p: (block(x, *p), None), x, params, **options)[0]


def params(*lengths):
    lengths = lengths or (L,)
    return draw(*lengths, D, D), draw(*lengths, D)


X = (2, D)


@pytest.mark.oldest
@pytest.mark.thinned
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}], ids=str)
@pytest.mark.parametrize("length", [1, L])
def test_a_scan_over_layers_is_unrolled(length, options, float64):
    flat = check_equal(lambda p, x: scanned(p, x, **options), params(length), draw(*X))
    assert flat.leaves == tuple(Leaf(number, (i,), (0,)) for number in range(2) for i in range(length))
    assert flat.results == (Leaf(0),)
    assert not {"scan", "slice", "concatenate"} & set(primitives(flat))


def nested(p, x):
    return lax.scan(lambda x, p: (scanned(p, x), jnp.sum(x)), x, p)


def reshaped(p, x):
    return nested([leaf.reshape(2, 3, *leaf.shape[1:]) for leaf in p], x)


def flattened(p, x):
    return scanned([leaf.reshape(6, *leaf.shape[2:]) for leaf in p], x)


def rematerialized(p, x):
    return lax.scan(lambda x, p: (jax.checkpoint(block)(x, *p), None), x, p)[0]


def rematerialized_groups(p, x):
    groups = [leaf.reshape(2, 3, *leaf.shape[1:]) for leaf in p]
    return lax.scan(lambda x, p: (jax.checkpoint(lambda x, p: scanned(p, x))(x, p), None), x, groups)[0]


def cast(p, x):
    return scanned([(leaf * 2 + 1).astype(jnp.float32).astype(jnp.float64) for leaf in p], x)


def cast_nested(p, x):
    return nested([-leaf for leaf in p], x)


def called(p, x):
    return jax.jit(lambda p, x: lax.scan(lambda x, p: (jax.jit(block)(x, *p), None), x, p)[0])(p, x)


def halves(p, x):
    return scanned([leaf[3:] for leaf in p], scanned([leaf[:3] for leaf in p], x))


def backwards(p, x):
    return scanned([leaf[::-1] for leaf in p], x)


def per_layer_outputs(p, x):
    x, (norms, activations) = lax.scan(lambda x, p: (block(x, *p), (jnp.sum(x), x)), x, p)
    return x, jnp.sum(norms), activations


def read_as_a_whole(p, x):
    return scanned(p, x) * jnp.sum(p[0] ** 2), p[1]


def with_numbers(p, x):
    rates = jnp.linspace(0.0, 1.0, len(p[0]))
    return lax.scan(lambda x, p: (block(x, *p[0]) * p[1], None), x, (p, rates))[0]


def skips(p, x):
    x, down = lax.scan(lambda x, p: (block(x, *p), x), x, p)
    return lax.scan(lambda x, p: (block(x, *p[0]) + p[1], None), x, (p, down), reverse=True)[0]


def vmapped(p, x):
    return jax.vmap(lambda x: scanned(p, x[None])[0])(x)


def by_numbers(p, x):
    for i in range(len(p[0])):
        x = block(x, p[0][i], p[1][i])
    return x


def inner_axis(p, x):
    return scanned([jnp.moveaxis(leaf, 1, 0) for leaf in p], x)


def two_axes(p, x):
    return nested([jnp.moveaxis(-leaf, 2, 1) for leaf in p], x)


def counted(p, x):
    return lax.fori_loop(0, len(p[0]), lambda i, x: block(x, p[0][i], p[1][i]), x)


def counted_backwards(p, x):
    def step(x, i):
        return jax.checkpoint(block)(x, *(jax.jit(lambda leaf: leaf[i])(leaf) for leaf in p)), i

    return lax.scan(step, x, jnp.arange(len(p[0])), reverse=True)


def counted_groups(p, x):
    def group(i, x):
        return lax.fori_loop(0, 2, lambda k, x: block(x, *(leaf[2 * i + k] for leaf in p)), x)

    return lax.fori_loop(0, len(p[0]) // 2, group, x)


CASES = {
    "nested": (nested, (2, 3), (0, 1)),
    "reshaped": (reshaped, (6,), (0,)),
    "flattened": (flattened, (2, 3), (0, 1)),
    "remat": (rematerialized, (3,), (0,)),
    "remat of groups": (rematerialized_groups, (6,), (0,)),
    "cast": (cast, (3,), (0,)),
    "cast, nested": (cast_nested, (2, 3), (0, 1)),
    "calls": (called, (3,), (0,)),
    "halves": (halves, (6,), (0,)),
    "backwards": (backwards, (3,), (0,)),
    "outputs of layers": (per_layer_outputs, (3,), (0,)),
    "read as a whole": (read_as_a_whole, (3,), (0,)),
    "numbers": (with_numbers, (3,), (0,)),
    "skips": (skips, (3,), (0,)),
    "vmap": (vmapped, (3,), (0,)),
    "counted": (counted, (3,), (0,)),
    "counted backwards": (counted_backwards, (3,), (0,)),
    "counted groups": (counted_groups, (6,), (0,)),
    "by numbers": (by_numbers, (3,), (0,)),
}


def axes_of(flat):
    """Return the axes along which each leaf is split."""
    return {leaf.number: leaf.axes for leaf in flat.leaves}


def check_case(function, p, axes):
    flat = check_equal(function, p, draw(*X))
    assert axes_of(flat) == {0: axes, 1: axes}
    assert not {"scan", "jit", "pjit"} & set(primitives(flat))
    return flat


ON_OLDEST = {"nested", "remat", "cast", "counted"}
SELDOM = {"remat of groups", "cast, nested", "reshaped", "halves", "counted groups", "counted backwards"}  # much like other cases


def marks_of(name):
    marks = {"oldest": ON_OLDEST, "exhaustive": SELDOM}
    return [getattr(pytest.mark, mark) for mark, names in marks.items() if name in names]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in CASES])
def test_values_and_gradients_equal_the_models(name, float64):
    function, lengths, axes = CASES[name]
    check_case(function, params(*lengths), axes)


@pytest.mark.slow
@pytest.mark.oldest
def test_layers_may_be_stacked_along_any_axes(float64):
    flat = check_case(inner_axis, (draw(D, L, D), draw(D, L)), (1,))
    assert "concatenate" not in primitives(flat)
    assert flat.leaves[1] == Leaf(0, (1,), (1,))
    check_case(two_axes, (draw(2, D, L, D), draw(2, D, L)), (0, 2))


class NormalizedLayer(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(D, D, rngs=rngs), nnx.BatchNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


class ScannedModule(nnx.Module):
    def __init__(self, axis, rngs):
        self.axes = nnx.StateAxes({nnx.Param: axis, nnx.BatchStat: axis, ...: 0})
        self.layers = nnx.split_rngs(splits=L)(nnx.vmap(NormalizedLayer, in_axes=(0,), out_axes=self.axes))(rngs)

    def __call__(self, x):
        return nnx.scan(lambda layer, x: layer(x), in_axes=(self.axes, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)


@pytest.mark.slow
@pytest.mark.oldest
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("axis", [0, 1])
def test_scanned_nnx_modules(axis, float64, lenient):
    graph, state = nnx.split(ScannedModule(axis, nnx.Rngs(0)))

    def function(state, x):
        module = nnx.merge(graph, state)
        y = module(x)
        return y, nnx.state(module)

    count = len(jax.tree.leaves(state))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the gradient of float32 statistics of float64 numbers
        flat = check_equal(function, state, draw(*X), replaces={number + 1: number for number in range(count)})
    check_split_states(flat, count)
    assert {axis for axes in axes_of(flat).values() for axis in axes} == {0, axis}


class ScannedLayer(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        x = linen.BatchNorm(use_running_average=False)(linen.Dense(D)(x))
        return linen.Dropout(0.5, deterministic=False)(x), None


@pytest.mark.slow
@pytest.mark.oldest
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(("axis", "remat"), [(0, True), (1, False)])
def test_scanned_linen_modules(axis, remat, float64, lenient):
    axes, keys = {"params": axis, "batch_stats": axis}, {"params": True, "dropout": True}
    layer = linen.remat(ScannedLayer) if remat else ScannedLayer
    module = linen.scan(layer, variable_axes=axes, split_rngs=keys, length=L)()
    variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, draw(*X), None)

    def function(variables, x, key):
        (y, _), state = module.apply(variables, x, None, rngs={"dropout": key}, mutable=["batch_stats"])
        return state, y

    flat = check_equal(function, variables, draw(*X), jax.random.key(2), replaces={0: 0, 1: 1})
    assert [path[0].key for path, _ in jax.tree_util.tree_flatten_with_path(variables)[0]][:2] == ["batch_stats"] * 2
    assert {*axes_of(flat).values()} == {(axis,)}
    assert primitives(flat).count("remat2") + primitives(flat).count("checkpoint") == L * remat
    assert flat.results[: 2 * L] == flat.leaves[: 2 * L]


def check_split_states(flat, count):
    """Check that the new value of each leaf is split as the leaf is."""
    assert [dataclasses.replace(leaf, number=leaf.number - 1) for leaf in flat.results if 1 <= leaf.number <= count] == [*flat.leaves]


def running(state, x):
    """Return an output and new state: of which a scan makes one leaf, and another one is computed as a whole."""
    x, new = lax.scan(lambda x, s: (x + s[None], s * 2), x, state[0])
    return x, new, jnp.cumsum(state[1], 0), state[2]


def test_new_state_is_split_as_the_old_one(float64):
    state = [draw(L, D), draw(L, D) + 1, draw(L, D) + 2]
    flat = check_equal(running, state, draw(*X), replaces={1: 0, 2: 1, 3: 2}, axes={1: (0,)})
    assert axes_of(flat) == {0: (0,), 1: (0,), 2: ()}
    check_split_states(flat, 3)
    flat = check_equal(lambda state, x: (x, x[None] * jnp.ones((L, 1, 1))), [draw(L, *X)], draw(*X), replaces={1: 0}, axes={0: [0]})
    check_split_states(flat, 1)


def test_unread_state_is_split_where_the_new_one_is(float64):
    def function(state, x):
        x, norms = lax.scan(lambda x, w: (x @ w, jnp.sum(x)), x, state[0])
        return x, norms

    flat = check_equal(function, [draw(L, D, D), draw(L)], draw(*X), replaces={1: 1})
    assert axes_of(flat) == {0: (0,), 1: (0,)}


def test_scans_over_time_and_values_read_as_a_whole_stay(float64):
    def function(p, x):
        _, states = lax.scan(lambda state, x: (jnp.tanh(state @ p[0] + x),) * 2, x[0], x)
        return states + p[1]

    flat = check_equal(function, [draw(D, D), draw(5, D)], draw(5, D))
    assert axes_of(flat) == {0: (), 1: ()}
    assert primitives(flat).count("scan") == 1


def test_scans_over_the_words_of_a_table_stay(float64):
    def function(p, x):
        def step(total, rows):
            return total + jnp.sum(jnp.exp(x @ rows.T), 1), None

        return lax.scan(step, jnp.zeros(2), p.reshape(-1, 3, D))[0], lax.scan(step, jnp.zeros(2), p[:, None])[0]

    flat = check_equal(function, draw(600, D), draw(*X))
    assert flat.leaves == (Leaf(0),)


def test_marks_of_cuts_branches_and_custom_derivatives_stay(float64):
    def cut(x):
        return x

    cut.__name__ = f"{CUT}middle]"

    def function(p, x):
        jax.debug.callback(lambda leaf: None, p[1])
        x = jax.jit(cut)(jax.nn.relu(scanned(p, x)))
        return jax.jit(lambda x: lax.cond(jnp.sum(x) > 0, lambda: x, lambda: x * 2))(x)

    flat = check_equal(function, params(), draw(*X))
    assert {"custom_jvp_call", "cond", "debug_callback"} <= set(primitives(flat))
    names = [equation.params["name"] for equation in flat.closed.jaxpr.eqns if equation.primitive.name in ("jit", "pjit")]
    assert names == [f"{CUT}middle]"]


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.data())
def test_slices_of_an_array_can_be_stacked_again(shape, data):
    array = np.arange(np.prod(shape)).reshape(shape)
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, len(shape) - 1)))))
    leaves = [Leaf(0, index, axes) for index in np.ndindex(*(shape[axis] for axis in axes))]
    np.testing.assert_array_equal(stack_slices({leaf: take_slice(leaf, array) for leaf in leaves}, np.stack), array)
