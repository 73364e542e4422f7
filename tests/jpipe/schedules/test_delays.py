"""The delay of an update: the mean age of the weights that its microbatches read, of every schedule."""

from collections import defaultdict

import pytest

from jpipe import Plan, lower
from jpipe.ops import OPS
from jpipe.programs import batches_until_full
from jpipe.programs._instructions import Compute
from jpipe.schedules import SCHEDULES
from tests.jpipe.weights.test_schedule_contract import plans

LAYERS = "abcdefgh"


def counted(program):
    """Return the mean age of the weights by (stage, update), from the versions that the backwards of a program read."""
    plan, ages = program.plan, defaultdict(list)
    for i in program.instructions:
        if type(i) is Compute and OPS[i.op].finishes:
            s, _ = plan.workers[i.worker]
            update = i.microbatch // plan.microbatches_per_update(s)
            ages[s, update].append(update - i.version)
    assert all(len(values) == plan.microbatches_per_update(s) for (s, _), values in ages.items())
    return {key: sum(values) / len(values) for key, values in ages.items()}


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name == "auto_zero_bubble" else name for name in SCHEDULES])
def test_the_delay_of_each_update_is_the_mean_age_of_the_versions_that_programs_read(name, every):
    for plan in plans(SCHEDULES[name])[::every]:
        batches = batches_until_full(plan) + 2 * SCHEDULES[name].period(plan) + 1
        ages = counted(lower(plan, batches))
        assert ages == {(s, update): pytest.approx(plan.delay(s, update), abs=1e-12) for s, update in ages}
        late = 2 * batches_until_full(plan) + SCHEDULES[name].period(plan)  # by then all updates are in steady state
        for s in range(plan.depth):
            rate = plan.updates_per_batch(s)
            steady = [plan.delay(s, update) for update in range(late * rate, (late + SCHEDULES[name].period(plan)) * rate)]
            assert plan.delays[s] == pytest.approx(sum(steady) / len(steady), abs=1e-12)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"schedule": "pipedream_2bw", "microbatches": 4}, (1, 1, 1, 1)),
        ({"schedule": "pipedream", "microbatches": 1}, (3, 2, 1, 0)),
        ({"schedule": "pipedream", "microbatches": 4}, (3 / 4, 2 / 4, 1 / 4, 0)),
        ({"schedule": "pipedream", "microbatches": 2}, (3 / 2, 2 / 2, 1 / 2, 0)),
        ({"schedule": "pipedream", "microbatches": 1, "vertical_sync": True}, (3, 3, 3, 3)),
        ({"schedule": "pipedream", "microbatches": 2, "replicas": 2}, (4, 3, 2, 1)),  # a sum over replicas is one microbatch late
        ({"schedule": "pipedream_flush", "microbatches": 4}, (0, 0, 0, 0)),
        ({"schedule": "zb_h2", "microbatches": 8}, (0, 0, 0, 0)),
    ],
)
def test_delays_of_four_stages(fields, expected):
    assert Plan.even(LAYERS, 4, **fields).delays == pytest.approx(expected)


def test_delays_grow_while_the_pipeline_fills_and_after_the_batches_that_are_flushed_first():
    plan = Plan.even(LAYERS, 4, "pipedream", 1)
    assert [plan.delay(0, update) for update in range(6)] == [0, 1, 2, 3, 3, 3]
    flushed = Plan.even(LAYERS, 4, "pipedream", 1, flush_first=2)
    assert [flushed.delay(0, update) for update in range(8)] == [0, 0, 0, 1, 2, 3, 3, 3]
    assert flushed.delays == plan.delays


def test_the_delay_of_many_microbatches_is_found_without_visiting_each():
    plan = Plan.even(LAYERS, 4, "pipedream", 10**9)
    assert plan.delays == pytest.approx((3e-9, 2e-9, 1e-9, 0))
