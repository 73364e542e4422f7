"""Shared parameters in float32 and bfloat16, where programs that differ round differently."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import Layer, LayerStack, Pipeline, Plan, Precision, Tie
from jpipe.runtime import masters_in
from jpipe.runtime._plain import to_plain
from tests.jpipe import running
from tests.jpipe.running import check_equal

WORDS, WIDTH, M = 8, 4, 4


def table(key, x):
    return {"table": jax.random.normal(key, (WORDS, WIDTH))}, {}


def table_and_bias(key, x):
    return table(key, x)[0] | {"bias": jnp.zeros((WORDS,))}, {}


STACK = LayerStack(
    {
        "embed": Layer(table, lambda params, state, x, key, train: (params["table"][x], state)),
        "between": Layer(
            lambda key, x: ({"kernel": jax.random.normal(key, (WIDTH, WIDTH)) / 4}, {}),
            lambda params, state, x, key, train: (jax.nn.gelu(x @ params["kernel"]), state),
        ),
        "again": Layer(table, lambda params, state, x, key, train: (x + jax.nn.softmax(x @ params["table"].T) @ params["table"], state)),
        "head": Layer(table_and_bias, lambda params, state, x, key, train: (x @ params["table"].T + params["bias"][None, None], state)),
    },
    ties=[Tie(("embed", "table"), ("again", "table")), Tie(("embed", "table"), ("head", "table"))],
)
TABLE = "embed shared table"


def loss(y, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(y, labels)
    return losses.sum(), losses.size


def data(batches):
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(0, WORDS, (2, 2 * M, 5)).astype(np.int32)) for _ in range(batches)]


def pipeline(num_stages, schedule, optimizer, devices, **options) -> Pipeline:
    return Pipeline(STACK, Plan.even(STACK.ids, num_stages, schedule, M), loss, optimizer, devices, **options)


def trained(num_stages, schedule, optimizer, batches, **options):
    """Train and return (pipeline, state after a drain)."""
    pipe = pipeline(num_stages, schedule, optimizer, jax.devices()[:1] * num_stages, **options)
    state = pipe.init(jax.random.key(0), data(1)[0])
    for batch in data(batches):
        state, _ = pipe.step(state, batch)
    return pipe, pipe.drain(state)


@pytest.mark.parametrize(
    ("stages", "schedule", "options"),
    [
        pytest.param(4, "pipedream_2bw", {"clip_global_norm": 0.3}, marks=pytest.mark.slow),
        pytest.param(4, "pipedream_flush", {}, marks=pytest.mark.exhaustive),
        pytest.param(2, "pipedream_2bw", {}, marks=pytest.mark.exhaustive),
    ],
)
def test_equals_the_reference_bit_for_bit(stages, schedule, options):
    """The gradients of several stages are added in the order of the stages; the loss, the weights and the norm show it."""
    plan = Plan.even(STACK.ids, stages, schedule, M)
    running.check_against_reference(STACK, plan, {3}, data(running.REFERENCE_BATCHES), optax.adam(0.05), loss, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "optimizer", "options"),
    [
        ("pipedream_2bw", optax.adamw(0.1), {"clip_global_norm": 0.3}),
        pytest.param("gpipe", optax.sgd(0.3, 0.9), {}, marks=pytest.mark.exhaustive),
        pytest.param("pipedream_2bw", optax.lamb(0.05), {"skip_nonfinite": True, "ema_decay": 0.9}, marks=pytest.mark.exhaustive),
        pytest.param("pipedream_2bw", optax.adam(0.05), {"precision": Precision(params="bfloat16")}, marks=pytest.mark.exhaustive),
    ],
    ids=["adamw", "sgd", "lamb", "masters"],
)
def test_the_copies_of_three_stages_are_the_same_bits(schedule, optimizer, options):
    """One of the stages holds only the copy, so that the remaining update is another program."""
    _, state = trained(4, schedule, optimizer, 12, **options)
    copies = [(worker.weights, worker.optimizer[TABLE]) for worker in state.workers if TABLE in worker.optimizer]
    first, *remaining = (({version: weights.read(version)[TABLE] for version in weights.versions}, state) for weights, state in copies)
    assert len(remaining) == 2
    for copy in remaining:
        check_equal(copy, first)


@pytest.mark.exhaustive
def test_masters_and_averages_are_restored_where_stages_of_several_devices_are_joined():
    """New optimizer state starts with the masters, also for parameters that are one array, such as shared ones."""
    options = {"precision": Precision(params="bfloat16"), "ema_decay": 0.5}
    pipe, one = (pipeline(d, "pipedream_2bw", optax.adam(0.05), jax.devices()[:d], **options) for d in (4, 1))
    state, cut = pipe.init(jax.random.key(0), data(1)[0]), pipe.snapshot(2)
    for batch in data(3):
        state, _ = pipe.step(state, batch, observe=cut)
    layers = cut.layers()
    state = one.restore(jax.random.key(0), data(1)[0], layers, 2, fresh_optimizer=True)
    for entry, optimizer_state in state.workers[0].optimizer.items():
        check_equal(to_plain(optimizer_state.masters), masters_in(layers[entry]) or {})
    check_equal(one.params(state, weights="ema"), one.params(state))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(one.params(state, weights="ema"))} == {"float32"}
    losses = [float(one.evaluate(state, data(1)[0], weights=weights).loss) for weights in ("ema", "newest")]
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_gradients_of_places_in_one_stage_are_summed_in_float32():
    """A sum in bfloat16 would have an error of up to 1/256, which places in several stages do not have."""
    masters = Precision(params="bfloat16")
    results = [trained(num_stages, "gpipe", optax.sgd(1.0), 1, precision=masters) for num_stages in (1, 4)]
    tables = [np.asarray(pipe.params(state)["embed"]["table"]) for pipe, state in results]
    np.testing.assert_allclose(*tables, rtol=0, atol=1e-6)
    assert jnp.float32 == tables[0].dtype
