"""Layers, whole models and generation compile for GPUs and TPUs; products of 16 bits stay in 16 bits where the device has them."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from jpipe import LayerStack, Pipeline, Plan, Precision
from jpipe.context import tracing_for
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.generate.decoder import Decoder, layers_of
from jpipe_lm.generate.sampling import Sampling, choose
from jpipe_lm.models.layers import layers
from jpipe_train.losses import cross_entropy
from tests.jpipe import models
from tests.jpipe.meshes.test_partial_sums import sums
from tests.lm.models.running import LLAMA
from tests.targets.compiled import check_donations, collectives, compile_pipeline, matrix_products, programs_of

pytestmark = pytest.mark.targets


@pytest.fixture(autouse=True)
def promotion():
    """Let JAX's own attention promote dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


GPT = {"depth": 1, "width": 128, "heads": 2, "seq_len": 64, "vocab_size": 256}
TOKENS = jax.ShapeDtypeStruct((4, 64), jnp.int32)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.exhaustive)])
def test_products_stay_in_16_bits(dtype, devices):
    """Forward, backward and evaluation of a decoder, attention included."""
    stack = layers(ModelConfig(**{**GPT, **LLAMA}).model_copy(update={"compute_dtype": dtype}))
    plan = Plan.even(stack.ids, 1, "gpipe", 1)
    precision = Precision(params=dtype, loss_scale="dynamic" if dtype == "float16" else None)
    pipe = Pipeline(stack, plan, cross_entropy.loss, optax.adamw(1e-3), precision=precision)
    programs = programs_of(compile_pipeline(pipe, (TOKENS, TOKENS), devices))
    expected = {"bfloat16": "bf16", "float16": "f16"}[dtype]
    for name, least in (("forward_backward", 18), ("evaluate", 6)):
        products = matrix_products(programs[name][0])
        assert len(products) >= least
        if devices[0].platform == "gpu":
            assert {dtype for product in products for dtype in product} == {expected}
        else:  # the others are in float32: the gradient of attention's logits, which XLA rounds, and in float16 all of attention
            assert sum({*product} == {expected} for product in products) >= least - 4


def test_tokens_are_sent_to_the_experts_that_they_chose(devices):
    """There and back in a forward, and their gradients in a backward."""
    experts = {"count": 8, "per_token": 2, "mlp_width": 128}
    stack = layers(ModelConfig(**{**GPT, **LLAMA}, experts=experts, compute_dtype="bfloat16"))
    plan = Plan.even(stack.ids, 1, "gpipe", 1, mesh={"expert": 4}, recompute="full")
    pipe = Pipeline(stack, plan, cross_entropy.loss, optax.adamw(1e-3))
    programs = programs_of(compile_pipeline(pipe, (TOKENS, TOKENS), devices))
    in_backward, in_forward = (collectives(programs[name][0]) for name in ("forward_backward", "evaluate"))
    assert "ragged-all-to-all" in in_backward & in_forward
    assert "reduce-scatter" not in in_forward  # which would scatter outputs for all tokens


def test_experts_on_all_devices_of_the_rows_add_up_their_gradients_once_per_update(devices):
    """As do all other weights: a backward adds up only some numbers of the loss and the counts of tokens."""
    experts = {"count": 8, "per_token": 2, "mlp_width": 128}
    stack = layers(ModelConfig(**{**GPT, **LLAMA}, experts=experts, compute_dtype="bfloat16"))
    plan = Plan.even(stack.ids, 1, "gpipe", 1, mesh={"data": 2}, recompute="elementwise")
    pipe = Pipeline(stack, plan, cross_entropy.loss, optax.adamw(1e-3))
    stages = compile_pipeline(pipe, (TOKENS, TOKENS), devices)
    programs = programs_of(stages)
    assert sums(programs["forward_backward"][0]) <= 64
    assert sums(programs["sum_devices"][0]) == sum(leaf.size for leaf in jax.tree.leaves(stages[0].functions.specs.params))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.convolution = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.out = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.convolution(x))).mean((1, 2))
        for block in self.blocks:
            x = nnx.relu(block(x))
        return self.out(x)


def test_a_whole_model_with_convolutions_and_batch_statistics(devices):
    x = jax.ShapeDtypeStruct((4, 8, 8, 3), jnp.float32)
    stack = LayerStack.from_model(lambda rngs: Net(rngs), x)
    plan = Plan.even(stack.ids, 2, "pipedream_flush", 1)
    pipe = Pipeline(stack, plan, models.squares, optax.sgd(0.1))
    programs = programs_of(compile_pipeline(pipe, (x, jax.ShapeDtypeStruct((4, 8), jnp.float32)), devices))
    assert {"forward", "backward", "evaluate"} <= programs.keys()


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.exhaustive), 32])
def test_generation(window, devices):
    """The programs of a decoder with a cache of keys and values, which are updated in place, and the choice of a token."""
    config = ModelConfig(**{**GPT, **LLAMA, "heads": 2, "kv_heads": 1, "window": window}, compute_dtype="bfloat16")
    one = jax.sharding.SingleDeviceSharding(devices[0])
    spec = functools.partial(jax.ShapeDtypeStruct, sharding=one)
    params = {i: jax.tree.map(lambda leaf: spec(leaf.shape, jnp.bfloat16), layer.specs) for i, layer in layers_of(config).items()}
    decoder = Decoder(config, params, dict.fromkeys(params, devices[0]))
    with tracing_for(devices[0].platform):
        for positions in (16, 1):  # a prompt, and one token more
            at = tokens = spec((2, positions), jnp.int32)
            cache = spec((2, window or 64, 1, 64), jnp.bfloat16)
            x = spec((2, positions, 128), jnp.bfloat16)
            embed = decoder._embed.lower(params["embed"], tokens, at).compile()
            block = decoder._blocks["block_0"].lower(params["block_0"], x, (cache, cache), at, spec((2,), jnp.int32)).compile()
            head = decoder._head.lower(params["head"], x, spec((2,), jnp.int32)).compile()
            for program in (embed, block, head):
                check_donations("generation", program)
            assert {dtype for product in matrix_products(block) for dtype in product} == {"bf16"}
    logits, rows = spec((2, 256), jnp.float32), spec((2,), jnp.int32)
    for sampling in (Sampling(), Sampling(1.0, top_k=5, top_p=0.9)):
        pick = jax.jit(lambda logits, *key, sampling=sampling: choose(logits, sampling, *key))
        pick.lower(logits, spec((), jnp.uint32), rows, spec((), jnp.int32)).compile()
