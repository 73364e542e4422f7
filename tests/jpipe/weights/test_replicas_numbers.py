"""Replicated stages equal the sequential reference bit for bit, with any number of replicas a stage."""

import math

import pytest

from jpipe import Plan
from tests.jpipe import models
from tests.jpipe.running import check_against_reference

STACK = models.rich_stack()
ROUND_ROBIN = [(2, 1, 1), (3, 2), (1, 3), (2, 3, 1), (15, 1), (1, 2, 1, 2), (3,)]


def plan_of(replicas, schedule, times=1, **fields) -> Plan:
    return Plan.even(STACK.ids, len(replicas), schedule, times * math.lcm(*replicas), replicas=replicas, **fields)


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("replicas", ROUND_ROBIN)
def test_round_robin_equals_the_sequential_reference_bit_for_bit(replicas):
    check_against_reference(STACK, plan_of(replicas, "pipedream"), drain_after={2, 3})


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize(
    ("replicas", "times", "fields"),
    [
        ((2, 1, 1), 3, {}),
        ((3, 2), 1, {"vertical_sync": True}),
        ((2, 1), 2, {"vertical_sync": True}),
        ((1, 3), 1, {"vertical_sync": True}),
        ((2, 1, 1), 1, {"update_every": "replicas"}),
        ((3, 2), 1, {"update_every": "replicas"}),
        ((2, 2), 3, {"update_every": "replicas", "vertical_sync": True}),
        ((2, 1, 2), 2, {"extra_in_flight": 1}),
        ((3, 1, 2), 1, {"max_in_flight": 2}),
        ((1, 1, 1, 1), 1, {"max_in_flight": 2, "vertical_sync": True}),
        ((2, 3), 1, {"sync_state": False}),
    ],
)
def test_options_of_round_robin_equal_the_sequential_reference_bit_for_bit(replicas, times, fields):
    check_against_reference(STACK, plan_of(replicas, "pipedream", times, **fields), drain_after={1, 5})


@pytest.mark.thinned(most=1)
@pytest.mark.parametrize("schedule", ["naive", "gpipe", "pipedream_flush", "pipedream_2bw"])
@pytest.mark.parametrize("replicas", [(2,), (3, 3), (2, 1, 1)])
def test_parallel_pipelines_equal_the_sequential_reference_bit_for_bit(replicas, schedule):
    times = 2 * len(replicas) if schedule == "pipedream_2bw" else 2
    check_against_reference(STACK, plan_of(replicas, schedule, times), drain_after={2, 6})
