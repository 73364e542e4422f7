"""Layers and losses that combine several rows are detected and reported once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jpipe
from jpipe.model.jaxprs import _rows
from jpipe.model.jaxprs._origins import origin_of
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


def test_a_layer_that_fits_one_number_of_rows_is_followed_with_that():
    assert rows_together({"x": lambda x: x.reshape(2, 2, -1)[::-1].reshape(4, -1)}) == (["x"], False)


def test_rows_stay_known_where_they_are_another_dim():
    layers = {"time first": swap, "sum": lambda x: jnp.cumsum(x, 0), "rows": lambda x: jnp.cumsum(x, 1), "back": swap, "x": jnp.tanh}
    assert rows_together(layers, inputs=SEQUENCES) == (["rows"], False)


# Functions of an array of rows. Each is tried with other values in one row: do other rows of the result change?

INDEX = np.array([2, 0, 3, 1])
HALVES = np.array([0, 1, 0, 1])


def key_of(x):
    """Return a number of each row, 0 or 1."""
    return (x[:, 0] > 0).astype(int)


def halved_while(condition):
    return lambda x: jax.lax.while_loop(condition, lambda c: c / 2, x)


MIXING = {
    "index": lambda x: x[INDEX],
    "random index": lambda x: x[jax.random.randint(jax.random.key(1), (len(x),), 0, len(x))],
    "computed index": lambda x: x[(jnp.arange(len(x)) + 1) % len(x)],
    "first row": lambda x: x - x[:1],
    "dynamic index": lambda x: x * jax.lax.dynamic_index_in_dim(x, 1, 0),
    "dynamic slice": lambda x: x + jax.lax.dynamic_slice_in_dim(x, key_of(x)[0], 1, 0),
    "dynamic update": lambda x: jax.lax.dynamic_update_slice(x, x[:1], (1, 0)),
    "take": lambda x: jnp.take(x, INDEX, axis=0),
    "take along rows": lambda x: jnp.take_along_axis(x, jnp.argsort(x, 0), 0),
    "set": lambda x: x.at[1].set(x[2]),
    "add": lambda x: x.at[INDEX].add(x),
    "segment sum": lambda x: jax.ops.segment_sum(x, HALVES, num_segments=2)[HALVES],
    "segment sum by value": lambda x: jax.ops.segment_sum(x, key_of(x), num_segments=2)[key_of(x)],
    "segment max": lambda x: jax.ops.segment_max(x, HALVES, num_segments=4),
    "roll": lambda x: jnp.roll(x, 1, 0),
    "roll of all elements": lambda x: jnp.roll(x.reshape(-1), 1).reshape(x.shape),
    "flip": lambda x: x[::-1],
    "shifted": lambda x: jnp.concatenate([x[1:], jnp.zeros((1, x.shape[1]))]),
    "padded": lambda x: jnp.pad(x, ((1, 0), (0, 0)))[:-1],
    "difference": lambda x: jnp.diff(x, axis=0, prepend=0.0),
    "sort": lambda x: jnp.sort(x, 0),
    "argsort": lambda x: jnp.argsort(x, 0),
    "order of a key": lambda x: x[jnp.argsort(x[:, 0])],
    "top k": lambda x: jnp.where(x[:, :1] >= jax.lax.top_k(x[:, 0], 2)[0][-1], x, 0.0),
    "rank": lambda x: (x[:, :1] > x[:, 0]).sum(1),
    "cumsum": lambda x: jnp.cumsum(x, 0),
    "cumulative maximum": lambda x: jax.lax.cummax(x, 0, reverse=True),
    "associative scan": lambda x: jax.lax.associative_scan(jnp.multiply, x),
    "scan": lambda x: jax.lax.scan(lambda c, row: (c + row, c), jnp.zeros(x.shape[1]), x)[1],
    "loop": lambda x: jax.lax.fori_loop(1, len(x), lambda i, y: y.at[i].add(y[i - 1]), x),
    "while": halved_while(lambda c: (c > 0.1).any()),
    "branch": lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "map over pairs": lambda x: jax.lax.map(lambda i: x[i] - x[i - 1], jnp.arange(len(x))),
    "convolution": lambda x: jax.lax.conv_general_dilated(x.T[:, None], jnp.ones((1, 1, 3)), (1,), "SAME")[:, 0].T,
    "pooling": lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 1), (1, 1), "SAME"),
    "one-hot": lambda x: jax.nn.one_hot(INDEX, len(x)) @ x,
    "product": lambda x: jax.nn.softmax(x @ x.T) @ x,
    "distances": lambda x: jnp.abs(x[:, None] - x[None]).sum(1),
    "mean": lambda x: x - x.mean(0),
    "maximum": lambda x: x - x.max(),
    "any": lambda x: jnp.where((x > 1.5).any(0), x, 0.0),
    "argmax": lambda x: x + jnp.argmax(x, 0),
    "histogram": lambda x: x * jnp.bincount(key_of(x), length=2)[0],
    "median": lambda x: x - jnp.median(x, 0),
    "Fourier": lambda x: jnp.fft.fft(x, axis=0).real,
    "linear system": lambda x: jnp.linalg.solve(jnp.tril(jnp.ones((len(x), len(x)))), x),
    "orthogonal": lambda x: jnp.linalg.qr(x)[0],
    "transposed": lambda x: x.reshape(-1, len(x)).T.reshape(x.shape),
    "two views": lambda x: jnp.stack([x, x[::-1]], 1),
}
OF_ROWS = {
    "index": lambda x: x[jnp.arange(len(x))],
    "column of each row": lambda x: x[jnp.arange(len(x)), key_of(x)],
    "take along a row": lambda x: jnp.take_along_axis(x, jnp.argsort(x, -1), -1),
    "look-up": lambda x: jnp.arange(12.0).reshape(6, 2)[(x > 0).astype(int)],
    "set a column": lambda x: x.at[:, 0].set(x[:, 1]),
    "set a column of each row": lambda x: x.at[jnp.arange(len(x)), key_of(x)].set(0.0),
    "roll": lambda x: jnp.roll(x, 1, -1),
    "roll there and back": lambda x: jnp.roll(jnp.tanh(jnp.roll(x, 1, 0)), -1, 0),
    "flip": lambda x: x[:, ::-1],
    "sort": lambda x: jnp.sort(x, -1),
    "top k": lambda x: jax.lax.top_k(x, 2)[0],
    "cumsum": lambda x: jnp.cumsum(x, -1),
    "time first": lambda x: jax.lax.scan(lambda c, step: (c + step, c), jnp.zeros(len(x)), x.T)[1].T,
    "scan": lambda x: jax.lax.scan(lambda c, row: (c, row * c), 2.0, x)[1],
    "map": lambda x: jax.lax.map(lambda row: row / row.sum(), x),
    "loop": lambda x: jax.lax.fori_loop(0, len(x), lambda i, y: y.at[i].set(jnp.sin(x[i])), jnp.zeros_like(x)),
    "loop of updates": lambda x: jax.lax.fori_loop(
        0, len(x), lambda i, y: jax.lax.dynamic_update_slice(y, jax.lax.dynamic_slice_in_dim(x, i, 1) * 2, (i, 0)), x
    ),
    "update of one column": lambda x: jax.lax.dynamic_update_slice(x, x[:, :2], (0, 3)),
    "loop over time": lambda x: jax.lax.fori_loop(0, x.shape[1], lambda t, y: y.at[:, t].add(x[:, t]), x),
    "while": jax.vmap(halved_while(lambda c: (c > 0.1).any())),
    "branch": jax.vmap(lambda row: jax.lax.cond(row[0] > 0, jnp.sin, jnp.cos, row)),
    "dynamic slice": jax.vmap(lambda row: jax.lax.dynamic_slice(row, ((row[0] > 0).astype(int),), (2,))),
    "dynamic update": jax.vmap(lambda row: jax.lax.dynamic_update_slice(row, row[:2], ((row[0] > 0).astype(int),))),
    "segment sum": jax.vmap(lambda row: jax.ops.segment_sum(row, (row > 0).astype(int), num_segments=2)),
    "convolution": jax.vmap(lambda row: jnp.convolve(row, row)),
    "pooling": lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2), (1, 2), "SAME"),
    "Fourier": lambda x: jnp.fft.fft(x).real,
    "factors": jax.vmap(lambda row: jnp.linalg.cholesky(jnp.outer(row, row) + jnp.eye(len(row)))),
    "attention": lambda x: jax.nn.softmax(x[:, :, None] * x[:, None, :], -1) @ x[..., None],
    "experts": lambda x: jnp.einsum("be,bd,edf->bf", jax.nn.one_hot(jax.lax.top_k(x, 1)[1][:, 0], D), x, jnp.ones((D, D, 3))),
    "weights by value": lambda x: jnp.einsum("bd,bdf->bf", x, jnp.arange(2.0 * D * 3).reshape(2, D, 3)[key_of(x)]),
    "flat": lambda x: jnp.tanh(x.reshape(-1)).reshape(x.shape),
    "tiled": lambda x: sum(jnp.split(jnp.concatenate([x, jnp.tile(x, (2, 1))]), 3)),
    "one by one": lambda x: jnp.stack([row * 2 for row in x]),
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 2))),
    "with a constant": lambda x: jnp.concatenate([jnp.ones((len(x), 1)), x], 1),
    "mask": lambda x: jnp.where(jnp.arange(x.shape[1]) < key_of(x)[:, None], x, 0.0),
    "every other row": lambda x: jnp.where((jnp.arange(len(x)) % 2 == 0)[:, None], x, -x),
    "mean": lambda x: x - x.mean(-1, keepdims=True),
}


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(("functions", "mixes"), [(MIXING, True), (OF_ROWS, False)], ids=["mixing", "of rows"])
def test_rows_depend_on_other_rows_where_other_values_show_it(functions, mixes):
    random, count = np.random.default_rng(0), 4
    x = random.normal(size=(count, D)).astype(np.float32)
    compute = jax.jit(lambda x: {name: function(x) for name, function in functions.items()})
    results, expected = compute(x), dict.fromkeys(functions, mixes)
    changes = dict.fromkeys(functions, False)
    for row in np.repeat(np.arange(count), 5):
        changed = compute(np.where(np.arange(count)[:, None] == row, 3 * random.normal(size=(count, D)).astype(np.float32), x))
        for name, result in results.items():
            changes[name] |= bool((np.delete(result, row, 0) != np.delete(changed[name], row, 0)).any())
    assert changes == expected
    found = {}
    for name, function in functions.items():
        traced = jax.make_jaxpr(function)(x)
        (origin,) = _rows.follow(traced.jaxpr, traced.consts, [origin_of(x.shape, 0)])
        found[name] = not origin.is_apart(count)
    assert found == expected


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


LOSSES = {
    "pairs": (info_nce, True),
    "negatives of a neighbour": (triplet, True),
    "labels of a neighbour": (lambda y, labels: (((jnp.roll(y, 1, 0) - labels) ** 2).sum(), 1), True),
    "differences": (lambda y, labels: ((y[1:] - y[:-1]).clip(0).sum(), 1), True),
    "hardest": (lambda y, labels: (jax.lax.top_k(((y - labels) ** 2).sum(-1), 1)[0].sum(), 1), True),
    "root": (root, True),
    "variance": (lambda y, labels: (y.var(0).sum(), 1), True),
    "normalized": (lambda y, labels: (jnp.tanh(y / y.sum()).sum(), 1), True),
    "squares": (squares, False),
    "mean": (of_mean, False),
    "row by row": (row_by_row, False),
    "of other order": (lambda y, labels: ((y[::-1] ** 2).sum() + jnp.cumsum(y, 0)[-1].sum(), 1), False),
    "of groups": (lambda y, labels: (jax.ops.segment_sum(y**2, HALVES[: len(y)], num_segments=2).sum(), 1), False),
}


@pytest.mark.usefixtures("lenient")
def test_losses_that_are_more_than_a_sum_over_rows_are_found():
    """A sum over rows is the sum of the losses of the halves of a batch."""
    y, labels = np.random.default_rng(0).normal(size=(2, 4, D)).astype(np.float32)
    compute = jax.jit(lambda y, labels: {name: loss(y, labels)[0] for name, (loss, _) in LOSSES.items()})
    whole, *halves = (compute(y[rows], labels[rows]) for rows in (slice(4), slice(2), slice(2, 4)))
    assert {name: not np.isclose(whole[name], halves[0][name] + halves[1][name], rtol=1e-4) for name in LOSSES} == {
        name: together for name, (_, together) in LOSSES.items()
    }
    for name, (loss, together) in LOSSES.items():
        assert rows_together({"x": lambda x: x * 2}, loss) == ([], together), name


def test_sums_over_rows_are_not_reported():
    assert rows_together({"x": lambda x: x * 2}, masked, labels=NUMBERS) == ([], False)


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
