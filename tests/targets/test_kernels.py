"""Stages compile with the kernels of their target: splash attention, cuDNN's packed documents, and products in float8."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from jpipe import Pipeline, Plan
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_planner import Device
from jpipe_planner.machine.roofline import Rates, read_kernels
from jpipe_planner.machine.targets import find_target
from jpipe_train.losses import cross_entropy
from tests.lm.models.running import LLAMA
from tests.targets.compiled import compile_pipeline, matrix_products, programs_of, text_of
from tests.targets.conftest import devices_of

pytestmark = pytest.mark.targets

LENGTH = 384
GPT = {"depth": 1, "width": 256, "heads": 4, "seq_len": LENGTH, "vocab_size": 256, "compute_dtype": "bfloat16"} | LLAMA
TOKENS = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
DOCUMENTS = {"tokens": TOKENS, "segments": TOKENS}


@pytest.fixture(autouse=True)
def promotion():
    """Let JAX's own attention promote dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def programs(devices, inputs, mesh=None, **keys):
    """Compile three stages. The block is the second one, so its forward and backward are programs of their own."""
    stack = layers(ModelConfig(**{**GPT, **keys}))
    options = {} if mesh is None else {"mesh": mesh}
    stages = [{"layers": [name], **options} for name in stack.ids]
    plan = Plan(schedule="pipedream_flush", microbatches=1, stages=stages)
    pipe = Pipeline(stack, plan, cross_entropy.loss, optax.adamw(1e-3))
    return programs_of(compile_pipeline(pipe, (inputs, TOKENS), devices))


def joined(found):
    return "\n".join(text_of(program) for program in found)


@pytest.mark.parametrize(("inputs", "mesh", "keys"), [
    (DOCUMENTS, None, {"kv_heads": 2}),
    (TOKENS, {"data": 2, "model": 2}, {"kv_heads": 2, "window": 100}),
    pytest.param(TOKENS, None, {"head_size": 32, "kv_heads": 1, "attention_soft_cap": 30.0, "compute_dtype": "float32"},
                 marks=pytest.mark.exhaustive),
    pytest.param(TOKENS, None, {"head_size": 80, "heads": 2}, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_tpus_compute_splash_attention(inputs, mesh, keys):
    """Without an array for all pairs of positions."""
    target = find_target("v5e")
    found = programs(devices_of(target), inputs, mesh, attention="splash", **keys)
    rates = Rates.of(Device(target="v5e"))
    for name, kernels in (("forward", {"fwd"}), ("backward", {"dq", "dkv"})):
        text = joined(found[name])
        assert {*re.findall(r"splash_mha_(\w+?)_.* custom-call\(", text)} == kernels, name
        assert not re.search(rf"\[(?:\d+,)*{LENGTH},{LENGTH}\]", text), name
        counted = [kernel for program in found[name] for kernel in read_kernels(text_of(program), rates) if "splash_mha" in kernel.name]
        assert counted
        assert all(kernel.flops > 0 and kernel.bytes > 0 for kernel in counted)


def test_gpus_compute_packed_documents_by_cudnn(monkeypatch):
    """Without a mask. JAX asks the GPU here for its generation, so the test answers for the H100."""
    target = find_target("h100-80gb")
    devices = devices_of(target)
    if importlib.util.find_spec("nvidia.cudnn") is None:
        pytest.skip("cuDNN is not installed; pip install nvidia-cudnn-cu13")
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_compute_capability", lambda _: True)
    found = programs(devices, DOCUMENTS, attention="cudnn", kv_heads=2, window=100)
    for name, call in (("forward", "__cudnn$fmhaSoftmax"), ("backward", "__cudnn$fmhaSoftmaxBackward")):
        calls = [line for line in joined(found[name]).splitlines() if f'custom_call_target="{call}"' in line]
        assert calls, name
        assert all(re.search(r'"mask_type": ?"PADDING_CAUSAL".*"max_seg_per_batch": ?32', line) for line in calls)
        assert not any(re.search(rf"\[(?:\d+,)*{LENGTH},{LENGTH}\]", line.partition("backend_config")[0]) for line in calls)


def test_gpus_multiply_in_float8():
    """The four linear layers with their gradients; attention stays in bfloat16."""
    pytest.importorskip("qwix")
    found = programs(devices_of(find_target("h100-80gb")), TOKENS, products="float8", kv_heads=4, gated_mlp=False)
    forward, backward = ([product for program in found[name] for product in matrix_products(program)] for name in ("forward", "backward"))
    assert forward.count(("f8e4m3fn", "f8e4m3fn")) == 4
    in_float8 = [product for product in backward if {*product} == {"f8e4m3fn", "f8e5m2"}]
    assert len(in_float8) == 2 * 4
    assert {*forward, *backward} <= {("f8e4m3fn", "f8e4m3fn"), ("f8e4m3fn", "f8e5m2"), ("f8e5m2", "f8e4m3fn"), ("bf16", "bf16")}
