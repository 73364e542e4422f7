"""The contract of every schedule of the registry: what it says of orders, versions and memory is what its programs do.

`test_schedules_numbers` and `test_replicas_numbers` hold the numbers of all of them against the sequential reference.
"""

import itertools
from collections import Counter

import pytest

from jpipe import Plan, lower, simulate
from jpipe.programs import batches_until_full
from jpipe.schedules import SCHEDULES
from tests.jpipe import models
from tests.jpipe.running import check_against_reference

STACK = models.rich_stack()
REPLICAS = [(1,), (1, 1), (1, 1, 1, 1), (2, 1), (1, 2), (2, 2), (2, 1, 3)]
CHANGES = {"extra_in_flight": 2, "vertical_sync": True, "noam": True, "update_every": "replicas", "flush_first": 2}
"""Of each option of a schedule a value that is not its default."""


@pytest.fixture(params=[*SCHEDULES, "two_by_two"])
def schedule(request):
    """Each schedule of the registry, and one that was added to it with nothing else."""
    if request.param not in SCHEDULES:
        request.getfixturevalue(request.param)
    return SCHEDULES[request.param]


def plans(schedule):
    """Legal plans of all kinds: straight and replicated, few and many microbatches, with each option of the schedule."""
    found = []
    for replicas, m, option in itertools.product(REPLICAS, (1, 2, 5, 6, 18), (None, *schedule.options)):
        fields = {"layers": "abcd", "num_stages": len(replicas), "schedule": schedule.name, "microbatches": m, "replicas": replicas}
        fields |= {option: CHANGES[option]} if option else {}
        if models.is_legal(**fields):
            found.append(Plan.even(**fields))
    assert len(found) > 15
    return found


def test_orders_are_complete_and_each_computation_is_legal(schedule):
    for plan in plans(schedule):
        for s, replica in plan.workers:
            order = list(schedule.computations(plan, s, replica, 1, 4))
            own = list(range(plan.microbatches + replica, 4 * plan.microbatches, plan.replicas[s]))
            assert {entry.stage for entry in order} == {s}
            assert [entry.microbatch for entry in order if entry.op != "B"] == own, "forwards in order, each once"
            assert [entry.microbatch for entry in order if entry.op != "F"] == own, "backwards in order, each once"
            steps = [(op, entry.microbatch) for entry in order for op in entry.op]
            assert all(steps.index(("F", k)) < steps.index(("B", k)) for k in own)
            kinds = Counter("both" if entry.op == "FB" else "one" for entry in order)
            assert len(kinds) == 1, "all as one program or none"
            assert schedule.fuses(plan, s) == ("both" in kinds)
            assert s == plan.depth - 1 or "both" not in kinds, "a backward of another stage needs that of the next one"


def test_what_is_in_flight_is_what_the_order_does(schedule):
    for plan in plans(schedule):
        batches = 1 if schedule.flushes else batches_until_full(plan) + 2
        for s, replica in plan.workers:
            most = begun = 0
            for entry in schedule.computations(plan, s, replica, 0, batches):
                begun += entry.op != "B"
                most = max(most, begun)
                begun -= entry.op != "F"
            assert most == schedule.in_flight(plan, s)


def test_versions_do_not_decrease_and_are_those_of_the_last_batch_after_a_flush(schedule):
    for plan in plans(schedule):
        for s in range(plan.depth):
            read = [schedule.version(plan, s, k) for k in range(5 * plan.microbatches)]
            assert read == sorted(read)
            assert read[0] == 0
            assert all(version * plan.microbatches_per_update(s) <= k for k, version in enumerate(read))
            if schedule.flushes:
                assert read == [k // plan.microbatches for k in range(len(read))]


def test_programs_are_verified_and_hold_the_versions_that_are_said(schedule):
    for plan in plans(schedule):
        prediction = simulate(lower(plan, batches_until_full(plan) + 2, global_norm=schedule.flushes))
        for s, workers in enumerate(plan.stage_workers):
            assert max(prediction.versions_alive[w] for w in workers) == schedule.versions_alive(plan, s)


@pytest.mark.parametrize(("m", "replicas"), [(5, (1, 1, 1)), (6, (1, 2))])
def test_numbers_of_a_schedule_that_was_added_are_those_of_the_sequential_reference(two_by_two, m, replicas):
    plan = Plan.even(STACK.ids, len(replicas), two_by_two.name, m, replicas=replicas)
    check_against_reference(STACK, plan, drain_after={1})
