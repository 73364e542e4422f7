"""Fewer microbatches in flight than keep all stages busy: no plan deadlocks, and time and memory follow (PipeDream, figure 18)."""

import itertools

import pytest

import jpipe
from jpipe import InputError, Plan
from jpipe.programs import StageCost
from jpipe.schedules import SCHEDULES


@pytest.mark.parametrize("schedule", ["pipedream", "pipedream_2bw", "pipedream_flush"])
@pytest.mark.parametrize(("limit", "in_flight"), [(1, [1] * 4), (2, [2, 2, 1, 1]), (3, [3, 3, 2, 1]), (4, [4, 3, 2, 1]), (5, [4, 3, 2, 1])])
def test_stages_with_equally_many_microbatches_in_flight_compute_in_turn(schedule, limit, in_flight):
    plan = Plan.even("abcd", 4, schedule, 24, max_in_flight=limit)
    ticks = 3 * max(map(in_flight.count, in_flight))  # of a microbatch: each stage computes for 3
    window = jpipe.programs.predict_window(plan, [StageCost(forward=1, backward=2, residuals=10)] * 4, 2, 2)
    flush = 12 - ticks if SCHEDULES[schedule].flushes else 0  # at most, until the first forward of the next batch
    assert 24 * ticks <= window.step_seconds <= 24 * ticks + flush
    assert [SCHEDULES[schedule].in_flight(plan, s) for s in range(4)] == in_flight
    assert window.held_bytes[0] == 10 * min(limit, 4)


@pytest.mark.thinned(most=3)
@pytest.mark.parametrize("replicas", [(1, 3), (1, 2, 4), (2, 3, 1), (3, 1, 2), (2, 1), (4, 2, 1)])
def test_no_limit_deadlocks_whatever_the_replicas(replicas):
    """`simulate` also verifies versions and numbers in flight."""
    for limit, options in itertools.product(range(1, 6), ({}, {"vertical_sync": True})):
        plan = Plan.even("abcd", len(replicas), "pipedream", 12, replicas=replicas, max_in_flight=limit, **options)
        prediction = jpipe.simulate(jpipe.lower(plan, 4))
        in_flight = [SCHEDULES["pipedream"].in_flight(plan, s) for s in range(len(replicas))]
        held = [(n - 1) * count for n, count in zip(in_flight, replicas, strict=True)]
        assert max(in_flight) <= limit
        assert held == sorted(held, reverse=True)
        assert prediction.seconds > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "gpipe"}, "max_in_flight: this is an option of the schedules 'pipedream_flush', 'pipedream', 'pipedream_2bw'"),
        (
            {"schedule": "pipedream", "extra_in_flight": 1},
            "max_in_flight: expected no extra_in_flight, found 1: one lowers the number that the other raises; remove one of them",
        ),
        (
            {"schedule": "pipedream", "num_stages": 4, "chunks_per_rank": 2},
            "max_in_flight: expected no chunks_per_rank, found 2: the order of several stages on a rank",
        ),
    ],
)
def test_where_there_is_no_such_limit_the_error_says_so(fields, message):
    with pytest.raises(InputError, match=message):
        Plan.even("abcd", **{"num_stages": 2, "microbatches": 8, "max_in_flight": 2, **fields})
