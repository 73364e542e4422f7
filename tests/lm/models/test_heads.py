"""Heads read one position of a row, and a pipeline learns with them what the whole model does."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import bert, heads, transformer
from jpipe_lm.models.layers import layers
from jpipe_lm.registered import LanguageModel
from jpipe_train import registry
from jpipe_train.assemble.metrics import metrics
from jpipe_train.config.config import EvalConfig
from tests.lm.models.running import LLAMA, SMALL, applied, params_of

HEADS = {
    "classification": {"head": "classification", "labels": 3},
    "regression": {"head": "regression"},
    "multiple_choice": {"head": "multiple_choice", "labels": 3},
}
KINDS = {"bert": {"kind": "bert", "init": "normal"}, "llama": LLAMA}
LENGTHS = np.asarray([8, 3, 5, 1, 2, 7, 4, 6, 3, 8, 1, 5])


def batch(head: str, kind: str, examples: int = 4, dtype: type = np.float32):
    """Return rows of different lengths: inputs with padding, and labels."""
    rng = np.random.default_rng(0)
    shape = (examples, 3, 8) if head == "multiple_choice" else (examples, 8)
    lengths = LENGTHS[: examples * 3].reshape(shape[:-1]) if len(shape) == 3 else LENGTHS[:examples]
    segments = np.arange(8) < lengths[..., None]
    inputs = {"tokens": rng.integers(0, 256, shape), "segments": segments}
    if kind == "bert":
        inputs["types"] = (np.arange(8) >= 2) & segments
    labels = rng.normal(size=examples).astype(dtype) if head == "regression" else rng.integers(0, 3, examples).astype(np.int32)
    return {name: array.astype(np.int32) for name, array in inputs.items()}, labels


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_first_position_or_of_the_last_before_the_padding(kind):
    """Each row alone, cut to its length, has the same ones; and so has each choice of an example. Rows of padding have finite ones."""
    config = ModelConfig(**SMALL | {"depth": 1}, **KINDS[kind], **HEADS["multiple_choice"])
    inputs, _ = jax.tree.map(jnp.asarray, batch("multiple_choice", kind))
    stack = layers(config)
    params = params_of(stack, inputs)
    outputs = applied(stack, params, inputs)
    assert outputs.shape == (4, 3)
    other = {name: jnp.where(inputs["segments"] == 0, 255 - array, array) if name == "tokens" else array for name, array in inputs.items()}
    np.testing.assert_array_equal(applied(stack, params, other), outputs)
    of_padding = applied(stack, params, inputs | {"segments": jnp.zeros_like(inputs["segments"])})
    assert jnp.isfinite(of_padding).all()
    one = layers(config.model_copy(update={"head": "regression", "labels": None}))
    for example, choice in ((0, 1), (3, 2)):
        length = int(LENGTHS[3 * example + choice])
        row = {name: array[example, choice, None, :length] for name, array in inputs.items() if name != "segments"}
        np.testing.assert_allclose(applied(one, params, row)[0], outputs[example, choice], rtol=1e-5, atol=1e-6)


def wide(constructor):
    """Return a constructor of the layer with parameters in float64."""

    def build(*, rngs: nnx.Rngs) -> nnx.Module:
        module = constructor(rngs=rngs)
        graph, params, rest = nnx.split(module, nnx.Param, ...)
        return nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params), rest)

    return build


def wide_stack(config: ModelConfig) -> jpipe.LayerStack:
    config = config.model_copy(update={"compute_dtype": "float64"})
    kind = bert if config.kind == "bert" else transformer
    made = {"embed": partial(kind.Embed, config), "block_0": partial(transformer.Block, config), "head": partial(heads.Head, config)}
    return jpipe.LayerStack({name: wide(constructor) for name, constructor in made.items()})


@pytest.mark.exhaustive
@pytest.mark.thinned(most=0)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", HEADS)
def test_two_steps_of_a_pipeline_are_those_of_the_whole_model(head, kind):
    config = ModelConfig(**SMALL | {"depth": 1}, **KINDS[kind], **HEADS[head])
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # JAX's attention asks for the dtype of float64 with float32
        data, stack = batch(head, kind, dtype=np.float64), wide_stack(config)
        loss = registry.find("losses", config.loss_name)
        pipe = jpipe.Pipeline(stack, jpipe.Plan.even(stack.ids, 2, "pipedream_flush", 4), loss, optax.sgd(0.5))
        state = pipe.init(jax.random.key(0), data)
        params = jax.tree.map(np.asarray, pipe.params(state))

        def mean(params, inputs, labels):
            state = {layer_id: {} for layer_id in stack.ids}
            outputs, _ = stack.apply(stack.ids, params, state, inputs, key=None, microbatch=None, train=False)
            total, weight = loss(outputs, labels)
            return total / weight

        for _ in range(2):
            value, gradient = jax.jit(jax.value_and_grad(mean))(params, *data)
            state, metrics = pipe.step(state, data)
            params = jax.tree.map(lambda leaf, change: leaf - 0.5 * np.asarray(change), params, gradient)
            np.testing.assert_allclose(float(next(iter(metrics.losses.values()))), value, rtol=1e-12)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12), pipe.params(state), params)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float64")}


def test_the_loss_is_the_mean_over_examples():
    outputs, labels = jnp.asarray([[2.0, 0.0], [0.0, 1.0]]), jnp.asarray([0, 0])
    expected = np.log1p(np.exp(-2.0)) + np.log1p(np.exp(1.0))
    for head in ("classification", "multiple_choice"):
        loss = registry.find("losses", ModelConfig(head=head, labels=2).loss_name)
        np.testing.assert_allclose(loss(outputs, labels), (expected, 2), rtol=1e-6)
    loss = registry.find("losses", ModelConfig(head="regression").loss_name)
    np.testing.assert_allclose(loss(jnp.asarray([1.0, -1.0]), jnp.asarray([0.5, 1.0])), (4.25, 2))


@pytest.mark.slow
@pytest.mark.thinned(most_slow=0, most=1)
@pytest.mark.parametrize("head", HEADS)
def test_the_router_loss_is_added_for_each_example(head):
    config = LanguageModel(**SMALL, **LLAMA, **HEADS[head], experts={"count": 4, "per_token": 2, "mlp_width": 8, "z_loss": 0.5})
    inputs, labels = jax.tree.map(jnp.asarray, batch(head, "llama"))
    stack = layers(config)
    outputs = applied(stack, params_of(stack, inputs), inputs)
    loss = registry.find("losses", config.loss_name)
    (total, number), (alone, _) = loss(outputs, labels), loss(outputs["tokens"], labels)
    assert (float(number), outputs["experts"].counts.shape[1:]) == (4, (2, 4))
    assert outputs["experts"].counts.sum() == 2 * 2 * (inputs["segments"] > 0).sum()
    np.testing.assert_allclose(total - alone, 4 * outputs["experts"].loss(), rtol=1e-4)
    assert total > alone
    names = ["squared_error", "pearson"] if head == "regression" else ["accuracy", "cross_entropy", "f1_macro"]
    with_experts, plain = (metrics(EvalConfig(metrics={name: name for name in names}), one) for one in (config, without_experts(config)))
    assert with_experts.keys() == {"busiest_expert", "unused_experts", *plain}
    for name, metric in plain.items():
        np.testing.assert_array_equal(with_experts[name](outputs, labels), metric(outputs["tokens"], labels))


def without_experts(config: ModelConfig) -> ModelConfig:
    return config.model_copy(update={"experts": None})
