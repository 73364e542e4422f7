"""Stages on meshes of GPUs and TPUs, and transfers and sums between two hosts, compile with the collectives that they should have."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from jpipe import InputError, LayerStack, Pipeline, Plan
from jpipe.processes._connections import Reduction
from tests.jpipe import models
from tests.targets.compiled import collectives, compile_pipeline, programs_of
from tests.targets.conftest import hosts_of

pytestmark = pytest.mark.targets
MESHES = {
    "data 2": ({"data": 2}, False),
    "fsdp 2": ({"data": 2}, True),
    "model 2": ({"model": 2}, False),
    "data 2, model 2": ({"data": 2, "model": 2}, False),
    "fsdp 2, model 2": ({"data": 2, "model": 2}, True),
    "fsdp 2, model 4": ({"data": 2, "model": 4}, True),
    "data 8": ({"data": 8}, False),
}
SELDOM = ("fsdp 2", "model 2", "data 2, model 2", "fsdp 2, model 4", "data 8")
"""They are much like the others: only `make test-targets PYTEST_ARGS="-m targets"` runs these."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.exhaustive) if name in SELDOM else name for name in MESHES])
def test_a_stage_on_a_mesh(name, devices):
    """The rows' devices add up gradients once per update; products over a sharded dim need a sum; only fsdp gathers."""
    mesh, fsdp = MESHES[name]
    axes = {"w": ("embed", "mlp"), "b": ("mlp",)}, {"w": ("mlp", "embed")}
    layers = {name: replace(models.dense(width), axes=axes) for name, width, axes in zip("ab", (512, 256), axes, strict=True)}
    stack = LayerStack({**layers, "end": lambda x: x})
    stages = [{"layers": ids, "mesh": mesh, "fsdp": fsdp} for ids in (("a", "b"), ("end",))]
    plan = Plan(stages=stages, schedule="gpipe", microbatches=1)
    pipe = Pipeline(stack, plan, models.squares, optax.sgd(0.05, momentum=0.9), clip_global_norm=1.0)
    batch = (jax.ShapeDtypeStruct((128, 256), jnp.float32),) * 2
    programs = programs_of(compile_pipeline(pipe, batch, devices))
    forward, backward, update = (programs[name][0] for name in ("forward", "backward", "in_place"))
    assert ("all-reduce" in collectives(forward)) == ("model" in mesh)
    assert bool(collectives(backward) & {"all-reduce", "reduce-scatter"}) == fsdp
    is_late = "data" in mesh and (not fsdp or "model" in mesh)  # fsdp cannot shard a bias that is sharded over model
    assert [collectives(program) for program in programs.get("sum_devices", [])] == [{"all-reduce"}] * is_late
    assert ("all-gather" in collectives(forward)) == fsdp
    assert not collectives(update)
    assert ("all-reduce" in collectives(programs["sum_squares"][0])) == (fsdp or "model" in mesh)


@pytest.mark.parametrize("mesh", [{}, {"data": 2}], ids=["one device", "mesh"])
def test_transfers_and_sums_between_two_hosts(mesh, target, two_hosts):
    """What process 0 of two compiles: to the stage in process 1, and the sum with the replica there."""
    size = 2 if mesh else 1
    devices = [device for host in two_hosts for device in host[:size]]
    stack = LayerStack({"a": models.dense(256), "b": models.tracking(256)})
    batch = (jax.ShapeDtypeStruct((64, 256), jnp.float32),) * 2
    for fields in ({"num_stages": 2}, {"num_stages": 1, "replicas": 2}, {"num_stages": 1, "replicas": 2, "shard_optimizer": True}):
        plan = Plan.even(stack.ids, schedule="pipedream_flush", microbatches=2, mesh=mesh, **fields)
        pipe = Pipeline(stack, plan, models.squares, optax.sgd(0.05, momentum=0.9), devices)
        executor = pipe._compile(batch, (), {})
        assert executor._transport._used


def test_sums_of_three_and_four_hosts(target):
    """Each adds up a share and sends it to all; on TPUs a fourth is refused, for which XLA's compiler may abort the process."""
    firsts = [devices[0] for devices in hosts_of(target, 4)]
    spec = {"w": jax.ShapeDtypeStruct((128, 128), jnp.float32), "b": jax.ShapeDtypeStruct((7,), jnp.float32)}
    Reduction(firsts[:3]).compile(spec)
    if target.platform == "tpu":
        with pytest.raises(InputError, match="replicas: expected a stage's replicas in at most 3 processes on TPUs, found 4: libtpu"):
            Reduction(firsts)
    else:
        Reduction(firsts).compile(spec)
