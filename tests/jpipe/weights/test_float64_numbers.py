"""In float64 a pipeline equals, up to rounding, the rule of its schedule applied with one gradient of the whole model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jpipe import Layer, LayerStack, Pipeline, Plan
from tests.jpipe import models
from tests.jpipe.running import check_close, train, train_as_one_function

pytestmark = pytest.mark.usefixtures("float64")

STACK = models.rich_stack()


def check_against_one_function(plan, *, stack=STACK, loss=models.masked_squares, optimizer=None, batches=None):
    batches = batches or models.masked_batches(7, plan.microbatches, dtype=np.float64)
    pipe = Pipeline(stack, plan, loss, optimizer or models.momentum())
    actual, expected = train(pipe, batches), train_as_one_function(pipe, batches)
    check_close(actual, expected)
    return actual


@pytest.mark.thinned(most=2)
@pytest.mark.parametrize(
    ("variant", "d", "m", "extra"),
    [(variant, 3, 4, 0) for variant in models.VARIANTS]
    + [
        ("gpipe", 4, 1, 0),
        ("pipedream_flush", 2, 3, 0),
        ("pipedream", 4, 1, 0),
        ("pipedream", 4, 2, 0),
        ("pipedream", 3, 2, 1),
        ("pipedream_vertical_sync", 4, 1, 0),
        ("pipedream_vertical_sync", 3, 3, 1),
        ("pipedream_2bw", 3, 4, 1),
    ],
)
def test_equals_one_gradient_of_the_whole_model(variant, d, m, extra):
    check_against_one_function(Plan.even(STACK.ids, d, microbatches=m, extra_in_flight=extra, **models.VARIANTS[variant]))


def decayed(params):
    """Return a weight decay mask that is true for the matrices of two layers."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key in ("noise", "out") and path[1].key == "w", params)


OPTIMIZERS = {  # each made once, so that what is traced with it is traced once
    "adam_with_schedule": functools.cache(lambda: optax.adam(optax.linear_schedule(0.05, 0.001, 5))),
    "adamw_with_mask": functools.cache(
        lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.05, 2, 6), weight_decay=0.3, mask=decayed)
    ),
    "clipped_by_value": functools.cache(lambda: optax.chain(optax.clip(0.02), optax.sgd(0.1, momentum=0.9, nesterov=True))),
}


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("variant", models.VARIANTS)
def test_optimizers_by_layer_equal_optax_on_the_whole_tree(variant, optimizer):
    plan = Plan.even(STACK.ids, 3, microbatches=3, **models.VARIANTS[variant])
    check_against_one_function(plan, optimizer=OPTIMIZERS[optimizer]())


@pytest.mark.slow
def test_the_decay_mask_decays_what_it_names_only():
    plan = Plan.even(STACK.ids, 2, "gpipe", 2)
    batch, labels = models.masked_batches(1, 2, dtype=np.float64)[0]
    unweighted = (batch, labels | {"mask": np.zeros_like(labels["mask"])})  # no gradient: only decay is left
    pipe = Pipeline(STACK, plan, models.masked_squares, optax.adamw(0.1, weight_decay=0.5, mask=decayed))
    before = pipe.params(pipe.init(jax.random.key(11), unweighted))
    after = train(pipe, [unweighted]).params
    for layer_id in STACK.ids:
        factor = 1 - 0.1 * 0.5 if layer_id in ("noise", "out") else 1.0
        check_close(after[layer_id]["w"], before[layer_id]["w"] * factor)
        check_close(after[layer_id]["b"], before[layer_id]["b"])


@pytest.mark.parametrize("variant", models.VARIANTS)
def test_microbatches_and_batches_of_weight_zero_teach_nothing(variant):
    m = 4
    batches = models.masked_batches(6, m, dtype=np.float64)
    batches[1][1]["mask"][: models.ROWS] = 0.0  # the first microbatch of batch 1
    batches[2][1]["mask"][-models.ROWS :] = 0.0  # the last one of batch 2
    batches[3][1]["mask"][:] = 0.0  # all of batch 3
    result = check_against_one_function(Plan.even(STACK.ids, 3, microbatches=m, **models.VARIANTS[variant]), batches=batches)
    assert result.losses[3] == 0.0
    assert np.isfinite(result.losses).all()


@pytest.mark.slow
def test_a_batch_divides_by_its_total_weight():
    """A microbatch of weight 6 and one of weight 2 give the gradient of their eight rows together."""
    stack = models.plain_stack()
    batches = models.masked_batches(3, 2, rows=4, dtype=np.float64)
    for _, labels in batches:
        labels["mask"][:] = [2, 2, 1, 1, 0, 0, 1, 1]
    together, apart = (
        train(Pipeline(stack, Plan.even(stack.ids, 2, "gpipe", m), models.masked_squares, models.momentum()), batches) for m in (1, 2)
    )
    check_close(apart, together)


def embed() -> Layer:
    """Build a layer that maps token ids to vectors and passes on the ids and a copy of the vectors."""

    def apply(params, state, x, key, train):
        vectors = params["table"][x["ids"]]
        return {"x": vectors, "skip": (vectors, x["scale"]), "ids": x["ids"]}, state

    return Layer(lambda key, x: ({"table": jax.random.normal(key, (5, 3), jnp.float64)}, {}), apply)


def residual() -> Layer:
    """Return a layer that adds a dense layer's output to its input and passes on all other leaves."""
    inner = models.dense()
    return Layer(
        lambda key, x: inner.init(key, x["x"]),
        lambda params, state, x, key, train: (x | {"x": x["x"] + inner.apply(params, state, x["x"], key, train)[0]}, state),
    )


def merge(x):
    """Add the scaled skip connection and multiply by one plus the integer leaf."""
    skip, scale = x["skip"]
    return (x["x"] + skip * scale[:, None]) * (1 + x["ids"].astype(skip.dtype))[:, None]


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("variant", ["pipedream_2bw", pytest.param("pipedream", marks=pytest.mark.oldest), "pipedream_flush"])
def test_pytrees_with_an_integer_leaf_and_a_skip_connection(variant, recompute):
    stack = LayerStack({"embed": embed(), "first": residual(), "second": residual(), "merge": merge, "out": models.dense()})
    rng = np.random.default_rng(3)
    batches = [({"ids": rng.integers(0, 5, 8), "scale": rng.normal(size=8)}, rng.normal(size=(8, 3))) for _ in range(5)]
    plan = models.cut(stack.ids, (1, 1, 2, 1), microbatches=4, recompute=recompute, **models.VARIANTS[variant])
    check_against_one_function(plan, stack=stack, loss=models.squares, batches=batches)


@pytest.mark.oldest
@pytest.mark.parametrize("variant", ["pipedream_flush", "pipedream", "pipedream_2bw"])
def test_three_stages_equal_one_gradient(variant):
    check_against_one_function(Plan.even(STACK.ids, 3, microbatches=3, **models.VARIANTS[variant]))
