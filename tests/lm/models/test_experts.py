"""Mixtures of experts: their outputs and losses as computed token by token, and the same gradients through pipelines."""

import io
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console

import jpipe
from jpipe.context import StageMesh, tracing_on
from jpipe_lm.config.model.experts_section import ExpertsConfig
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models import transformer
from jpipe_lm.models.experts import no_routing, on_stage
from jpipe_lm.models.layers import layers
from jpipe_lm.registered import LanguageModel
from jpipe_train.assemble.build import build
from jpipe_train.assemble.metrics import metrics
from jpipe_train.config.config import EvalConfig
from jpipe_train.console.progress import Reporter
from jpipe_train.losses.cross_entropy import loss
from tests.jpipe import monolith
from tests.lm.models.running import SMALL, outputs_of, params_of, trained
from tests.train.conftest import changed

MIXTURE = {"count": 4, "per_token": 2, "mlp_width": 12, "balance_loss": 0.5, "z_loss": 0.25}
GATED = {**SMALL, "vocab_size": 64, "activation": "silu", "gated_mlp": True, "bias": False}
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 64, (3, 4, 9)).astype(np.int32)
BATCHES = [(rows[:, :-1], rows[:, 1:]) for rows in TOKENS]


def silu(x):
    return x / (1 + np.exp(-x))


def mlp(x, expand, gate, contract):
    return (silu(x @ gate) * (x @ expand)) @ contract


def expert(kernels, e, x):
    def linear(name, x):
        return x @ kernels[name]["kernel"][e] + (kernels[name]["bias"][e] if "bias" in kernels[name] else 0)

    return linear("contract", silu(linear("gate", x)) * linear("expand", x))


@pytest.mark.parametrize(("keys", "kept"), [
    ({"renormalize": True}, None),
    ({"renormalize": False, "per_token": 3, "shared_mlp_width": 6, "shared_gate": True}, None),
    ({"shared_mlp_width": 6}, None),
    ({"bias": True, "score": "sigmoid", "correction": True, "groups": 2, "scale": 1.5}, None),
    ({"score": "sigmoid", "renormalize": False, "weighs_inputs": True}, None),
    ({"per_token": 1}, [[1] * 8, [1] * 3 + [2] * 2 + [0] * 3, [0] * 8]),
])  # fmt: skip
def test_experts_compute_what_a_loop_over_tokens_does(keys, kept):
    config = ModelConfig(**GATED, experts={**MIXTURE, **keys})
    block, of_experts = transformer.Block(config, rngs=nnx.Rngs(0)), config.experts
    nnx.update(
        block, jax.tree.map(lambda leaf: leaf + jnp.asarray(RNG.normal(size=leaf.shape), leaf.dtype) * 0.2, nnx.state(block, nnx.Param))
    )
    x = RNG.normal(size=(3, 8, 16)).astype(np.float32)
    y, choices = jax.jit(lambda x: block.experts(x, None if kept is None else jnp.asarray(kept) > 0))(x)
    routing = no_routing(of_experts, 3, 1, jnp.float32).followed_by(*choices)
    kernels = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(block.experts, nnx.Param)))
    expected, counts, sums, squares = np.zeros_like(x), np.zeros((3, 4)), np.zeros((3, 4)), np.zeros(3)
    for row in range(3):
        for position in range(8):
            token = x[row, position]
            outputs = token @ kernels["router"]["kernel"] + kernels["router"].get("bias", 0)
            scores = 1 / (1 + np.exp(-outputs)) if of_experts.score == "sigmoid" else np.exp(outputs) / np.exp(outputs).sum()
            probabilities = scores / scores.sum()
            ranked = scores + kernels.get("correction", 0)
            if of_experts.groups == 2:  # of the two experts of each group
                ranked[[0, 1] if ranked[:2].sum() < ranked[2:].sum() else [2, 3]] = -1
            chosen = np.argsort(-ranked)[: of_experts.per_token]
            weights = of_experts.scale * scores[chosen] / (scores[chosen].sum() if of_experts.renormalize else 1)
            for weight, e in zip(weights, chosen, strict=True):
                of_input, of_output = (weight, 1) if of_experts.weighs_inputs else (1, weight)
                expected[row, position] += of_output * expert(kernels, e, of_input * token)
            if of_experts.shared_mlp_width:
                shared = kernels["shared"]
                one = mlp(token, *(shared[name]["kernel"] for name in ("expand", "gate", "contract")))
                expected[row, position] += one / (1 + np.exp(-token @ shared["share"]["kernel"])) if "share" in shared else one
            if kept is None or kept[row][position]:
                counts[row, chosen] += 1
                sums[row] += probabilities
                squares[row] += np.log(np.exp(outputs).sum()) ** 2
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_array_equal(routing.counts[:, 0], counts)
    number = counts.sum() / of_experts.per_token
    balance = 4 * (counts.sum(0) / number * sums.sum(0) / number).sum()
    np.testing.assert_allclose(routing.balance(), balance, rtol=1e-5)
    np.testing.assert_allclose(routing.loss(), 0.5 * balance + 0.25 * squares.sum() / number, rtol=1e-5)


def test_the_loss_of_padding_alone_is_zero():
    routing = no_routing(ModelConfig(**GATED, experts=MIXTURE).experts, 2, 3, jnp.float32)
    np.testing.assert_array_equal(routing.loss(), 0)
    np.testing.assert_array_equal(jax.grad(lambda p: replace(routing, probabilities=p).loss())(routing.probabilities), 0)


def in_float64(stack):
    """Return the model with parameters in float64."""

    def cast(layer):
        def init(key, x):
            params, state = layer.init(key, x)
            return jax.tree.map(lambda leaf: leaf.astype("float64"), params), state

        return replace(layer, init=init)

    return stack.with_layers({layer_id: cast(layer) for layer_id, layer in stack.layers.items()})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("schedule", "stages", "delay"),
    [
        ("zb_h1", 2, 0),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("pipedream_2bw", 2, 1), ("pipedream_flush", 2, 0), ("pipedream_flush", 4, 0), ("pipedream_2bw", 4, 1))
        ),
    ],
)
def test_a_pipeline_has_the_gradients_of_the_whole_model(schedule, stages, delay):
    """Router losses are of all blocks together, across all stages; blocks without experts between them pass them on."""
    mixture = {**MIXTURE, "shared_mlp_width": 4, "shared_gate": True, "layers": [True, False, True] if stages > 2 else None}
    keys = {**GATED, "depth": min(stages, 3), "experts": mixture}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):  # JAX's own attention promotes
        config = ModelConfig(**keys).model_copy(update={"compute_dtype": "float64"})
        stack = in_float64(layers(config))
        pipe = jpipe.Pipeline(stack, jpipe.Plan.even(stack.ids, stages, schedule, stages), loss, optax.sgd(0.5))
        state = pipe.init(jax.random.key(0), BATCHES[0])
        first, losses = jax.device_put(pipe.params(state), jax.devices()[0]), []
        for batch in BATCHES:
            state, metrics = pipe.step(state, batch)
            losses += metrics.losses.values()
        state, metrics = pipe.drain(state, with_metrics=True)
        losses += metrics.losses.values()
        blank = {layer_id: {} for layer_id in stack.ids}

        def version(_, k):
            return max(k // stages - delay, 0)

        expected, params, _ = monolith.train(stack, loss, optax.sgd(0.5), first, blank, jax.random.key(0), BATCHES, stages, version)
        np.testing.assert_allclose([float(value) for value in losses], expected, rtol=1e-12)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12), dict(pipe.params(state)), params)
        moved = np.abs(first["block_0"]["experts"]["router"]["kernel"] - params["block_0"]["experts"]["router"]["kernel"])
        assert moved.max() > 1e-3


@pytest.mark.exhaustive
def test_experts_compute_in_bfloat16_with_a_router_in_float32():
    keys, tokens = {**GATED, "experts": MIXTURE}, BATCHES[0][0]
    params = params_of(layers(ModelConfig(**keys)), tokens)
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention promotes
        exact, outputs = (outputs_of(ModelConfig(**keys, compute_dtype=dtype), tokens, params) for dtype in ("float32", "bfloat16"))
    assert (outputs["tokens"].dtype, outputs["experts"].probabilities.dtype) == ("bfloat16", "float32")
    np.testing.assert_allclose(outputs["experts"].probabilities, exact["experts"].probabilities, atol=0.02)
    np.testing.assert_allclose(outputs["tokens"].astype("float32"), exact["tokens"], atol=0.1)


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(("sizes", "axes", "rows"), [
    ({"data": 2, "expert": 2, "model": 2}, {"expert": "expert", "mlp": "model"}, ("data", "expert")),
    ({"expert": 2}, {"expert": "expert"}, ("expert",)),
    ({"data": 4}, {"expert": "data"}, ("data",)),
    ({"model": 2}, {"expert": "model"}, ()),
])  # fmt: skip
def test_experts_compute_on_a_mesh_as_on_one_device(sizes, axes, rows):
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=jax.devices()[: math.prod(sizes.values())]
    )
    shapes = {"expand": (4, 16, 12), "gate": (4, 16, 12), "contract": (4, 12, 16)}
    with jax.enable_x64(True):
        kernels = {name: jnp.asarray(RNG.normal(size=shape)) for name, shape in shapes.items()}
        x, router, is_counted = jnp.asarray(RNG.normal(size=(4, 8, 16))), jnp.asarray(RNG.normal(size=(16, 4))), jnp.ones((4, 8), bool)

        def total(x, router, kernels):
            y, _, probabilities, squares = on_stage(ExpertsConfig(**MIXTURE), "silu")(x, is_counted, {"kernel": router}, kernels)
            return jnp.sin(y).sum() + (probabilities**2).sum() + squares.sum()

        def on_mesh(*arguments):
            with tracing_on(StageMesh(mesh.abstract_mesh, axes, rows)):
                return jax.value_and_grad(total, (0, 1, 2))(*arguments)

        expected = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(x, router, kernels)
        actual = jax.jit(on_mesh, in_shardings=NamedSharding(mesh, PartitionSpec()))(x, router, kernels)
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-10), actual, expected)


@pytest.mark.exhaustive
def test_a_pipeline_of_meshes_with_experts_learns_as_on_single_devices():
    stack = layers(ModelConfig(**GATED, experts={**MIXTURE, "shared_mlp_width": 4}))
    mesh = {"mesh": {"data": 2, "expert": 2}, "fsdp": True}
    plans = [jpipe.Plan.even(stack.ids, 2, "pipedream_flush", 1, **options) for options in ({}, mesh)]
    (losses, params), (expected, params_expected) = (trained(stack, plan, BATCHES) for plan in reversed(plans))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-5), dict(params), dict(params_expected))


def test_metrics_count_the_tokens_of_experts():
    counts = jnp.asarray([[[6, 2, 0, 0], [2, 2, 2, 2]], [[0, 0, 0, 0]] * 2])  # the second row is padding
    routing = replace(no_routing(ExpertsConfig(**MIXTURE), 2, 2, jnp.float32), counts=counts)
    measured = {name: metric({"experts": routing}, None) for name, metric in metrics(EvalConfig(), LanguageModel(experts=MIXTURE)).items()}
    assert {name: (float(total), float(number)) for name, (total, number) in measured.items()} == {
        "busiest_expert": (8.0, 4.0),  # 3 and 1 times the mean
        "unused_experts": (1.0, 4.0),
    }
    assert metrics(EvalConfig(), LanguageModel()) == {}
    of_the_user = metrics(EvalConfig(metrics={"own": f"{__name__}:own_metric"}), LanguageModel(experts=MIXTURE))["own"]
    assert of_the_user({"tokens": "logits", "experts": routing}, "labels") == ("logits", "labels")


def own_metric(outputs, labels):
    return outputs, labels


def test_a_loss_of_the_users_decides_about_the_router_losses(tiny):
    console = Console(file=io.StringIO(), width=200)
    build(changed(tiny, model={"experts": MIXTURE}, loss={"target": f"{__name__}:own_metric"}), Reporter(1, 1, "", console))
    assert f"{__name__}:own_metric decides whether router losses count" in console.file.getvalue()
