"""Layers and losses that combine several rows are detected and reported once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jpipe
from jpipe.model.jaxprs import _rows
from tests.jpipe import models

D = 8
ROWS = np.zeros((4, D), np.float32)
SEQUENCES = np.zeros((4, 5, D), np.float32)
NUMBERS = np.zeros(4, np.int32)


def squares(outputs, labels):
    return ((outputs - labels) ** 2).sum(), labels.size


def rows_together(layers, loss=squares, inputs=ROWS, labels=None):
    stack = jpipe.LayerStack(layers)
    specs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), inputs if labels is None else labels)
    return _rows.rows_together(stack, stack.specs(inputs), specs, loss)


class LinenNorm(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        return linen.BatchNorm(use_running_average=not train)(x)


def swap(x):
    return x.swapaxes(0, 1)


def in_turns(x):
    return jax.lax.scan(lambda carry, row: (carry, row * 2), jnp.zeros(()), x)[1]


TOGETHER = {
    "NNX BatchNorm": lambda rngs: nnx.BatchNorm(D, rngs=rngs),
    "Linen BatchNorm": LinenNorm(),
    "mean of the rows": lambda x: x - x.mean(0, keepdims=True),
    "attention over rows": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "running sum over rows": lambda x: jnp.cumsum(x, axis=0),
    "state": models.tracking(D),
}
APART = {
    "frozen BatchNorm": ({"x": lambda rngs: nnx.BatchNorm(D, use_running_average=True, rngs=rngs)}, ROWS),
    "LayerNorm and dropout": (
        {"n": lambda rngs: nnx.LayerNorm(D, rngs=rngs), "d": lambda rngs: nnx.Dropout(0.5, rngs=rngs), "x": in_turns},
        ROWS,
    ),
    "attention": ({"x": lambda rngs: nnx.MultiHeadAttention(2, D, rngs=rngs)}, SEQUENCES),
    "convolution": (
        {"c": lambda rngs: nnx.Conv(D, D, (3,), rngs=rngs), "x": lambda rngs: nnx.GroupNorm(D, num_groups=2, rngs=rngs)},
        SEQUENCES,
    ),
    "recurrent": ({"x": lambda rngs: nnx.RNN(nnx.SimpleCell(D, D, rngs=rngs))}, SEQUENCES),
    "recurrent, time first": (
        {"s": swap, "x": lambda rngs: nnx.RNN(nnx.SimpleCell(D, D, rngs=rngs), time_major=True), "t": swap},
        SEQUENCES,
    ),
    "one number of rows only": ({"x": lambda x: x.reshape(4, 2, -1).reshape(4, -1)}, ROWS),
}


@pytest.mark.parametrize("layer", TOGETHER.values(), ids=TOGETHER)
def test_layers_that_mix_rows_are_found(layer):
    assert rows_together({"first": lambda x: x * 2, "x": layer}) == (["x"], False)


@pytest.mark.parametrize(("layers", "inputs"), APART.values(), ids=APART)
def test_layers_with_independent_rows_are_not_reported(layers, inputs):
    assert rows_together(layers, inputs=inputs) == ([], False)


def info_nce(outputs, labels):
    unit = outputs / jnp.linalg.norm(outputs, axis=-1, keepdims=True)
    return optax.softmax_cross_entropy_with_integer_labels(unit @ unit.T, jnp.arange(len(unit))).sum(), len(unit)


def triplet(outputs, labels):
    negatives = jnp.roll(outputs, 1, axis=0)
    return jnp.maximum(0, ((outputs - labels) ** 2).sum(-1) - ((negatives - labels) ** 2).sum(-1)).sum(), len(outputs)


def root(outputs, labels):
    return jnp.sqrt(((outputs - labels) ** 2).mean()) * len(outputs), len(outputs)


def of_mean(outputs, labels):
    return ((outputs - labels) ** 2).mean() * outputs.size, outputs.size


def masked(outputs, labels):
    known = labels > 0
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, labels) * known
    return losses.sum() / jnp.maximum(known.sum(), 1), known.sum()


def row_by_row(outputs, labels):
    return jax.lax.scan(lambda total, pair: (total + optax.l2_loss(*pair).sum(), None), 0.0, (outputs, labels))[0], len(outputs)


@pytest.mark.parametrize(("loss", "together"), [(info_nce, True), (triplet, True), (root, True), (squares, False), (of_mean, False)])
def test_losses_over_pairs_of_rows_are_found(loss, together):
    assert rows_together({"x": lambda x: x * 2}, loss) == ([], together)


def test_sums_over_rows_are_not_reported():
    assert rows_together({"x": lambda x: x * 2}, masked, labels=NUMBERS) == ([], False)
    assert rows_together({"x": lambda x: x * 2}, row_by_row) == ([], False)


def test_init_warns_about_layers_with_rows_together_once(caplog):
    _rows._warn_once.cache_clear()
    stack = jpipe.LayerStack({"norm": lambda x: x - x.mean(0, keepdims=True), "other": models.dense()})
    pipe = jpipe.Pipeline(stack, jpipe.Plan.even(stack.ids, 1, "gpipe", 2), root, optax.sgd(0.1))
    batch = models.batches_of(1, models.ROWS * 2)[0]
    for _ in range(2):
        pipe.init(jax.random.key(0), batch)
    sees = "sees the 2 rows of a microbatch, not the 4 of a batch"
    assert [record.name for record in caplog.records] == ["jpipe", "jpipe"]
    layer, loss = caplog.messages
    assert layer == f"layer 'norm': the rows of a microbatch are computed together, as in batch normalization: such a layer {sees}"
    assert loss == f"loss: it is more than a sum over rows, as a loss over pairs of rows is: it {sees}"
    whole = jpipe.Pipeline(stack, jpipe.Plan.even(stack.ids, 1, "gpipe", 1), root, optax.sgd(0.1))
    whole.init(jax.random.key(0), batch)
    assert len(caplog.records) == 2
