"""`Pipeline.predict` equals the whole model for any number of rows and does not disturb the run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe import InputError, LayerStack, Pipeline, Plan
from jpipe.runtime import _executor
from tests.jpipe import models, running

PLANS = {
    "stashing": {"num_stages": 3, "schedule": "pipedream", "microbatches": 2},
    "2bw, replicas": {"num_stages": 2, "schedule": "pipedream_2bw", "microbatches": 6, "replicas": (2, 3)},
    "flush, mesh": {"num_stages": 2, "schedule": "pipedream_flush", "microbatches": 2, "mesh": {"data": 2}},
    "chunks": {"num_stages": 4, "schedule": "interleaved_1f1b", "microbatches": 4, "chunks_per_rank": 2},
}
ROWS = 4


def split(x):
    """Return a pytree of outputs with several dtypes."""
    return {"values": x, "which": (jnp.argmax(x, -1), x > 0)}


def loss(y, labels):
    return jnp.square(y["values"] - labels).sum(), labels.size


STACK = LayerStack({**models.wide_stack().layers, "split": split})


def whole(pipe, state, x):
    """Apply the layers one after the other, with the layer state of the last replica."""
    params, layer_state = models.on_first_device((pipe.params(state), running.layer_state(state)))
    return STACK.apply(STACK.ids, params, layer_state, x, key=None, microbatch=None, train=False)[0]


@pytest.mark.slow
@pytest.mark.oldest
@pytest.mark.usefixtures("float64")
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("plan", PLANS)
def test_predictions_are_the_outputs_of_the_whole_model(plan):
    plan = Plan.even(STACK.ids, **PLANS[plan])
    pipe, random = Pipeline(STACK, plan, loss, models.momentum(), ema_decay=0.5), np.random.default_rng(0)
    batches = [tuple(random.normal(size=(2, ROWS * plan.microbatches, 4))) for _ in range(4)]
    state, without = (pipe.init(jax.random.key(0), batches[0]) for _ in range(2))
    x = random.normal(size=(3 * ROWS + 1, 4))
    for batch in batches:
        state, _ = pipe.step(state, batch)
        without, _ = pipe.step(without, batch)
        predictions = {rows: pipe.predict(state, x[:rows]) for rows in (len(x), ROWS, 1)}
        for rows, prediction in predictions.items():
            for one, other in zip(jax.tree.leaves(prediction), jax.tree.leaves(predictions[len(x)]), strict=True):
                assert one.tobytes() == other[:rows].tobytes()
    state, without = pipe.drain(state), pipe.drain(without)
    for one, other in zip(jax.tree.leaves(pipe.params(state)), jax.tree.leaves(pipe.params(without)), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), "the run goes on as without predictions"
    predictions, expected = pipe.predict(state, (x, None)), whole(pipe, state, x)
    assert jax.tree.structure(predictions) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(predictions), jax.tree.leaves(expected), strict=True):
        assert isinstance(one, np.ndarray)
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, np.asarray(other), rtol=1e-12)
    averaged = pipe.predict(state, x, weights="ema")["values"]
    assert not np.allclose(averaged, predictions["values"])


def test_predictions_read_no_labels_run_no_loss_and_take_any_rows_and_buckets(monkeypatch):
    calls = []

    def counted(y, labels):
        calls.append(labels.shape)
        return models.squares(y, labels)

    def doubled(x):
        return 2 * x["numbers"].mean(1)

    stack = LayerStack({"mean": doubled, "tanh": jnp.tanh})
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", 2), counted, optax.sgd(0.1))
    short, long = (({"numbers": np.ones((4, length), np.float32)}, np.zeros(4, np.float32)) for length in (3, 5))
    state = pipe.init(jax.random.key(0), long, buckets=[short])
    calls.clear()
    monkeypatch.setattr(_executor, "_FILLS", 1)  # the outputs are taken in three parts
    for length in (3, 5):
        x = np.random.default_rng(0).normal(size=(9, length)).astype(np.float32)
        np.testing.assert_allclose(pipe.predict(state, {"numbers": x}), np.tanh(2 * x.mean(1)), rtol=1e-6)
    assert pipe.predict(state, {"numbers": np.ones((0, 3), np.float32)}).shape == (0,)
    assert calls == []


def test_rows_that_fill_up_a_microbatch_are_real():
    """A user's check of values in the last layers must not see zeros."""
    seen = []

    def positive(x):
        jax.debug.callback(lambda value: seen.append(float(value)), x.min())
        return x

    stack = LayerStack({"positive": positive, "log": jnp.log})
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", 1), models.squares, optax.sgd(0.1))
    x = np.arange(1.0, 6.0, dtype=np.float32)[:, None]
    state = pipe.init(jax.random.key(0), (x[:4], x[:4]))
    np.testing.assert_allclose(pipe.predict(state, x), np.log(x))
    jax.effects_barrier()
    assert seen == [1.0, 5.0]


def test_inputs_that_cannot_be_predicted_are_refused():
    stack = LayerStack({"in": models.dense(), "out": lambda x: {"rows": x, "sum": x.sum()}})
    pipe = Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", 2), lambda y, labels: (y["sum"], 1.0), optax.sgd(0.1))
    x = np.ones((4, 3), np.float32)
    state = pipe.init(jax.random.key(0), (x, x))
    with pytest.raises(
        InputError, match=r"^predict: expected every output of layer 'out' .* found float32\[\] at \['sum'\]; return one row"
    ):
        pipe.predict(state, x)
    with pytest.raises(
        InputError, match=r"^predict: expected inputs like the shape given to init, float32\[2, 3\] for a microbatch, found float32\[4, 2\]"
    ):
        pipe.predict(state, x[:, :2])
    with pytest.raises(InputError, match=r"^predict: expected arrays with the same number of rows"):
        pipe.predict(state, np.float32(1))
    with pytest.raises(InputError, match=r"^to: expected 'all' or 'first', found 'second'$"):
        jpipe._arguments.check_to("second")
    with pytest.raises(InputError, match=r"^weights: this pipeline keeps no average"):
        pipe.predict(state, x, weights="ema")
    pipe.step(state, (x, x))
    with pytest.raises(InputError, match="state"):
        pipe.predict(state, x)
