"""Which processes of an elastic job start, and when it waits and gives up: states alone, without processes."""

import pytest

from jpipe_train.launch.local import slots
from jpipe_train.launch.local.slots import Limits, Slot

LIMITS = Limits(2, 4, max_failures=2, retry_after=100.0, shortage_limit=250.0)
ALL = (Slot(),) * 4


def failing(numbers: list[int], at: float = 0.0, before: tuple[Slot, ...] = ALL) -> tuple[Slot, ...]:
    """Return the slots after one slot after the other has failed at a time."""
    for number in numbers:
        before = slots.after_failure(before, [number], at, LIMITS)
    return before


@pytest.mark.parametrize(
    ("failed", "now", "startable", "wait"),
    [
        ([], 0, (0, 1, 2, 3), 0),
        ([2], 0, (0, 1, 2, 3), 0),  # it may have been bad luck
        ([2, 2], 0, (0, 1, 3), 0),
        ([2, 2], 100, (0, 1, 2, 3), 0),
        ([2, 2, 0, 0], 99, (1, 3), 0),
        ([2, 2, 0, 0, 1, 1], 0, (3,), 100),
        ([2, 2, 0, 0, 1, 1], 100, (0, 1, 2, 3), 0),
        ([2, 2, 2, 0, 0, 0, 1, 1, 1], 0, (3,), 200),  # twice as long
        ([2] * 4 + [0] * 4 + [1] * 4, 0, (3,), None),
    ],
)
def test_enough_processes_are_waited_for(failed, now, startable, wait):
    assert slots.startable(failing(failed), now) == startable
    assert slots.wait(failing(failed), now, now, LIMITS) == wait


def test_a_shortage_lasts_no_longer_than_its_limit():
    left = failing([2, 2, 0, 0, 1, 1], 200)
    assert slots.wait(left, 200, 200, LIMITS) == 100
    assert slots.wait(left, 200, 50, LIMITS) == 100
    assert slots.wait(left, 200, 49, LIMITS) is None
    assert slots.wait(left, 300, 0, LIMITS) == 0, "those that can be started are, however long it took"


def test_a_checkpoint_forgets_the_failures_of_those_that_wrote_it():
    left = failing([0, 1, 2, 2, 2])
    assert left == (Slot(1), Slot(1), Slot(3, 2, 200.0), Slot())
    assert slots.after_checkpoint(left, (0, 1, 3)) == (Slot(), Slot(), Slot(3, 2, 200.0), Slot())


def test_a_slot_that_is_back_can_be_started():
    left = failing([2, 2])
    assert slots.startable(left, 99) == (0, 1, 3)
    assert slots.startable(left, 100) == slots.startable(ALL, 0) == (0, 1, 2, 3)


def test_a_time_to_wait_stays_finite():
    (slot,) = slots.after_failure([Slot(500, 500)], [0], 0.0, LIMITS)
    assert slot.back_at == 100 * 2**10
