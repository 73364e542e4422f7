"""When the global norm of a batch is known, and when each stage needs it: never in time under weight stashing, always under vertical sync.

Stages in a straight pipeline run 1F1B; forwards take F, backwards B, messages nothing. The norm of a batch is known when stage 0, the last
one, has done its last backward of the batch.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from jpipe import Link, Plan, lower, simulate
from jpipe.plan import excluded
from jpipe.programs import StageCost, extract_window
from jpipe.schedules import SCHEDULES

DEPTHS, MICROBATCHES = range(1, 7), range(1, 13)
F, B = 1, 2


class Times(NamedTuple):
    """When forwards begin and backwards end, by (stage, microbatch)."""

    forwards: dict[tuple[int, int], float]
    backwards: dict[tuple[int, int], float]


def plan_of(depth: int, microbatches: int, **fields) -> Plan:
    return Plan.even([f"layer{s}" for s in range(depth)], depth, "pipedream", microbatches, **fields)


def reader(plan: Plan, s: int, batch: int) -> int:
    """Return the first microbatch that reads at stage s the weights that a batch has updated: before its forward the stage updates."""
    k = (batch + 1) * plan.microbatches
    while SCHEDULES[plan.schedule].version(plan, s, k) <= batch:
        k += 1
    return k


def run(
    plan: Plan, batches: int, costs: Sequence[tuple[float, float]], needs: Callable[[int, int], int | None] = lambda s, k: None
) -> Times:
    """Run the order of the schedule; the forward of k at stage s waits for the norm of batch `needs(s, k)`, if there is one."""
    orders = [list(SCHEDULES[plan.schedule].computations(plan, s, 0, 0, batches)) for s in range(plan.depth)]
    forwards, outputs, backwards = {}, {}, {}
    clocks, waiting = [0.0] * plan.depth, [iter(order) for order in orders]
    following = [next(entries) for entries in waiting]
    while any(entry is not None for entry in following):
        progress = False
        for s, entry in enumerate(following):
            if entry is None:
                continue
            k, (forward, backward) = entry.microbatch, costs[s]
            wanted = [(outputs, (s - 1, k))] if entry.is_forward and s > 0 else []
            wanted += [(backwards, (s + 1, k))] if not entry.is_forward and s < plan.depth - 1 else []
            batch = needs(s, k) if entry.is_forward else None
            wanted += [(backwards, (0, (batch + 1) * plan.microbatches - 1))] if batch is not None else []
            if not all(key in times for times, key in wanted):
                continue
            clocks[s] = max([clocks[s], *(times[key] for times, key in wanted)])
            if entry.is_forward:
                forwards[s, k] = clocks[s]
                clocks[s] += forward
                outputs[s, k] = clocks[s]
            if entry.finishes:
                clocks[s] += backward
                backwards[s, k] = clocks[s]
            following[s], progress = next(waiting[s], None), True
        assert progress, "the order deadlocks"
    return Times(forwards, backwards)


def known(plan: Plan, times: Times, batch: int) -> float:
    """Return when the norm of a batch is known."""
    return times.backwards[0, (batch + 1) * plan.microbatches - 1]


def steady(plan: Plan) -> int:
    """Return a batch with a full pipeline before and after it, where two batches follow those that it overlaps with."""
    return -(-plan.depth // plan.microbatches) + 1


def batches_for(plan: Plan) -> int:
    return 2 * steady(plan) + 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_under_stashing_each_stage_needs_the_norm_before_it_is_known(depth):
    """Stage s needs it right after its own last backward of the batch, s backwards before stage 0 has done its one."""
    for m in MICROBATCHES:
        plan = plan_of(depth, m)
        times, t = run(plan, batches_for(plan), [(F, B)] * depth), steady(plan)
        late = [known(plan, times, t) - times.forwards[s, reader(plan, s, t)] for s in range(depth)]
        assert late == [B * s for s in range(depth)]


@pytest.mark.parametrize("seed", range(20))
def test_no_costs_and_no_microbatches_in_flight_make_it_known_in_time(seed):
    """It is late by the backwards of all stages before at least."""
    rng = random.Random(seed)
    plan = plan_of(rng.choice(DEPTHS), rng.choice(MICROBATCHES), extra_in_flight=rng.choice([0, 1, 2]))
    costs = [(rng.choice([0.1, 1, 10]), rng.choice([0.1, 1, 10])) for _ in range(plan.depth)]
    times = run(plan, 24, costs)
    for t, s in itertools.product(range(4), range(1, plan.depth)):
        late = known(plan, times, t) - times.forwards[s, reader(plan, s, t)]
        assert late > sum(backward for _, backward in costs[:s]) - 1e-9


@pytest.mark.parametrize("depth", DEPTHS)
def test_waiting_for_it_costs_two_thirds_of_a_flush(depth):
    """B (d - 1) a batch, where a flush costs (F + B)(d - 1)."""
    for m in MICROBATCHES:
        plan, flush = plan_of(depth, m), plan_of(depth, m).model_copy(update={"schedule": "pipedream_flush"})
        last = [{reader(plan, s, t): t for t in range(batches_for(plan))} for s in range(depth)]
        times, t = run(plan, batches_for(plan), [(F, B)] * depth, lambda s, k: last[s].get(k)), steady(plan)  # noqa: B023 - called at once
        assert known(plan, times, t) - known(plan, times, t - 1) == m * (F + B) + (depth - 1) * B
        times = run(flush, 3, [(F, B)] * depth)
        assert known(flush, times, 2) - known(flush, times, 1) == (m + depth - 1) * (F + B)


@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (1, 3), (2, 2)])
@pytest.mark.parametrize("depth", DEPTHS)
def test_the_least_delay_that_hides_it(depth, forward, backward):
    """A stage may read the new weights d - 1 microbatches after the batch, or ⌊s F/(F + B)⌋ earlier if no message takes time."""
    for m in MICROBATCHES:
        plan = plan_of(depth, m)
        times, t = run(plan, batches_for(plan), [(forward, backward)] * depth), steady(plan)
        first = (t + 1) * m
        least = [next(k - first for k in itertools.count(first) if times.forwards[s, k] >= known(plan, times, t)) for s in range(depth)]
        assert least == [depth - 1 - s * forward // (forward + backward) for s in range(depth)]
        assert reader(plan_of(depth, m, vertical_sync=True), 0, t) - first == depth - 1


@pytest.mark.thinned(most=3)
@pytest.mark.parametrize("depth", DEPTHS)
def test_vertical_sync_is_less_stale_than_two_buffers_from_as_many_microbatches_as_stages_on(depth):
    """Its mean delay is (d - 1)/m with two versions, at the speed of 2BW, with the norm of all stages."""
    for m in MICROBATCHES:
        plan = plan_of(depth, m, vertical_sync=True)
        schedule, batch = SCHEDULES["pipedream"], range(20 * m, 21 * m)
        for s in range(depth):
            assert sum(20 - schedule.version(plan, s, k) for k in batch) == depth - 1  # m times the mean
        assert not excluded(plan, skip_nonfinite=True)
        if m < max(depth, 2):
            continue
        assert {schedule.versions_alive(plan, s) for s in range(depth)} == {1 if depth == 1 else 2}
        if m in (depth, 2 * depth):
            seconds = []
            for one in (plan, Plan.even(plan.layers, depth, "pipedream_2bw", m)):
                prediction = simulate(lower(one, 12, global_norm=True), [StageCost()] * depth, Link())
                seconds.append(extract_window(prediction.timeline, prediction.memory, m, 5, 4).step_seconds)
            assert seconds == [m * (F + B)] * 2
