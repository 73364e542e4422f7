"""Brief simulations, of programs in compact form, equal those instruction by instruction."""

import dataclasses

import pytest

from jpipe import Plan, lower, simulate
from jpipe.programs.prediction import compact
from jpipe.schedules import SCHEDULES
from tests.jpipe.programs.test_batches import costs_of, in_servers, plan_of

ORDERED = {"order": ["F0.0 F0.1 I0.0 W0.0 B0.1", "F1.0 B1.0 F1.1 I1.1 W1.1"]}
PLANS = {f"{name}, {replicas}": plan_of(name, replicas) for name in SCHEDULES if name != "auto_zero_bubble" for replicas in (1, 2)} | {
    "order": Plan.even("ab", 2, "auto_zero_bubble", 2, **ORDERED),
    "pipedream, 4 2 1": Plan.even("abc", 3, "pipedream", 8, replicas=[4, 2, 1]),
    "pipedream, 1 2, replicas": Plan.even("ab", 2, "pipedream", 4, replicas=[1, 2], update_every="replicas"),
    "pipedream, vertical sync": Plan.even("ab", 2, "pipedream", 4, vertical_sync=True),
    "2BW, early, flush first": Plan.even("abc", 3, "pipedream_2bw", 8, replicas=2, split_backward="early", flush_first=1),
    "flush, early": Plan.even("abc", 3, "pipedream_flush", 4, split_backward="early", extra_in_flight=1),
    "2BW, parts": Plan.even("abcd", 2, "pipedream_2bw", 8, replicas=2, sum_parts=2),
    "flush, parts": Plan.even("abcd", 1, "pipedream_flush", 8, replicas=4, sum_parts=3),
}


def check(plan, program):
    costs = costs_of(plan)
    assert compact(program) is not None
    brief, full = (simulate(program, costs, in_servers, brief=is_brief) for is_brief in (True, False))
    assert brief.timeline == full.timeline
    names = ("seconds", "held_bytes", "peak_bytes", "moved_bytes", "versions_alive", "host_bytes", "host_moved_bytes")
    assert [getattr(brief, name) for name in names] == [getattr(full, name) for name in names]
    assert brief.bubble == pytest.approx(full.bubble, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", PLANS)
def test_a_brief_simulation_has_the_times_and_bytes_of_a_whole_one(name):
    check(PLANS[name], lower(PLANS[name], 3))


def test_a_program_of_some_workers_is_simulated_briefly():
    plan = PLANS["zb_h1, 2"]
    check(plan, lower(plan, 3, workers=[workers[1] for workers in plan.stage_workers]))


def test_the_changes_of_an_agreement_under_way_count_in_a_part_in_which_it_neither_begins_nor_is_applied():
    plan = Plan.even("ab", 2, "pipedream_flush", 4, replicas=2, agree={"every": 4, "delay": 3})
    check(plan, lower(plan, 6, begin=5, start=5))


def test_programs_with_other_instructions_are_simulated_one_by_one():
    plan = plan_of("gpipe", 2)
    costs = [dataclasses.replace(cost, shared=(2,)) for cost in costs_of(plan)]
    for options in ({"global_norm": True}, {"shared": ((0, 1),)}):
        program = lower(plan, 2, **options)
        assert compact(program) is None
        brief, full = (simulate(program, costs, in_servers, brief=is_brief) for is_brief in (True, False))
        assert (brief.timeline, brief.peak_bytes) == (full.timeline, full.peak_bytes)
