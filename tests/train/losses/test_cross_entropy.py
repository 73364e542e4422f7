"""Logits in chunks: the loss and gradients of all logits, in every schedule, without storing all of them."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jpipe
from jpipe.stages import StandaloneStage
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_train.losses.cross_entropy import Unprojected, all_logits, correct, loss, vocab_size
from tests.lm.models.running import SMALL, trained

ROWS, POSITIONS, WIDTH, SYMBOLS = 2, 5, 4, 11


def parts(dtype="float32", by_symbol=False, bias=False):
    """Return arrays for an `Unprojected`, and labels, of which some are not counted."""
    keys = jax.random.split(jax.random.key(0), 4)
    hidden, kernel = jax.random.normal(keys[0], (ROWS, POSITIONS, WIDTH), dtype), jax.random.normal(keys[1], (WIDTH, SYMBOLS), dtype)
    labels = jax.random.randint(keys[2], (ROWS, POSITIONS), 0, SYMBOLS, "int32").at[0, 1:3].set(jnp.asarray([-1, -100], "int32"))
    return hidden, kernel.T if by_symbol else kernel, jax.random.normal(keys[3], (SYMBOLS,), dtype) if bias else None, labels


def in_chunks(chunk, by_symbol, dtype="float32"):
    return lambda hidden, kernel, bias: Unprojected(hidden, kernel, bias, chunk, by_symbol, dtype)


def by_hand(hidden, kernel, bias, labels, by_symbol):
    """Compute the sum over counted labels of minus the log of the probability, with NumPy."""
    logits = np.asarray(hidden) @ np.asarray(kernel.T if by_symbol else kernel) + (0 if bias is None else np.asarray(bias))
    nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
    return nats[labels >= 0].sum()


@pytest.mark.thinned(size=1)
@pytest.mark.parametrize("chunk", [1, 3, 5, 10, 1000])
@pytest.mark.parametrize("by_symbol", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_chunks_give_the_loss_and_gradients_of_all_logits_at_once(chunk, by_symbol, bias):
    with jax.enable_x64(True):
        *arrays, labels = parts("float64", by_symbol, bias)
        make = in_chunks(chunk, by_symbol, "float64")
        total, weight = loss(make(*arrays), labels)
        assert int(weight) == 8
        np.testing.assert_allclose(total, by_hand(*arrays, np.asarray(labels), by_symbol), rtol=1e-13)
        argnums = tuple(range(3 if bias else 2))
        actual = jax.jit(jax.grad(lambda *arrays: 3 * loss(make(*arrays), labels)[0], argnums))(*arrays)
        expected = jax.jit(jax.grad(lambda *arrays: 3 * loss(make(*arrays).logits(), labels)[0], argnums))(*arrays)
        for one, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


def test_labels_below_zero_are_not_counted_by_plain_logits_either():
    logits = jnp.zeros((2, 3, 256)).at[0, 0, 7].set(100.0)
    labels = jnp.full((2, 3), 7, jnp.int32)
    np.testing.assert_allclose(loss(logits, labels), (5 * np.log(256), 6), rtol=1e-6)
    np.testing.assert_allclose(loss(logits, labels.at[1].set(-1)), (2 * np.log(256), 3), rtol=1e-6)
    assert loss(logits, jnp.full_like(labels, -1)) == (0, 0)


def test_the_gradient_of_a_kernel_is_summed_in_float32():
    """A bfloat16 sum over a thousand chunks would stop growing."""
    hidden, labels = jnp.ones((1, 1000, 2), jnp.bfloat16), jnp.zeros((1, 1000), jnp.int32)
    kernel = jnp.zeros((2, 2), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        gradient = jax.grad(lambda kernel: loss(Unprojected(hidden, kernel, None, 1, False, "bfloat16"), labels)[0])(kernel)
    np.testing.assert_allclose(gradient, 500 * np.asarray([[-1, 1], [-1, 1]]), rtol=4e-3)


def test_accuracy_is_that_of_all_logits():
    *arrays, labels = parts()
    outputs = in_chunks(3, False)(*arrays)
    labels = labels.at[1].set(outputs.logits().argmax(-1)[1].astype(jnp.int32))
    counts = tuple(map(int, correct(outputs, labels)))
    assert counts == tuple(map(int, correct(outputs.logits(), labels)))
    assert counts[0] >= 5
    assert counts[1] == 8
    assert vocab_size(outputs) == vocab_size(outputs.logits()) == SYMBOLS
    np.testing.assert_array_equal(all_logits({"tokens": outputs})["tokens"], outputs.logits())


# Memory ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 16])
def test_no_buffer_holds_the_logits_of_all_positions(chunk):
    positions, width, count = 64, 8, 500
    specs = jax.ShapeDtypeStruct((4, positions // 4, width), "float32"), jax.ShapeDtypeStruct((count, width), "float32")

    def total(hidden, kernel, labels):
        outputs = Unprojected(hidden, kernel, None, chunk or 1, True, "float32")
        return loss(outputs if chunk else outputs.logits(), labels)[0]

    compiled = jax.jit(jax.grad(total, (0, 1))).lower(*specs, jax.ShapeDtypeStruct((4, positions // 4), "int32")).compile()
    assert (largest_array(compiled) < positions * count) == (chunk is not None)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert (temporary < positions * count * 4) == (chunk is not None)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", pytest.param("full", marks=pytest.mark.exhaustive)])
def test_a_split_backward_stores_no_logits_between_its_halves(recompute):
    config, rows = ModelConfig(**SMALL, vocab_size=500, tied=True), 8
    labels = jax.ShapeDtypeStruct((rows, 8), "int32")
    stages = {}
    for chunk in (None, 16):
        stack = layers(config, chunk)
        specs = stack.specs(labels)
        optimizer = jpipe.model.LayerwiseOptimizer(optax.sgd(1.0))
        head = jpipe.Stage(layers=("head",), recompute=recompute)
        stages[chunk] = StandaloneStage(stack, head, {"head": specs["head"]}, labels, loss, optimizer)
    logits = rows * 8 * 500
    assert stages[16].stash_bytes < logits * 4  # the gradient of the kernel, and some of the size of activations
    assert stages[None].stash_bytes >= logits * 4
    for half in ("forward", "backward", "backward_input", "backward_weight"):
        compiled = stages[16].trace(half, jax.devices()[0]).lower().compile()
        assert largest_array(compiled) < logits


def largest_array(compiled) -> int:
    """Return the size of the largest array in a program."""
    shapes = re.findall(r"\w+\[([\d,]*)\]", compiled.as_text())
    return max(math.prod(int(size) for size in shape.split(",") if size) for shape in shapes)


# In a pipeline ----------------------------------------------------------------------------------------------------------------


BFLOAT16 = {"compute_dtype": "bfloat16"}


@pytest.mark.thinned(most=0, most_slow=0)
@pytest.mark.parametrize(
    ("schedule", "keys", "options"),
    [
        ("zb_h1", {"tied": True}, {}),
        ("pipedream_flush", BFLOAT16, {"recompute": "full", "precision": jpipe.Precision(params="bfloat16")}),
        ("pipedream_2bw", {"tied": True}, {"recompute": "dots_saveable"}),
    ],
)
def test_a_pipeline_learns_the_same_with_chunks(schedule, keys, options):
    config = ModelConfig(**SMALL | {"depth": 1} | keys)
    rng = np.random.default_rng(0)
    batches = [tuple(rng.integers(0, 256, (2, 8, 8)).astype(np.int32)) for _ in range(3)]
    batches[0][1][:, 2:5] = -1
    options = dict(options)
    precision = {"precision": options.pop("precision")} if "precision" in options else {}
    is_rough = keys.get("compute_dtype") == "bfloat16"
    results = []
    with jax.numpy_dtype_promotion("standard" if is_rough else "strict"):
        for chunk in (5, None):
            stack = layers(config, chunk)
            plan = jpipe.Plan.even(stack.ids, 2, schedule, 4, **options)
            results.append(trained(stack, plan, batches, **precision))
    (losses, params), (plain_losses, plain_params) = results
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-3 if is_rough else 1e-6)
    assert len(set(losses)) == 3
    near = {"rtol": 0.05, "atol": 2e-3} if is_rough else {"rtol": 1e-4, "atol": 1e-6}
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(*(np.asarray(p, np.float32) for p in (one, other)), **near), params, plain_params
    )
