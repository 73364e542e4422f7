"""A schedule of one's own is registered once, under a name of its own. The contract of schedules holds one that is registered so."""

import dataclasses

import pytest

from jpipe import InputError, Plan, lower, simulate
from jpipe.schedules import SCHEDULES, register
from tests.two_by_two import TWO_BY_TWO


def test_plans_name_a_registered_schedule(two_by_two):
    assert SCHEDULES["two_by_two"] is TWO_BY_TWO is two_by_two
    plan = Plan.even("abcd", 2, "two_by_two", microbatches=4)
    assert Plan.from_json(plan.to_json()) == plan
    assert simulate(lower(plan, 1)).grid().count("*") == 2


def test_plans_do_not_name_one_that_is_not_registered():
    with pytest.raises(InputError, match="unknown schedule 'two_by_two'; "):
        Plan.even("abcd", 2, "two_by_two", microbatches=4)


def test_the_same_schedule_may_be_registered_again(two_by_two):
    before = dict(SCHEDULES)
    assert register(two_by_two) is two_by_two
    assert dict(SCHEDULES) == before


@pytest.mark.parametrize("name", ["gpipe", "two_by_two"])
def test_a_name_that_another_schedule_has_is_refused(two_by_two, name):
    before = dict(SCHEDULES)
    with pytest.raises(InputError, match=f"the name '{name}' belongs to another schedule; choose another name"):
        register(dataclasses.replace(two_by_two, name=name, versions_alive=lambda plan, s: 1))
    assert dict(SCHEDULES) == before


@pytest.mark.parametrize("name", ["", "two by two", "two,by", "\x1b[2J"])
def test_a_name_that_no_option_could_hold_is_refused(name):
    with pytest.raises(InputError, match="expected a name of letters, digits and underscores"):
        register(dataclasses.replace(TWO_BY_TWO, name=name))
    assert name not in SCHEDULES
