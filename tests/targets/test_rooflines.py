"""The roofline of a small GPT, compiled for GPUs and TPUs that are not here: its kernels have the products that the model has."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest

import jpipe
from benchmarks.sizes import Sizes
from jpipe.context import tracing_for
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_planner import Device
from jpipe_planner.cost.rooflines import find_programs, find_whole
from jpipe_planner.machine.compiling import compiling_for
from jpipe_planner.machine.roofline import Rates, read_kernels
from jpipe_train.losses.cross_entropy import loss
from tests.targets.conftest import devices_of

pytestmark = pytest.mark.targets

SIZES = Sizes(layers=1, width=128, heads=2, sequence=128, rows=2, vocabulary=512, compute_dtype="bfloat16")
MICROBATCHES = 3
TOKENS = SIZES.rows * SIZES.sequence
BATCH = (jax.ShapeDtypeStruct((SIZES.rows * MICROBATCHES, SIZES.sequence), jnp.int32),) * 2


@pytest.fixture(autouse=True)
def promotion():
    """Let JAX's own attention promote dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def pipeline(*cuts):
    sizes = {name: getattr(SIZES, name) for name in ("width", "heads", "compute_dtype")}
    keys = {"depth": SIZES.layers, "seq_len": SIZES.sequence, "vocab_size": SIZES.vocabulary, "attention": "xla", **sizes}
    stack = layers(ModelConfig(**keys))
    plan = jpipe.Plan(schedule="gpipe", microbatches=MICROBATCHES, stages=[{"layers": stack.ids[a:b]} for a, b in itertools.pairwise(cuts)])
    return jpipe.Pipeline(stack, plan, loss, optax.adamw(1e-3))


def test_the_products_are_those_of_the_model(target):
    devices_of(target)
    device = Device(target="h100-80gb" if target.platform == "cuda" else "v5e")
    compiling = compiling_for(device, 1, unlimited=True)
    compiled = {}
    with tracing_for(compiling.devices[0].platform):
        programs = {(one.stage, one.op): one for one in find_programs(pipeline(0, 2, 3), BATCH, device, compiling, compiled)}
        whole = find_whole(pipeline(0, 3), BATCH, device, compiling)
    flops = MICROBATCHES * SIZES.rows * SIZES.sequence_flops
    assert sum(program.total("flops") for program in programs.values()) == pytest.approx(flops)
    assert whole.total("flops") == pytest.approx(flops)
    assert {kernel.runs for kernel in whole.kernels if kernel.flops} == {MICROBATCHES}
    wide = [kernel for kernel in programs[0, "forward"].kernels if kernel.flops == 2 * TOKENS * SIZES.width * 4 * SIZES.width]
    assert len(wide) == 2  # of the block's MLP
    assert all("/models/transformer.py:" in kernel.source for kernel in wide)
    scores = 4 * SIZES.rows * SIZES.heads * SIZES.sequence**2
    assert not [kernel for kernel in programs[0, "forward"].kernels if kernel.kind == "copy" and kernel.bytes >= scores / 2]
    assert not [key for key, program in compiled.items() if "cross_program_prefetch" in program.as_text()]
    if target.platform == "cuda":  # a TPU keeps some of it in its fast memory
        weights, narrow = 4 * SIZES.width * 4 * SIZES.width, 2 * TOKENS * SIZES.width
        assert wide[0].bytes == weights + 5 * narrow  # the other one is cut along its long side, and writes more
        params = 4 * SIZES.parameters
        assert sum(program.total("bytes") for (_, op), program in programs.items() if op == "in_place") >= 7 * params


def test_kernels_made_with_little_effort_are_the_same(target):
    device = devices_of(target)[0]
    if target.platform != "cuda":
        pytest.skip("only programs for GPUs are compiled in another way for analysis")
    lowered, rates = pipeline(0, 3).lower_whole_step(BATCH, device), Rates.of(Device(target="h100-80gb"))
    analyzed, usual = (
        [dataclasses.replace(kernel, name="") for kernel in read_kernels(compiled.as_text(), rates)]
        for compiled in (jpipe.stages.compile_for_analysis(lowered, device), lowered.compile())
    )
    assert analyzed == usual
