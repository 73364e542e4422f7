"""The planner's own work for targets: profiles, compiled plans, and what exceeds the memory of a TPU."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jpipe
from jpipe_planner import Topology, analyze
from jpipe_planner.machine.compiling import bytes_beyond_memory, compiling_for
from jpipe_planner.ranking.choose import choose
from jpipe_planner.ranking.compiled import compile_stages
from jpipe_planner.search.candidates import find_candidates
from tests.targets.conftest import devices_of

pytestmark = pytest.mark.targets

WIDTH = 64
STACK = jpipe.LayerStack({f"block_{n}": lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs) for n in range(4)})


def loss(outputs, labels):
    return ((outputs - labels) ** 2).sum(), jnp.float32(len(labels))


def batch(rows):
    spec = jax.ShapeDtypeStruct((rows, WIDTH), np.float32)
    return spec, spec


def test_a_plan_is_profiled_and_compiled_for_the_target(target):
    devices_of(target)
    name = "h100-80gb" if target.platform == "cuda" else "v5e"
    topology = Topology(levels=({"count": 2, "bandwidth": 1e9},), device={"target": name})
    profile = analyze(STACK, batch, loss, optax.adam(1e-3), [4, 8], topology.device)
    assert profile.compiled_for == target.name
    choice = choose(profile, topology, find_candidates(profile, topology, 16, schedules=["pipedream_flush"]))
    ranked = next(one for one in choice.ranked if one.candidate.depth == 2)
    pipe = jpipe.Pipeline(STACK, choice.plan(ranked), loss, optax.adam(1e-3))
    compiling = compiling_for(topology.device, 2)
    assert (compiling.kind, compiling.missing) == (target.name, "")
    compiled = compile_stages(choice, ranked, pipe, batch(16), compiling.devices)
    assert compiled.fits
    assert len(compiled.ranks) == 1  # the other one fits for sure
    if target.platform == "cuda":  # a TPU's programs need half a megabyte, whatever such a small model does
        assert compiled.ranked.memory == pytest.approx(compiled.estimated, rel=0.2)


def attention_loss(q, k, v):
    weights = jax.nn.softmax((q @ k.T).astype(jnp.float32)).astype(q.dtype)
    return jnp.sum(jnp.tanh(weights @ v).astype(jnp.float32) ** 2)


def convolution_loss(x, kernel):  # cuDNN's, for which XLA makes no kernel
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME").sum()


@pytest.mark.parametrize(("function", "shapes"), [(attention_loss, [(256, 128)] * 3), (convolution_loss, [(4, 3, 16, 16), (8, 3, 3, 3)])])
def test_programs_for_analysis_need_the_same_memory(function, shapes, target):
    device = devices_of(target)[0]
    if target.platform != "cuda":
        pytest.skip("only programs for GPUs are compiled in another way for analysis")
    where = jax.sharding.SingleDeviceSharding(device)
    specs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where) for shape in shapes]
    program = jax.jit(jax.grad(function, tuple(range(len(shapes))))).lower(*specs)
    first, again, usual = (
        compiled.memory_analysis()
        for compiled in (
            jpipe.stages.compile_for_analysis(program, device),
            jpipe.stages.compile_for_analysis(program, device),
            program.compile(),
        )
    )
    for size in ("temp", "argument", "output", "alias"):
        sizes = {getattr(analysis, f"{size}_size_in_bytes") for analysis in (first, again, usual)}
        assert len(sizes) == 1, f"{size}: {sizes}"
    assert usual.temp_size_in_bytes > 0


def test_sixteen_devices_of_a_server_are_compiled_for(target):
    devices_of(target)
    name = "h100-80gb" if target.platform == "cuda" else "v5e"
    compiling = compiling_for(Topology(levels=({"count": 16, "bandwidth": 1e9},), device={"target": name}).device, 16)
    assert (compiling.kind, compiling.missing, len(compiling.devices)) == (target.name, "", 16)


def test_a_program_beyond_the_memory_of_a_tpu_says_how_much_it_needs(target):
    devices = devices_of(target)
    if target.platform != "tpu":
        pytest.skip("programs for GPUs are compiled whatever they need")
    spec = jax.ShapeDtypeStruct((2**16, 2**16), np.float32, sharding=jax.sharding.SingleDeviceSharding(devices[0]))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.jit(lambda x: jnp.sort(x @ x, axis=0) @ x).lower(spec).compile()
    needed, available = bytes_beyond_memory(caught.value)
    assert needed > 2**34
    assert available == pytest.approx(15.75 * 2**30)


def test_a_mesh_of_six_chips_is_an_error(target):
    devices = devices_of(target)
    plan = jpipe.Plan(schedule="gpipe", microbatches=2, stages=[{"layers": STACK.ids, "mesh": {"data": 6}}])
    pipe = jpipe.Pipeline(STACK, plan, loss, optax.adam(1e-3))
    if target.platform == "tpu":
        with pytest.raises(jpipe.InputError, match="expected meshes of 2, 4, 8, … TPU chips, found a mesh of 6"):
            pipe.costs(batch(12), compiled_for=devices)
    else:
        assert pipe.costs(batch(12), compiled_for=devices)[0].temporary > 0
