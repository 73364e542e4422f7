"""Which processes of an elastic job start, and when it waits and gives up: states alone, without processes."""

import pytest

from jpipe_train.launch.local.launch_request import Request
from jpipe_train.launch.local.slots import Slots

LIMITS = Request((), elastic="2:4", max_failures=2, retry_after=100.0, shortage_limit=250.0)


def after(failed: list[int], at: float = 0.0) -> Slots:
    """Return the slots after one slot after the other has failed at a time."""
    slots = Slots(LIMITS)
    for number in failed:
        slots.fail(number, at)
    return slots


@pytest.mark.parametrize(
    ("failed", "now", "startable", "wait"),
    [
        ([], 0, [0, 1, 2, 3], 0),
        ([2], 0, [0, 1, 2, 3], 0),  # it may have been bad luck
        ([2, 2], 0, [0, 1, 3], 0),
        ([2, 2], 100, [0, 1, 2, 3], 0),
        ([2, 2, 0, 0], 99, [1, 3], 0),
        ([2, 2, 0, 0, 1, 1], 0, [3], 100),
        ([2, 2, 0, 0, 1, 1], 100, [0, 1, 2, 3], 0),
        ([2, 2, 2, 0, 0, 0, 1, 1, 1], 0, [3], 200),  # twice as long
        ([2] * 4 + [0] * 4 + [1] * 4, 0, [3], None),
    ],
)
def test_enough_processes_are_waited_for(failed, now, startable, wait):
    slots = after(failed)
    assert slots.startable(now) == startable
    assert slots.wait(now) == wait


def test_a_shortage_lasts_no_longer_than_its_limit():
    for since, wait in (200, 100), (50, 100), (49, None):
        slots = after([2, 2, 0, 0, 1, 1], 200)
        slots.wait(since)
        assert slots.wait(200) == wait
    assert slots.wait(300) == 0, "those that can be started are, however long it took"


def test_a_checkpoint_forgets_the_failures_of_those_that_wrote_it():
    slots = after([0, 1, 2, 2, 2])
    slots.save([0, 1, 3])
    assert slots.failures == [0, 0, 3, 0]
    assert slots.startable(199) == [0, 1, 3], "one that did not take part stays left out"
    slots.save([2])
    assert slots.fail(2, 300) == 0
    assert slots.fail(2, 300) == 100, "as at first"


def test_a_checkpoint_ends_a_shortage():
    slots = after([2, 2, 0, 0, 1, 1], 200)
    slots.wait(0)
    slots.save([])
    assert slots.wait(200) == 100


def test_a_time_to_wait_stays_finite():
    slots = after([0] * 500)
    assert slots.fail(0, 0.0) == 100 * 2**10
