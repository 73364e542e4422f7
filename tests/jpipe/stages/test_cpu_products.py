"""Products on CPUs: swapped operands where XLA would copy more, with the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import Layer, LayerStack, Pipeline, Plan
from jpipe.model.jaxprs._cpu_products import with_swapped_products
from tests.jpipe import models


def gradient(loss):
    return lambda w, x: jax.grad(lambda w: loss(w, x).sum())(w)


def scanned(w, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 3)[0]


SQUARE = {
    "rows of two dims": lambda w, x: (x @ w) ** 2,
    "rows of one dim": lambda w, x: (x[0] @ w) ** 2,
    "heads": lambda w, x: jnp.einsum("bsw,whd->bshd", x, w.reshape(6, 3, 2)) ** 2,
    "in 16 bits": lambda w, x: (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32) ** 2,
    "scan": scanned,
    "recomputed": jax.checkpoint(lambda w, x: jnp.sin(x @ w)),
    "of a branch": lambda w, x: jax.lax.cond(x[0, 0, 0] > 0, lambda: jnp.sin(x @ w), lambda: jnp.cos(x @ w)),
}


def operations(jaxpr):
    """Return the names of all operations of a jaxpr, also of those that it calls, and the shapes of transposed arrays."""
    found = []
    for equation in jaxpr.eqns:
        found.append((equation.primitive.name, equation.invars[0].aval.shape if equation.invars else ()))
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            found += operations(getattr(inner, "jaxpr", inner)) if hasattr(inner, "eqns") or hasattr(inner, "jaxpr") else []
    return found


@pytest.mark.parametrize("case", SQUARE)
def test_gradients_are_products_of_swapped_operands(case, float64):
    function, (a, b) = gradient(SQUARE[case]), jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(a, (6, 6)), jax.random.normal(b, (4, 5, 6))
    swapped = with_swapped_products(function)
    expected = function(w, x)
    np.testing.assert_allclose(swapped(w, x), expected, rtol=0, atol=(2e-2 if "16" in case else 1e-14) * abs(expected).max())
    transposed = [sum(name == "transpose" for name, _ in operations(jax.make_jaxpr(f)(w, x).jaxpr)) for f in (function, swapped)]
    assert transposed[1] < transposed[0]


def test_a_linear_solver_inside_stays_as_it_is(float64):
    function, (a, b) = gradient(lambda w, x: jnp.linalg.solve(w + 6 * jnp.eye(6), (x @ w).T).T), jax.random.split(jax.random.key(0))
    w, x = jax.random.normal(a, (6, 6)), jax.random.normal(b, (5, 6))
    np.testing.assert_allclose(with_swapped_products(function)(w, x), function(w, x), rtol=1e-12)


@pytest.mark.parametrize("is_swapped", [True, False])
def test_the_larger_operand_of_a_product_of_batches_is_read_as_it_is(is_swapped, float64):
    shapes, numbers = ((2, 7, 3, 4), (2, 3, 6, 7)), (((1,), (3,)), ((0, 2), (0, 1)))  # values and probabilities
    if not is_swapped:  # queries and keys: the result is larger than what a swap saves
        shapes, numbers = ((2, 7, 3, 4), (2, 3, 4, 7)), (((3,), (2,)), ((0, 2), (0, 1)))
    left, right = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))

    def product(left, right):
        return jax.lax.dot_general(left, right, numbers)

    swapped = with_swapped_products(product)
    np.testing.assert_allclose(swapped(left, right), product(left, right), rtol=1e-12)
    read = dict(operations(jax.make_jaxpr(swapped)(left, right).jaxpr))["dot_general"]
    assert read == shapes[is_swapped]


def test_a_product_whose_operands_differ_in_precision_stays():
    precision = jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT

    def transposed(x, y):
        return jnp.tensordot(x, y, ((0, 1), (0, 1)), precision=precision).T

    a, b = jnp.ones((4, 5, 3)), jnp.ones((4, 5, 2))
    for expected, function in ((1, transposed), (0, lambda x, y: jnp.tensordot(x, y, ((0, 1), (0, 1))).T)):
        found = operations(jax.make_jaxpr(with_swapped_products(function))(a, b).jaxpr)
        assert sum(name == "transpose" for name, _ in found) == expected


def test_a_product_that_something_else_reads_stays(float64):
    def both(w, x):
        product = jnp.einsum("bsw,bsv->wv", x, w)
        return product + product.T, product[0]

    w, x = jnp.arange(24.0).reshape(2, 3, 4), jnp.ones((2, 3, 4))
    for found, expected in zip(with_swapped_products(both)(w, x), both(w, x), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("schedule", ["pipedream_flush", "zb_h1"])
def test_programs_of_stages_sum_over_the_first_dims_of_no_two_operands(schedule):
    def init(key, x):
        return {"w": jax.random.normal(key, (6, 6))}, {}

    stack = LayerStack({name: Layer(init, lambda p, state, x, key, train: (jnp.tanh(x @ p["w"]), state)) for name in "abcd"})
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, schedule, 2), models.squares, optax.sgd(0.1))
    x = jnp.ones((4, 5, 6))
    pipe.init(jax.random.key(0), (x, x))
    for stage in pipe._executor.stages.values():
        for name, program in stage.calls.items():
            if "backward" in name:
                text = program.as_text()
                assert " dot(" in text, name
                assert "lhs_contracting_dims={0}, rhs_contracting_dims={0}" not in text, name
