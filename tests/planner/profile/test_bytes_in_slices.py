"""The bytes of slices: profiles, also of one device of a mesh, beside the stages and the arrays of a pipeline."""

import jax
import numpy as np
import optax
import pytest

import jpipe
from jpipe_lm.config.model_config import ModelConfig
from jpipe_lm.models.layers import layers
from jpipe_planner import Topology
from jpipe_planner.machine.device import Device
from jpipe_planner.profile import compose
from jpipe_planner.profile.analyze import analyze
from jpipe_planner.profile.sharded import Degrees, Meshes
from jpipe_planner.profile.slices import SHORTEST
from jpipe_train.losses.cross_entropy import loss
from tests.jpipe.runtime.test_memory import peaks_of

LENGTH, SLICES = 64, (40, 24)


@pytest.fixture(scope="module")
def decoder():
    stack = layers(ModelConfig(depth=1, width=16, heads=2, vocab_size=12, seq_len=LENGTH))
    device = Device(name="one", flops={"float32": 1e9}, memory_bandwidth=1e15)
    return stack, analyze(stack, of, loss, optax.sgd(0.1), [2], device, policies=("none",), in_slices=True)


def of(rows: int):
    return (jax.ShapeDtypeStruct((rows, LENGTH), np.int32),) * 2


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [Degrees(data=2), Degrees(model=2)], ids=str)
def test_stages_in_slices_have_the_bytes_of_a_pipeline(decoder, degrees):
    """XLA chooses how residuals are sharded over `model`, so they are compared over `data` only."""
    stack, profile = decoder
    plan = jpipe.Plan.even(stack.ids, 3, "gpipe", 2, slices=SLICES, mesh=degrees.mesh)
    exact = jpipe.Pipeline(stack, plan, loss, optax.sgd(0.1), devices=jax.devices()[:6]).costs(of(4))
    costs = Meshes(profile, Topology.flat(6, 1e9)).of(degrees)[0].stage_costs(plan, 2)
    names = "inputs", "outputs", "carries", "carries_freed", "carry_message", "carry_gradient", "weights"
    for true, cost in zip(exact[1].by_slice, costs[1].by_slice, strict=True):
        assert {name: getattr(cost, name) for name in names} == {name: getattr(true, name) for name in names}
        assert degrees.model > 1 or cost.residuals == pytest.approx(true.residuals, rel=1e-3)


@pytest.mark.slow
def test_the_arrays_of_a_run_are_those_that_a_profile_predicts(decoder):
    stack, profile = decoder
    plan, batch = (
        jpipe.Plan.even(stack.ids, 2, "pipedream_flush", 3, slices=SLICES),
        tuple(np.ones((6, LENGTH), np.int32) for _ in range(2)),
    )
    measured, _ = peaks_of(jpipe.Pipeline(stack, plan, loss, optax.sgd(0.1)), batch, jax.devices()[:2])
    costs = profile.stage_costs(plan, 2)
    predicted = jpipe.simulate(jpipe.lower(plan, 5, **jpipe.programs.uses_by_costs(costs)), costs).held_bytes
    assert measured == pytest.approx(predicted, rel=0.05)


def test_a_profile_says_why_long_rows_are_not_cut(monkeypatch):
    def profiled(layer, length=2 * SHORTEST):
        rows = (jax.ShapeDtypeStruct((1, length, 3), np.float32),) * 2
        stack = jpipe.LayerStack({"layer": layer, "last": lambda x: x})
        device = Device(name="one", flops={"float32": 1e9}, memory_bandwidth=1e15)
        return analyze(stack, lambda _: rows, squares, optax.sgd(0.1), [1], device, policies=("none",))

    uncut = profiled(lambda x: x - x.mean(1, keepdims=True)).uncut
    assert uncut == "the model cannot be computed slice by slice: layers that mix positions: 'layer'"
    assert profiled(lambda x: x - x.mean(1, keepdims=True), SHORTEST).uncut == ""
    monkeypatch.setattr(compose, "_PRODUCTS", set())
    assert profiled(lambda x: x @ np.ones((3, 3), np.float32)).uncut.startswith("a kernel computes the attention of whole rows")


def squares(y, labels):
    return jax.numpy.square(y - labels).sum(), jax.numpy.float32(1)
