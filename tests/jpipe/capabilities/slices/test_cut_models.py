"""Models that were cut into layers run in slices if no layer mixes positions without a carry."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import InputError, LayerStack, Pipeline, Plan
from jpipe.context import traced_positions
from tests.jpipe.running import check_close

LENGTH, WIDTH = 8, 3
BATCH = np.random.default_rng(0).normal(size=(2, LENGTH, WIDTH)).astype(np.float32), np.ones((2, LENGTH, WIDTH), np.float32)
PARAMS = [{"w": jnp.eye(WIDTH) + 0.1 * n} for n in range(3)]


def apart(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["w"])
    return x


def summed(params, x):
    """Return the outputs of a model in which only the middle layer adds up the positions so far."""
    for n, layer in enumerate(params):
        x = jnp.tanh(x @ layer["w"])
        x = jnp.cumsum(x, 1) if n == 1 else x
    return x


def numbered(params, x):
    """Return the outputs of a model in which only the last layer adds the numbers of positions."""
    at = traced_positions()
    number = jnp.arange(x.shape[1], dtype=x.dtype) + (0 if at is None else at.start)
    return apart(params, x) + 0.1 * number[None, :, None]


@jax.jit
def plus_numbers(x):
    at = traced_positions()
    return x + 0.1 * (jnp.arange(x.shape[1], dtype=x.dtype) + (0 if at is None else at.start))[None, :, None]


def compiled(params, x):
    """Return the outputs of a model that adds the numbers of positions in a function that is compiled by itself."""
    return apart(params, plus_numbers(x))


def from_table(params, x):
    """Return the outputs of a model that adds a vector for each position, and so accepts only whole rows and their slices."""
    at, table = traced_positions(), jnp.sin(jnp.arange(LENGTH, dtype=x.dtype))[None, :, None]
    return apart(params, x + (table if at is None else table[:, at.start : at.stop]))


def loss(y, labels):
    return jnp.square(y - labels).sum(), jnp.float32(labels.size)


def trained(stack, slices=None):
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "pipedream_flush", 2, slices=slices), loss, optax.sgd(0.1), devices=jax.devices()[:2])
    state, metrics = pipe.step(pipe.init(jax.random.key(0), BATCH), BATCH)
    return pipe.params(state), [*metrics.losses.values()], pipe.evaluate(state, BATCH).loss


def cut(model):
    return LayerStack.from_function(model, PARAMS, jnp.ones((1, LENGTH, WIDTH)))


@pytest.mark.parametrize(
    ("model", "slices"),
    [(apart, (1, 7)), (numbered, (4, 4)), (compiled, (4, 4)), (from_table, (2, 6))],
    ids=["apart", "numbered", "compiled", "from a table"],
)
def test_models_without_mixed_positions_have_the_numbers_of_whole_rows(model, slices):
    """Slices of one length read other numbers of positions, so the model is traced for each of them."""
    check_close(trained(cut(model), slices), trained(cut(model)), 1e-6)


def test_a_layer_that_mixes_positions_is_named_and_may_get_a_carry():
    def carried(params, state, x, carry, key, train):
        sums = jnp.cumsum(jnp.tanh(x @ jax.tree.leaves(params)[0]), 1) + (0.0 if carry is None else carry)
        return sums, state, sums[:, -1:]

    stack = cut(summed)
    with pytest.raises(InputError, match=r"found layers that were cut from a model and mix positions: '1'; give"):
        trained(stack, 2)
    with_carry = stack.with_layers(stack.layers | {"1": replace(stack.layers["1"], carried=carried)})
    check_close(trained(with_carry, (2, 5, 1)), trained(stack), 1e-6)


def test_positions_that_a_model_counts_without_reading_them_are_refused():
    with pytest.raises(InputError, match=r"found layer '0', which counts positions without it"):
        trained(cut(lambda params, x: apart(params, x + jnp.arange(x.shape[1], dtype=x.dtype)[None, :, None])), 2)


def test_mixed_positions_are_found_where_a_microbatch_has_as_many_rows_as_positions():
    def table(x):
        return x + jnp.sin(jnp.arange(LENGTH, dtype=x.dtype))[None, :, None]  # it accepts only whole rows

    stack, x = LayerStack({"table": table, "mean": lambda x: x + x.mean(1, keepdims=True)}), np.ones((LENGTH, LENGTH, WIDTH), np.float32)
    pipe = Pipeline(stack, Plan.even(stack.ids, 1, "gpipe", 1, slices=2), loss, optax.sgd(0.1))
    with pytest.raises(InputError, match=r"found layers that mix positions: 'mean'"):
        pipe.init(jax.random.key(0), (x, x))
