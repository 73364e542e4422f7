"""Flat jaxprs of models: scans over layers unrolled, slices of their leaves as inputs, the same numbers."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jpipe.model.traced._flatten import Leaf, flatten

L, D = 3, 4


def draw(*shape):
    """Return an array of random numbers that depend on its shape only."""
    return jax.random.normal(jax.random.key(sum(shape)), shape) / 2


def primitives(flat):
    return [equation.primitive.name for equation in flat.closed.jaxpr.eqns]


def flat_of(function, leaves, *inputs, **options):
    tree = jax.tree.leaves(leaves)
    return flatten(jax.make_jaxpr(function)(leaves, *inputs), len(tree), **options)


def evaluate(flat, leaves, *inputs):
    """Return the outputs of a flat jaxpr, slices stacked again."""
    tree = jax.tree.leaves(leaves)
    values = jex.jaxpr_as_fun(flat.closed)(*(tree[leaf.number][leaf.index] for leaf in flat.leaves), *jax.tree.leaves(inputs))
    outputs = []
    for leaf, value in zip(flat.results, values, strict=True):
        if leaf.number == len(outputs):
            outputs.append({})
        outputs[leaf.number][leaf.index] = value

    def stacked(slices, index=()):
        if index in slices:
            return slices[index]
        count = 1 + max(one[len(index)] for one in slices if one[: len(index)] == index)
        return jnp.stack([stacked(slices, (*index, i)) for i in range(count)])

    return [stacked(slices) for slices in outputs]


def check_equal(function, leaves, *inputs, **options):
    """Check that a flat jaxpr gives the values of the function, and its gradients to rounding; return it."""
    flat = flat_of(function, leaves, *inputs, **options)
    expected = jax.jit(lambda *arguments: jax.tree.leaves(function(*arguments)))(leaves, *inputs)
    actual = jax.jit(lambda *arguments: evaluate(flat, *arguments))(leaves, *inputs)
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
@pytest.mark.parametrize("options", [{}, {"reverse": True}, {"unroll": 2}], ids=str)
@pytest.mark.parametrize("length", [1, L])
def test_a_scan_over_layers_is_unrolled(length, options, float64):
    flat = check_equal(lambda p, x: scanned(p, x, **options), params(length), draw(*X))
    assert flat.leaves == tuple(Leaf(number, (i,)) for number in range(2) for i in range(length))
    assert flat.results == (Leaf(0, ()),)
    assert primitives(flat) == ["dot_general", "tanh", "mul", "add"] * length or "broadcast_in_dim" in primitives(flat)
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


def by_numbers(p, x):
    for i in range(len(p[0])):
        x = block(x, p[0][i], p[1][i])
    return x


CASES = {
    "nested": (nested, (2, 3), 2),
    "reshaped": (reshaped, (6,), 1),
    "flattened": (flattened, (2, 3), 2),
    "remat": (rematerialized, (3,), 1),
    "remat of groups": (rematerialized_groups, (6,), 1),
    "cast": (cast, (3,), 1),
    "cast, nested": (cast_nested, (2, 3), 2),
    "calls": (called, (3,), 1),
    "halves": (halves, (6,), 1),
    "backwards": (backwards, (3,), 1),
    "outputs of layers": (per_layer_outputs, (3,), 1),
    "read as a whole": (read_as_a_whole, (3,), 1),
    "numbers": (with_numbers, (3,), 1),
    "skips": (skips, (3,), 1),
    "by numbers": (by_numbers, (3,), 0),
}


@pytest.mark.oldest
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_the_models(name, float64):
    function, lengths, depth = CASES[name]
    flat = check_equal(function, params(*lengths), draw(*X))
    assert flat.depths == {0: depth, 1: depth}
    assert not {"scan", "jit", "pjit"} & set(primitives(flat))
