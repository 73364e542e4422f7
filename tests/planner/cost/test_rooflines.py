"""The rooflines of a plan's programs, compiled for this machine in place of a target."""

import dataclasses

import jax
import optax
import pytest

import jpipe
from jpipe_planner import Device
from jpipe_planner.cost.rooflines import ProgramRoofline, Rooflines, find_programs, find_whole, most_expensive
from jpipe_planner.machine.compiling import Compiling
from jpipe_planner.machine.roofline import Kernel
from tests.jpipe import models

ROWS, MICROBATCHES = 16, 4
BATCH = (jax.ShapeDtypeStruct((ROWS * MICROBATCHES, models.WIDTH), "float32"),) * 2
DEVICE = Device(target="v5e")  # for its rates


@pytest.fixture(scope="module")
def compiling():
    return Compiling((jax.devices()[0],), "cpu")


def pipeline(stages):
    stack = models.plain_stack()
    return jpipe.Pipeline(stack, jpipe.Plan.even(stack.ids, stages, "gpipe", MICROBATCHES), models.squares, optax.sgd(0.1))


def products(rows):
    """Return the FLOPs of the products in a dense layer's forward."""
    return 2 * rows * models.WIDTH**2


def test_programs_and_the_whole_step_compute_the_same_products(compiling):
    programs = find_programs(pipeline(2), BATCH, DEVICE, compiling)
    flops = {(one.stage, one.op): one.total("flops") for one in programs}
    forward = products(ROWS * MICROBATCHES)
    assert flops == {
        (0, "forward"): 2 * forward,
        (0, "backward"): 3 * forward,  # not the gradient of the input
        (0, "in_place"): 0,
        (1, "forward"): 2 * forward,
        (1, "backward"): 4 * forward,
        (1, "in_place"): 0,
    }
    assert [one.calls for one in programs] == [MICROBATCHES, MICROBATCHES, 1] * 2
    whole = find_whole(pipeline(1), BATCH, DEVICE, compiling)
    assert whole.total("flops") == 11 * forward
    assert whole.total("bytes") > 0


def test_equal_programs_of_another_plan_are_not_compiled_again(compiling, monkeypatch):
    known: dict = {}
    first = find_programs(pipeline(2), BATCH, DEVICE, compiling, known)
    monkeypatch.setattr("jpipe.stages._compile.compile_for_analysis", None)
    assert find_programs(pipeline(2), BATCH, DEVICE, compiling, known) == first


def kernel(name, seconds, runs=1, source="model.py:1"):
    return Kernel(name, "fusion", 8.0, 0.0, seconds, runs, source, "jit(f)/add")


def test_the_most_expensive_kernels_are_sums_over_equal_ones():
    forward = ProgramRoofline(0, "forward", 4, (kernel("a", 1.0), kernel("b", 1.0, 2), kernel("c", 1.0, source="model.py:2")))
    update = ProgramRoofline(0, "update", 1, (kernel("a", 5.0),))
    found = most_expensive([forward, dataclasses.replace(forward, stage=1), update], 2)
    assert [(op, each.runs, each.seconds, each.source) for op, each in found] == [
        ("forward", 24, 1.0, "model.py:1"),
        ("forward", 8, 1.0, "model.py:2"),
    ]


def test_the_share_is_the_throughput_relative_to_the_whole_step():
    stage, whole = ProgramRoofline(0, "forward", 4, (kernel("a", 0.5, 2),)), ProgramRoofline(None, "train_step", 1, (kernel("a", 3.0),))
    assert Rooflines((stage,), whole).share == 0.75
    assert Rooflines((stage,), None, "too large").share is None


def test_a_whole_step_beyond_the_memory_says_how_much_it_needs(compiling, monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.20G of 15.75G hbm.")

    monkeypatch.setattr(jpipe.stages, "compile_for_analysis", fail)
    with pytest.raises(jpipe.InputError, match=r"one device has 15\.8 GiB, and it needs 17\.2 GiB"):
        find_whole(pipeline(1), BATCH, DEVICE, compiling)
