"""The options of schedules: one declaration, which plans hold flat and give as one value."""

import json

import pytest

from jpipe import InputError, Plan
from jpipe.schedules import NO_OPTIONS, SCHEDULES, PlainShape, PlanOptions

LAYERS = "abcd"


def test_each_option_is_read_by_a_schedule():
    assert PlanOptions.model_fields.keys() == {option for schedule in SCHEDULES.values() for option in schedule.options}


def test_a_plan_has_the_options_as_fields_and_as_one_value():
    plan = Plan.even(LAYERS, 2, "pipedream", 4, extra_in_flight=1, flush_first=2)
    assert (plan.extra_in_flight, plan.flush_first, plan.vertical_sync) == (1, 2, False)
    assert plan.options == PlanOptions(extra_in_flight=1, flush_first=2)
    assert Plan.even(LAYERS, 2).options == NO_OPTIONS
    changed = plan.model_copy(update={"flush_first": 0})
    assert changed.options == PlanOptions(extra_in_flight=1)
    keys = list(json.loads(plan.to_json()))
    assert keys[:5] == ["format", "schedule", "microbatches", "stages", "extra_in_flight"]
    assert keys[-1] == "predicted"


@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": "pipedream", "replicas": [2, 1], "update_every": "replicas", "extra_in_flight": 1},
        {"schedule": "pipedream", "vertical_sync": True, "flush_first": 1, "max_in_flight": 1},
        {"schedule": "pipedream_2bw", "num_stages": 4, "chunks_per_rank": 2, "split_backward": "early"},
        {"schedule": "zb_v", "num_stages": 4},
    ],
)
def test_a_schedule_says_the_same_of_a_plan_and_of_its_numbers(fields):
    plan = Plan.even(LAYERS, **{"num_stages": 2, "microbatches": 4, **fields})
    shape, schedule = PlainShape(plan.schedule, 4, plan.replicas, plan.options, plan.pipeline_ranks), SCHEDULES[plan.schedule]
    assert schedule.delays(shape) == schedule.delays(plan)
    for s in range(plan.depth):
        assert schedule.in_flight(shape, s) == schedule.in_flight(plan, s)
        assert schedule.first_op(shape, s) == schedule.first_op(plan, s)
        assert [schedule.version(shape, s, k) for k in range(20)] == [schedule.version(plan, s, k) for k in range(20)]
    for p in range(len(plan.pipeline_ranks)):
        assert list(schedule.computations(shape, p, 0, 0, 3)) == list(schedule.computations(plan, p, 0, 0, 3))


def test_removed_options_that_are_off_are_ignored():
    plan = Plan.even(LAYERS, 2, "pipedream_2bw", 2)
    old = json.loads(plan.to_json()) | {"noam": False, "scale_learning_rate": False}
    assert Plan.from_json(json.dumps(old)) == plan
    for name in ("noam", "scale_learning_rate"):
        with pytest.raises(InputError, match=rf"^plan\.json: the option {name} no longer exists, found True; remove it: "):
            Plan.from_json(json.dumps(old | {name: True}), where="plan.json")
