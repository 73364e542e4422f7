"""Residuals contain no weights and no cast copies of weights; with full recomputation they are the stage input."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

from jpipe import LayerStack, Pipeline, Plan
from jpipe.context import tracing_for
from tests.jpipe import models, running

pytestmark = pytest.mark.usefixtures("lenient")

ROWS, WIDTH, HIDDEN = 7, 5, 11  # all different: no activation has the shape of a weight


class NnxBlock(nnx.Module):
    """A block with float32 parameters that computes in bfloat16 and casts its weights in every call."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, HIDDEN, dtype=jnp.bfloat16, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class LinenBlock(linen.Module):
    """The Linen version of `NnxBlock`."""

    @linen.compact
    def __call__(self, x, train):
        y = linen.Dense(HIDDEN, dtype=jnp.bfloat16)(linen.LayerNorm(dtype=jnp.bfloat16)(x))
        y = linen.Dense(WIDTH, dtype=jnp.bfloat16)(linen.gelu(y))
        return x + linen.Dropout(0.5, deterministic=not train)(y)


class Scanned(nnx.Module):
    """A block whose weights are cast and used inside a loop."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)))

    def __call__(self, x):
        kernel = self.kernel[...].astype(jnp.bfloat16)
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ kernel), None), x, length=3)[0]


BLOCKS = {"nnx": lambda rngs: NnxBlock(rngs), "linen": LinenBlock(), "scanned": lambda rngs: Scanned(rngs)}


def to_bfloat16(x):
    return x.astype(jnp.bfloat16)


def loss(y, labels):
    return ((y.astype(jnp.float32) - labels) ** 2).sum(), 1.0


def functions_of(blocks, recompute):
    """Return the functions of four stages under GPipe, where the last stage is not fused."""
    layers = {f"{kind}{i}": BLOCKS[kind] if kind != "linen" else LinenBlock() for i, kind in enumerate(blocks)}
    stack = LayerStack({"cast": to_bfloat16, **layers})
    plan = models.cut(stack.ids, (2, *[1] * (len(blocks) - 1)), microbatches=2, recompute=recompute, schedule="gpipe")
    pipe = Pipeline(stack, plan, loss, optax.sgd(0.1))
    batch = (np.zeros((2 * ROWS, WIDTH), np.float32),) * 2
    return pipe.stage_functions(batch)


def shapes(tree) -> set:
    return {leaf.shape for leaf in jax.tree.leaves(tree)}


@pytest.mark.thinned(most=2)
@pytest.mark.oldest
@pytest.mark.parametrize("recompute", ["none", "elementwise", "full", "dots_saveable", "nothing_saveable", "everything_saveable"])
@pytest.mark.parametrize("blocks", [("nnx", "nnx"), ("linen", "linen"), ("scanned", "nnx", "linen")], ids="-".join)
def test_no_residual_has_the_shape_of_a_weight(blocks, recompute):
    for f in functions_of(blocks, recompute):
        y, state, saved = jax.eval_shape(f.forward, f.specs.params, *f.specs.arguments, f.specs.rng)
        left = f.residuals.keep(f.specs.arguments, (y, state)), saved
        weights = shapes(f.specs.params) | {shape[::-1] for shape in shapes(f.specs.params)}
        assert not weights & shapes(left), f"{f.stage.layers}: {recompute}"


@pytest.mark.thinned(most=2)
@pytest.mark.oldest
@pytest.mark.parametrize("recompute", ["full", "nothing_saveable"])
@pytest.mark.parametrize("blocks", [("nnx", "nnx"), ("linen", "linen")], ids="-".join)
def test_full_recomputation_keeps_the_stage_input_only(blocks, recompute):
    for f in functions_of(blocks, recompute):
        y, state, saved = jax.eval_shape(f.forward, f.specs.params, *f.specs.arguments, f.specs.rng)
        assert jax.tree.leaves(saved) == [], f.stage.layers
        arguments, outputs = f.residuals.keep(f.specs.arguments, (y, state))
        assert outputs == ()
        inputs = [f.specs.x, f.specs.labels] if f.last else [f.specs.x]
        assert [a.shape for a in arguments] == [g.shape for g in inputs]


def test_full_recomputation_keeps_the_layer_state_that_the_forward_read():
    stack = models.rich_stack()
    pipe = Pipeline(stack, Plan.even(stack.ids, 4, "pipedream", 1, recompute="full"), models.masked_squares, optax.sgd(0.1))
    first = pipe.stage_functions(models.masked_batches(1, 1)[0])[0]
    arguments, outputs = first.residuals.keep(first.specs.arguments, first.specs.arguments[::-1])
    assert outputs == ()
    assert [a.shape for a in arguments] == [first.specs.state["track"]["mean"].shape, first.specs.x.shape]


def test_dots_saveable_keeps_the_outputs_of_matrix_products_and_the_stage_input():
    f = functions_of(("nnx", "nnx"), "dots_saveable")[1]
    saved = jax.eval_shape(f.forward, f.specs.params, *f.specs.arguments, f.specs.rng)[2]
    assert sorted(leaf.shape for leaf in jax.tree.leaves(saved)) == [(ROWS, WIDTH), (ROWS, HIDDEN)]


def test_elementwise_keeps_the_result_of_a_product_and_nothing_of_what_is_computed_from_each_of_its_numbers():
    stack = LayerStack({"a": models.dense(WIDTH, lambda x: x), "b": lambda x: jnp.sin(x) * jnp.exp(x) * jnp.tanh(x), "c": lambda x: x})
    counts = {}
    for recompute in ("none", "elementwise"):
        plan = models.cut(stack.ids, (2, 1), microbatches=2, schedule="gpipe", recompute=recompute)
        pipe = Pipeline(stack, plan, models.squares, optax.sgd(0.1))
        f = pipe.stage_functions((np.zeros((2 * ROWS, 3), np.float32), np.zeros((2 * ROWS, WIDTH), np.float32)))[0]
        saved = jax.eval_shape(f.forward, f.specs.params, *f.specs.arguments, f.specs.rng)[2]
        counts[recompute] = sum(leaf.shape == (ROWS, WIDTH) for leaf in jax.tree.leaves(saved))
    assert counts["elementwise"] == 1 < counts["none"]


def test_on_gpus_elementwise_does_not_keep_the_maximum_and_the_sum_of_a_softmax(float64):
    """The results are the same. Other platforms keep them, and all keep the sum over the rows."""
    layers = {"a": models.dense(WIDTH, jnp.tanh), "b": jax.nn.softmax, "c": lambda x: x / (x**2).sum(0), "d": models.dense(WIDTH)}
    plan = models.cut([*layers], (3, 1), microbatches=2, schedule="gpipe", recompute="elementwise")
    batches, counts, trained = models.masked_batches(2, 2, rows=ROWS, width=WIDTH, dtype=np.float64), {}, {}
    for platform in ("cpu", "gpu", "tpu"):
        with tracing_for(platform):
            pipe = Pipeline(LayerStack(layers), plan, models.masked_squares, models.momentum())
            f = pipe.stage_functions(batches[0])[0]
            saved = jax.eval_shape(f.forward, f.specs.params, *f.specs.arguments, f.specs.rng)[2]
            counts[platform] = [sum(leaf.size == size for leaf in jax.tree.leaves(saved)) for size in (ROWS, WIDTH)]
            trained[platform] = running.train(pipe, batches)
    assert counts == {"cpu": [2, 1], "gpu": [0, 1], "tpu": [2, 1]}
    running.check_close(trained["gpu"], trained["cpu"])


@pytest.mark.parametrize(("between", "is_kept"), [(lambda x: x / 3, True), (jnp.tanh, False)], ids=["scaled", "capped"])
def test_on_tpus_elementwise_keeps_the_exponentials_of_a_softmax_in_place_of_its_product(between, is_kept, float64):
    """And no maxima. If the backward needs the product, too, it keeps the product and the maxima. The results are the same."""
    layers = {"a": models.dense(WIDTH, between), "b": jax.nn.softmax, "c": models.dense(WIDTH)}
    plan = models.cut([*layers], (2, 1), microbatches=2, schedule="gpipe", recompute="elementwise")
    batches, counts, repeats, trained = models.masked_batches(2, 2, rows=ROWS, width=WIDTH, dtype=np.float64), {}, {}, {}
    for platform in ("cpu", "tpu"):
        with tracing_for(platform):
            pipe = Pipeline(LayerStack(layers), plan, models.masked_squares, models.momentum())
            f = pipe.stage_functions(batches[0])[0]
            saved = jax.eval_shape(f.forward, f.specs.params, *f.specs.arguments, f.specs.rng)[2]
            counts[platform] = [sum(leaf.size == size for leaf in jax.tree.leaves(saved)) for size in (ROWS, ROWS * WIDTH)]
            backward = jax.make_jaxpr(f.backward)(f.specs.params, *f.between_specs, f.accumulators_spec, f.specs.rng)
            repeats[platform] = " exp " in str(backward)
            trained[platform] = running.train(pipe, batches)
    assert counts == {"cpu": [2, 1], "tpu": [1, 1] if is_kept else [2, 1]}
    assert repeats == {"cpu": True, "tpu": not is_kept}
    running.check_close(trained["tpu"], trained["cpu"])


def test_on_gpus_elementwise_keeps_what_is_cast_to_a_smaller_dtype():
    """Products read it, so the forward writes it anyway. The results are the same."""
    layers = {"a": models.dense(WIDTH), "b": lambda x: jnp.exp(x).astype(jnp.bfloat16), "c": models.dense(HIDDEN), "d": models.dense(WIDTH)}
    plan = models.cut([*layers], (3, 1), microbatches=2, schedule="gpipe", recompute="elementwise")
    batches, kept, trained = models.masked_batches(2, 2, rows=ROWS, width=WIDTH), {}, {}
    for platform in ("cpu", "gpu", "tpu"):
        with tracing_for(platform):
            pipe = Pipeline(LayerStack(layers), plan, models.masked_squares, models.momentum())
            f = pipe.stage_functions(batches[0])[0]
            saved = jax.eval_shape(f.forward, f.specs.params, *f.specs.arguments, f.specs.rng)[2]
            kept[platform] = any(leaf.shape == (ROWS, WIDTH) and leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(saved))
            trained[platform] = running.train(pipe, batches)
    assert kept == {"cpu": False, "gpu": True, "tpu": False}
    running.check_close(trained["gpu"], trained["cpu"], 1e-6)


def test_an_array_that_several_layers_need_is_stored_once():
    """The activation between two layers of a stage is one array, and so is the stage input, though two layers read it."""

    def unchanged(x):
        return x

    stack = LayerStack({"a": models.dense(WIDTH, unchanged), "b": models.dense(HIDDEN, unchanged), "c": lambda x: x * x, "d": jnp.sin})
    pipe = Pipeline(stack, models.cut(stack.ids, (3, 1), microbatches=2, schedule="gpipe"), models.squares, optax.sgd(0.1))
    f = pipe.stage_functions((np.zeros((2 * ROWS, 3), np.float32), np.zeros((2 * ROWS, HIDDEN), np.float32)))[0]
    y, state, saved = jax.eval_shape(f.forward, f.specs.params, *f.specs.arguments, f.specs.rng)
    arguments, outputs = f.residuals.keep(f.specs.arguments, (y, state))
    assert [a.shape for a in arguments] == [(ROWS, 3)]
    assert sorted(leaf.shape for leaf in jax.tree.leaves((saved, outputs))) == [(ROWS, WIDTH), (ROWS, HIDDEN)]


def test_a_forward_returns_the_residuals_that_were_found_although_another_trace_would_find_more():
    """JAX caches what it traces, so that the same model may have other residuals when it is traced again."""
    traces = []

    def longer_each_time(x):
        traces.append(None)
        for _ in traces:
            x = jnp.sin(x)
        return x

    stack = LayerStack({"a": models.dense(WIDTH, longer_each_time), "b": lambda x: x})
    pipe = Pipeline(stack, models.cut(stack.ids, (1, 1), microbatches=2, schedule="gpipe"), models.squares, optax.sgd(0.1))
    f = pipe.stage_functions((np.zeros((2 * ROWS, 3), np.float32), np.zeros((2 * ROWS, WIDTH), np.float32)))[0]
    for _ in range(2):
        saved = jax.eval_shape(f.forward, f.specs.params, *f.specs.arguments, f.specs.rng)[2]
        assert len(jax.tree.leaves(saved)) == f.residuals.count
