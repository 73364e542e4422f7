"""The contract of every schedule of the registry: what it says of orders, versions and memory is what its programs do.

`test_schedules_numbers` and `test_replicas_numbers` hold the numbers of all of them against the sequential reference.
"""

import functools
import itertools
from collections import Counter

import pytest

from jpipe import InputError, Plan, lower, simulate
from jpipe.programs import StageCost, batches_until_full
from jpipe.schedules import SCHEDULES, greedy_order, written_order
from tests.jpipe import models
from tests.jpipe.running import check_against_reference

STACK = models.rich_stack()
REPLICAS = [(1,), (1, 1), (1, 1, 1, 1), (2, 1), (1, 2), (2, 2), (2, 1, 3)]
CHUNKS = [((1, 1), 2), ((1,) * 4, 2), ((1,) * 6, 2), ((1,) * 6, 3), ((2,) * 4, 2), ((1, 2, 1, 2), 2)]
"""Replicas of all stages, and how many stages a rank runs."""
CHANGES = {
    "extra_in_flight": 2,
    "max_in_flight": 2,
    "vertical_sync": True,
    "update_every": "replicas",
    "flush_first": 2,
    "split_backward": "early",
}
"""Of each option of a schedule a value that is not its default."""


@pytest.fixture(params=[*SCHEDULES, "two_by_two"])
def schedule(request):
    """Return each schedule of the registry, and one that only adds itself to it."""
    if request.param not in SCHEDULES:
        request.getfixturevalue(request.param)
    return SCHEDULES[request.param]


@functools.cache
def plans(schedule):
    """Return legal plans of all kinds: straight, in chunks and replicated, few and many microbatches, and each option of the schedule."""
    cases = []
    shapes = [(replicas, 1) for replicas in REPLICAS] + CHUNKS
    options = [None, *(option for option in schedule.options if option in CHANGES)]
    for (replicas, chunks), m, option in itertools.product(shapes, (1, 2, 5, 6, 18), options):
        if option and m in (2, 18):
            continue
        fields = {"layers": "abcdef", "num_stages": len(replicas), "microbatches": m, "replicas": replicas}
        fields |= {option: CHANGES[option]} if option else {}
        cases += legal(schedule, fields, chunks)
    assert len(cases) > 9
    return cases


def legal(schedule, fields, chunks):
    """Return the legal plans of a schedule: at most one, or several for `auto_zero_bubble`."""
    if schedule.name == "auto_zero_bubble":
        return [plan for name in ("looped_bfs", "zb_v") for plan in with_order(name, fields, chunks)]
    try:
        return [Plan.even(schedule=schedule.name, chunks_per_rank=chunks, **fields)]
    except InputError:
        return []


def with_order(name, fields, chunks):
    """Return plans whose order is data: that of another schedule, and one computed from times."""
    try:
        other = Plan.even(schedule=name, chunks_per_rank=chunks, **fields)
    except InputError:
        return []
    orders = [written_order(other)]
    if len(set(other.replicas)) == 1:
        costs = [StageCost(backward_weight=1 + s % 2, backward=2 + s % 2) for s in range(other.depth)]
        orders.append(greedy_order(other, costs, limits=chunks + 1, latency=0.5))
    return [Plan.even(schedule="auto_zero_bubble", ranks=other.pipeline_ranks, order=order, **fields) for order in orders]


def rank_replicas(plan):
    """Return each rank and replica with its stages."""
    return [(p, replica, stages) for p, stages in enumerate(plan.pipeline_ranks) for replica in range(plan.replicas[stages[0]])]


def test_orders_are_complete_and_each_computation_is_legal(schedule):
    for plan in plans(schedule):
        for p, replica, stages in rank_replicas(plan):
            order = list(schedule.computations(plan, p, replica, 1, 4))
            microbatches = list(range(plan.microbatches + replica, 4 * plan.microbatches, plan.replicas[stages[0]]))
            assert {entry.stage for entry in order} == set(stages)
            for s in stages:
                check_stage(plan, s, [entry for entry in order if entry.stage == s], microbatches)


def check_stage(plan, s, order, microbatches):
    """Check what one replica of a stage computes for its own microbatches."""
    kinds = Counter(entry.op for entry in order)
    assert [entry.microbatch for entry in order if entry.is_forward] == microbatches, "forwards in order, each once"
    assert [entry.microbatch for entry in order if entry.gives_gradient] == microbatches, "backwards in order, each once"
    assert [entry.microbatch for entry in order if entry.finishes] == microbatches, "backwards for weights in order, each once"
    halves = {"F": "F", "B": "IW", "FB": "FIW", "I": "I", "W": "W", "FI": "FI"}
    steps = [(half, entry.microbatch) for entry in order for half in halves[entry.op]]
    assert all(steps.index(("F", k)) < steps.index(("I", k)) < steps.index(("W", k)) for k in microbatches)
    fused = {op: kinds[op] for op in ("FB", "FI") if kinds[op]}
    assert fused in ({}, {"FB": len(microbatches)}, {"FI": len(microbatches)}), "all as one program or none"
    assert SCHEDULES[plan.schedule].fuses(plan, s) == ("FB" in fused)
    assert s == plan.depth - 1 or not fused, "a backward of another stage needs that of the next one"


def test_in_flight_counts_follow_from_the_order(schedule):
    for plan in plans(schedule):
        batches = 1 if schedule.flushes else batches_until_full(plan) + 2 * schedule.period(plan) + 1
        for p, replica, stages in rank_replicas(plan):
            most, in_flight = Counter[int](), Counter[int]()
            for entry in schedule.computations(plan, p, replica, 0, batches):
                in_flight[entry.stage] += entry.is_forward
                most[entry.stage] = max(most[entry.stage], in_flight[entry.stage])
                in_flight[entry.stage] -= entry.finishes
            assert most == {s: schedule.in_flight(plan, s) for s in stages}


def test_versions_do_not_decrease_and_are_those_of_the_last_batch_after_a_flush(schedule):
    for plan in plans(schedule):
        for s in range(plan.depth):
            read = [schedule.version(plan, s, k) for k in range(5 * plan.microbatches)]
            assert read == sorted(read)
            assert read[0] == 0
            assert all(version * plan.microbatches_per_update(s) <= k for k, version in enumerate(read))
            if schedule.flushes:
                assert read == [k // plan.microbatches for k in range(len(read))]


@pytest.mark.parametrize("every", [8, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_programs_are_verified_and_hold_the_versions_that_are_said(schedule, every):
    for plan in plans(schedule)[::every]:
        prediction = simulate(lower(plan, batches_until_full(plan) + 2, global_norm=schedule.flushes))
        for s, workers in enumerate(plan.stage_workers):
            assert max(prediction.versions_alive[w] for w in workers) == schedule.versions_alive(plan, s)


@pytest.mark.parametrize(("m", "replicas"), [pytest.param(5, (1, 1, 1), marks=pytest.mark.exhaustive), (6, (1, 2))])
def test_numbers_of_a_schedule_that_was_added_are_those_of_the_sequential_reference(two_by_two, m, replicas):
    plan = Plan.even(STACK.ids, len(replicas), two_by_two.name, m, replicas=replicas)
    check_against_reference(STACK, plan, drain_after={1})
