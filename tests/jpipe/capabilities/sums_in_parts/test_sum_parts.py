"""Sums of gradients in parts: the numbers are those of one sum, bit for bit, under every schedule and option."""

import jax
import numpy as np
import pytest

from jpipe import InputError, LayerStack, Pipeline, Plan, Stage, lower
from jpipe.capabilities.sums_in_parts.option import layers_by_part
from jpipe.capabilities.sums_in_parts.program import ComputePart, SumPart
from tests.jpipe import models
from tests.jpipe.running import check_against_reference, check_close, check_equal, fresh, train, train_as_one_function

STACK = models.rich_stack()
FLUSH = {"schedule": "pipedream_flush"}


def plan_of(stack, replicas, **fields) -> Plan:
    stages = len(replicas) if isinstance(replicas, tuple) else 1
    return Plan.even(stack.ids, num_stages=stages, replicas=replicas, **{"sum_parts": 3, **fields})


@pytest.mark.slow
@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(
    ("replicas", "fields", "options"),
    [
        (2, {"schedule": "gpipe", "microbatches": 4}, {"clip_global_norm": 2.5}),  # data parallelism
        (3, {"schedule": "pipedream_2bw", "microbatches": 3}, {}),  # each replica has one microbatch
        ((2, 2), {"schedule": "pipedream_2bw", "microbatches": 4}, {"clip_global_norm": 2.5}),
        ((3, 3), FLUSH | {"microbatches": 6, "recompute": "full"}, {}),
        ((2, 1), {"schedule": "pipedream", "microbatches": 2, "update_every": "replicas"}, {}),
        ((2, 2), {"schedule": "zb_h1", "microbatches": 4}, {"clip_stage_norm": 2.5}),
        ((2, 2), {"schedule": "pipedream_2bw", "microbatches": 4, "split_backward": "early"}, {}),
        ((1, 2), {"schedule": "gpipe", "microbatches": 2}, {"skip_nonfinite": True}),
        (2, {"schedule": "gpipe", "microbatches": 4, "sync_state": False}, {}),
    ],
)
def test_the_numbers_equal_the_sequential_reference_bit_for_bit(replicas, fields, options):
    plan = plan_of(STACK, replicas, **fields)
    program = lower(plan, 2, global_norm="clip_global_norm" in options)
    assert {i.part for i in program.instructions if isinstance(i, ComputePart)} >= {0, 1}
    assert {i.part for i in program.instructions if isinstance(i, SumPart)} >= {0}
    check_against_reference(STACK, plan, {2, 6}, **options)


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize(
    ("stack", "replicas", "fields"),
    [
        (models.tied_stack(), 2, {}),  # the shared matrix is complete with the part of the first layer that uses it
        pytest.param(models.tied_stack(), (2, 2), {}, marks=pytest.mark.slow),
        pytest.param(STACK, 2, {"shard_optimizer": True}, marks=pytest.mark.slow),
    ],
)
def test_shared_parameters_and_a_shared_optimizer_equal_one_sum_bit_for_bit(stack, replicas, fields):
    trained = []
    for sum_parts in (1, 3):
        plan = plan_of(stack, replicas, schedule="gpipe", microbatches=4, sum_parts=sum_parts, **fields)
        devices = [jax.devices()[s] for s, _ in plan.workers]
        trained.append(train(Pipeline(stack, plan, models.masked_squares, models.momentum(), devices), models.masked_batches(3, 4)))
    check_equal(*trained)


@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("replicas", "fields"),
    [
        (2, {"schedule": "gpipe", "mesh": {"data": 2}, "fsdp": True}),
        ((2, 1), {"schedule": "pipedream_2bw", "mesh": {"model": 2}}),
        ((1, 2), {"schedule": "zb_h1", "mesh": {"data": 2, "model": 2}}),
        (2, {"schedule": "pipedream_flush", "mesh": {"model": 2}, "recompute": "full"}),
        (2, {"schedule": "gpipe", "mesh": {"data": 2}, "fsdp": True, "tied": True}),
    ],
)
def test_on_meshes_the_numbers_equal_those_of_one_sum(replicas, fields):
    fields = {"microbatches": 4, **fields}
    stack, trained = models.wide_stack(fields.pop("tied", False)), []
    for sum_parts in (1, 3):
        plan = plan_of(stack, replicas, sum_parts=sum_parts, **fields)
        assert any(isinstance(i, SumPart) for i in lower(plan, 2).instructions) is (sum_parts > 1)
        pipe = Pipeline(stack, plan, models.masked_squares, models.momentum(), clip_global_norm=2.5)
        trained.append(train(pipe, models.masked_batches(4, 4, dtype=np.float64, rows=4, width=4)))
    check_close(*trained)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "schedule", [pytest.param("gpipe", marks=pytest.mark.slow), pytest.param("pipedream_2bw", marks=pytest.mark.exhaustive)]
)
def test_in_float64_the_numbers_equal_one_gradient_of_the_whole_model(schedule):
    stack = LayerStack({"first": models.dense(), "noise": models.noisy(), "mix": models.dense(4), "out": models.dense()})
    plan = plan_of(stack, (3,), schedule=schedule, microbatches=6)
    pipe = Pipeline(stack, plan, models.masked_squares, models.momentum(), jax.devices()[:1] * 3, clip_global_norm=2.5)
    batches = models.masked_batches(5, 6, dtype=np.float64)
    state = fresh(pipe, batches)
    expected = train_as_one_function(pipe, batches, state)
    check_close(train(pipe, batches, state), expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"replicas": 2, "sum_parts": (1, 2)}, r"stages\.0\.sum_parts: expected numbers of layers that sum to 2, found \[1, 2\]"),
        ({"sum_parts": (1, 1)}, r"stages\.0\.sum_parts: expected a stage with replicas, found a stage without replicas"),
        ({"replicas": 2, "sum_parts": (2, 0)}, r"stages\.0\.sum_parts\.1: "),
    ],
)
def test_plans_that_cannot_sum_in_parts(fields, message):
    with pytest.raises(InputError, match=message):
        Plan(schedule="gpipe", microbatches=2, stages=[{"layers": ("a", "b"), **fields}])


def test_even_parts_are_of_stages_with_replicas_and_follow_new_layers():
    plan = Plan.even("abcdefg", 2, "gpipe", 2, replicas=(2, 1), sum_parts=3)
    assert [stage.sum_parts for stage in plan.stages] == [(2, 1, 1), ()]
    assert layers_by_part(plan.stages[0]) == (("d",), ("c",), ("a", "b"))
    assert plan.stages[0].with_layers("ab") == Stage(layers=("a", "b"), replicas=2, sum_parts=(1, 1))
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(InputError, match="plan: sum_parts: expected an integer of 1 or more, found 0"):
        Plan.even("ab", 1, "gpipe", 2, replicas=2, sum_parts=0)
