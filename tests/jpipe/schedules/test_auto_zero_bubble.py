"""Orders as data: mistakes are reported, and greedy orders are never longer than static ones."""

import random
import re

import numpy as np
import pytest

from jpipe import InputError, Link, Plan, lower, simulate
from jpipe.programs import StageCost
from jpipe.schedules import greedy_order, written_order
from tests.jpipe.schedules.pricing import Priced, most_in_flight, order_of, plan_of

GOOD = ("F0.0 F0.1 B0.0 B0.1", "F1.0 I1.0 F1.1 I1.1 W1.0 W1.1")


def with_order(*order, m=2, ranks=None, stages=2, **fields):
    """Return an `auto_zero_bubble` plan with this order."""
    layers = "abcdefghijkl"[:stages]
    return Plan.even(layers, stages, "auto_zero_bubble", m, ranks=ranks, order=order, **fields)


def test_an_order_in_a_plan_runs_as_written():
    plan = with_order(*GOOD)
    assert [f"{op}{s}.{k}" for op, s, k in order_of(plan, 0)] == GOOD[0].split()
    # at the last stage what always stands side by side is one program
    assert [f"{op}{s}.{k}" for op, s, k in order_of(plan, 1)] == ["FI1.0", "FI1.1", "W1.0", "W1.1"]
    assert [span.op for span in simulate(lower(plan, 1)).timeline[1]] == ["FI", "FI", "W", "W"]


@pytest.mark.parametrize(
    ("place", "text", "message"),
    [
        (
            0,
            "F0.0 F0.1 B0.0",
            "order.0: after 3 entries stage 0 lacks the backward for inputs of microbatch 1; expected microbatches 0 to 1; add B0.1",
        ),
        (
            0,
            "",
            "order.0: after 0 entries stage 0 lacks the forward of microbatch 0 and 1 more; expected microbatches 0 to 1; add F0.0 and",
        ),
        (1, "F1.0 I1.0 F1.1 I1.1 W1.0", "order.1: after 5 entries stage 1 lacks the backward for weights of microbatch 1; expected"),
        (
            0,
            "F0.0 F0.1 B0.0 B0.1 B0.1",
            "order.0: entry 4, B0.1: stage 0 has already had the backward for inputs of all 2 microbatches; remove this entry",
        ),
        (0, "F0.0 F0.2 B0.0 B0.2", "order.0: entry 1, F0.2: expected microbatch 1 as the next forward of stage 0, found microbatch 2"),
        (0, "F0.1 F0.0 B0.1 B0.0", "order.0: entry 0, F0.1: expected microbatch 0 as the next forward of stage 0, found microbatch 1"),
        (0, "F0.0 F0.1 F0.2 B0.0", "order.0: entry 2, F0.2: stage 0 has already had the forward of all 2 microbatches; remove this entry"),
        (
            0,
            "F0.0 B0.0 B0.1 F0.1",
            "order.0: entry 2, B0.1: expected the forward of microbatch 1 at stage 0 before this entry; put F0.1 there",
        ),
        (0, "B0.0", "order.0: entry 0, B0.0: expected the forward of microbatch 0 at stage 0 before this entry"),
        (1, "F1.0 W1.0", "order.1: entry 1, W1.0: expected the backward for inputs of microbatch 0 at stage 1 before this entry"),
        (1, "F1.0 F1.1 I1.0 B1.1", "order.1: entry 3, B1.1: expected microbatch 0 as the next backward for weights of stage 1"),
        (0, "F0.0 F1.0", "order.0: entry 1, F1.0: expected one of the stages [0] of rank 0, found stage 1"),
        (0, "F0.0 FB0.1", "order.0: entry 1, FB0.1: only the last stage, 1, can run FB, because it waits for no other stage; use F"),
        (1, "FI1.0 W1.0 FB1.1", "order.1: entry 2, FB1.1: expected FI, as for the microbatches before it at stage 1, found FB"),
        (0, "F0.0 X0.1", "order.0: entry 1: expected an op (F, B, FB, I, W, FI), a stage and a microbatch, such as F0.3, found 'X0.1'"),
        (
            0,
            "F0.0,F0.1",
            "order.0: entry 0: expected an op (F, B, FB, I, W, FI), a stage and a microbatch, such as F0.3, found 'F0.0,F0.1'",
        ),
        (0, "F0.99999999999999999999", "order.0: entry 0: expected an op"),
        (0, "F٠.0", "order.0: entry 0: expected an op"),
    ],
)
def test_a_wrong_order_is_refused(place, text, message):
    order = [*GOOD]
    order[place] = text
    with pytest.raises(InputError, match=re.escape(message)):
        with_order(*order)


def test_an_order_is_refused_for_other_schedules():
    with pytest.raises(
        InputError, match=r"'auto_zero_bubble' needs an order for each rank, found none; make one with jpipe\.schedules\.greedy"
    ):
        Plan.even("ab", 2, "auto_zero_bubble", 2)
    with pytest.raises(InputError, match=r"order: expected one text for each of 2 ranks, found 1; add the other ranks$"):
        with_order(GOOD[0])
    with pytest.raises(InputError, match=r"order: expected one text for each of 2 ranks, found 3; remove all after the first 2$"):
        with_order(*GOOD, "")
    with pytest.raises(
        InputError, match=r"plan: order: expected a list of texts, one for each rank, found 'F0\.0 .*'; put it into a list$"
    ):
        Plan.even("ab", 2, "auto_zero_bubble", 2, order=GOOD[0])
    with pytest.raises(
        InputError, match="order: this is an option of the schedule 'auto_zero_bubble', found schedule 'zb_h1'; remove the option"
    ):
        Plan.even("ab", 2, "zb_h1", 2, order=GOOD)
    with pytest.raises(InputError, match="order_limit: this is an option of the schedule 'auto_zero_bubble', found schedule 'zb_h1'"):
        Plan.even("ab", 2, "zb_h1", 2, order_limit=2)


def test_an_order_that_holds_more_than_its_limit_is_refused():
    assert with_order(*GOOD, order_limit=2).order_limit == 2
    with pytest.raises(
        InputError,
        match=r"order\.0: entry 1, F0\.1: with it rank 0 holds 2 microbatches, 1 more than order_limit 1; move backwards",
    ):
        with_order(*GOOD, order_limit=1)
    plan = plan_of("zb_v", 2, 2, 5)
    order = written_order(plan)
    with pytest.raises(InputError, match=r"with it rank 0 holds 4 microbatches, 1 more than order_limit 3; move"):
        with_order(*order, m=5, stages=4, ranks=plan.pipeline_ranks, order_limit=3)
    assert with_order(*order, m=5, stages=4, ranks=plan.pipeline_ranks, order_limit=4)
    with pytest.raises(InputError, match="order_limit: expected greater than or equal to 1, found 0"):
        with_order(*GOOD, order_limit=0)


@pytest.mark.parametrize("last", ["F1.0 F1.1 B1.0 B1.1", "F1.0 F1.1 I1.0 I1.1 W1.0 W1.1"])
def test_a_deadlock_is_refused_with_the_grid(last):
    with pytest.raises(InputError) as refused:
        lower(with_order("F0.0 B0.0 F0.1 B0.1", last), 1)
    assert str(refused.value) == (
        "plan: order: expected an order in which each computation comes after what it needs, on all ranks; the order deadlocks, ranks "
        "[0, 1] wait for each other; move forwards or backwards for inputs that another rank waits for to the front, or use "
        "jpipe.schedules.greedy_order\n"
        "tick   |    0    1\n"
        "rank 0 | F0.0    .  <<< waits for what B of microbatch 0 at stage 0 needs\n"
        "rank 1 |    . F0.0  <<< waits for what F of microbatch 1 at stage 1 needs"
    )


def test_stashes_are_in_the_predicted_memory():
    """Rank s of ZB-H1 delays its backwards for weights by s microbatches and holds s + 1 stashes; those of rank 0 are whole residuals."""
    plan = Plan.even("abc", 3, "zb_h1", microbatches=6)
    assert simulate(lower(plan, 3), [StageCost(stash=10)] * 3).held_bytes == (0, 20, 30)


def test_plans_with_orders_are_json():
    plan = with_order(*GOOD, order_limit=2)
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("schedule", "v"), [("zb_h1", 1), ("zb_v", 2), ("interleaved_1f1b", 3), ("dualpipe_v", 2), ("gpipe", 1)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_written_order_of_a_plan_runs_as_the_plan(schedule, v, replicas):
    plan = plan_of(schedule, 2, v, 6 * replicas, replicas=replicas)
    written = with_order(*written_order(plan), m=6 * replicas, stages=2 * v, ranks=plan.pipeline_ranks, replicas=replicas)
    assert simulate(lower(written, 2)).timeline == simulate(lower(plan, 2)).timeline


def random_costs(draw, stages):
    costs = []
    for _ in range(stages):
        f, i, w = (float(draw.randint(1, 16)) for _ in "fiw")
        costs.append(StageCost(forward=f, backward=i + w, backward_input=i, backward_weight=w))
    return costs


def check_greedy(draw, schedule, d, v, m):
    """Check that a greedy order runs within its limits and is no slower than the schedule; return whether it is faster."""
    plan, costs = plan_of(schedule, d, v, m), random_costs(draw, d * v)
    limits = [most_in_flight(order_of(plan, p), lambda entry: entry.finishes) for p in range(d)]
    latency = float(draw.choice((0, 0, 1, 3)))
    order = greedy_order(plan, costs, limits=limits, latency=latency)
    assert order == greedy_order(plan, costs, limits=limits, latency=latency), "the same arguments give the same order"
    auto = with_order(*order, m=m, stages=d * v, ranks=plan.pipeline_ranks)
    assert all(most_in_flight(order_of(auto, p), lambda entry: entry.finishes) <= limits[p] for p in range(d))
    actual, expected = (simulate(lower(each, 1), costs, Link(latency=latency)).seconds for each in (auto, plan))
    assert actual <= expected
    return actual < expected


SCHEDULES_TO_BEAT = (("zb_h1", 1), ("zb_h2", 1), ("pipedream_flush", 1), ("zb_v", 2), ("interleaved_zero_bubble", 2))


def test_greedy_orders_take_no_longer_than_static_ones():
    draw = random.Random(1)
    shorter = [check_greedy(draw, schedule, d, v, m) for schedule, v in SCHEDULES_TO_BEAT[:-2] for d, m in ((1, 2), (2, 2), (3, 7), (4, 6))]
    shorter += [check_greedy(draw, schedule, d, v, m) for schedule, v in SCHEDULES_TO_BEAT[-2:] for d, m in ((1, 3), (2, 5), (3, 6))]
    assert sum(shorter) >= 3, "and often shorter"


@pytest.mark.exhaustive
def test_greedy_orders_take_no_longer_than_static_ones_for_many_times():
    draw = random.Random(2)
    for _ in range(15):
        for schedule, v in SCHEDULES_TO_BEAT:
            check_greedy(draw, schedule, draw.randint(1, 6), v, draw.randint(1, 14))


@pytest.mark.parametrize(("d", "m"), [(2, 4), (4, 8), (4, 13)])
def test_a_greedy_order_on_a_v_has_no_bubble_for_equal_times(d, m):
    plan = plan_of("zb_v", d, 2, m)
    order = greedy_order(plan, [StageCost()] * plan.depth, limits=2 * d)
    auto = with_order_of(plan, order)
    assert max(Priced(auto, 1, 1, 1).idle_between) == 0
    assert max(Priced(auto, 1, 1, 1).idle) == d - 1


@pytest.mark.parametrize(("schedule", "d", "v", "limit"), [("zb_h1", 4, 1, 4), ("zb_h1", 4, 1, 7), ("zb_v", 3, 2, 8)])
def test_greedy_orders_know_the_latency(schedule, d, v, limit):
    """With slow messages, an order computed for them takes less time than one computed without latency."""
    plan, costs = plan_of(schedule, d, v, 2 * d), [StageCost()] * (d * v)
    orders = [with_order_of(plan, greedy_order(plan, costs, limits=limit, latency=latency)) for latency in (0.0, 1.0)]
    without, with_latency = (simulate(lower(auto, 1), costs, Link(latency=1.0)).seconds for auto in orders)
    assert with_latency < without


def with_order_of(plan, order):
    return Plan.even(plan.layers, plan.depth, "auto_zero_bubble", plan.microbatches, ranks=plan.pipeline_ranks, order=order)


@pytest.mark.parametrize("v", [1, 2, 3])
def test_greedy_orders_keep_the_smallest_limits(v):
    draw = random.Random(v)
    for d, m in ((2, 3), (3, 5)):
        plan = plan_of("looped_bfs", d, v, m)
        for limit in (v, v + 1):
            order = greedy_order(plan, random_costs(draw, d * v), limits=limit, latency=1.0)
            auto = Plan.even(plan.layers, plan.depth, "auto_zero_bubble", m, ranks=plan.pipeline_ranks, order=order, order_limit=limit)
            simulate(lower(auto, 2))


def test_arguments_that_greedy_order_refuses():
    plan = plan_of("zb_v", 2, 2, 4)
    with pytest.raises(InputError, match=r"greedy_order: expected 4 costs, one for each stage, found 2$"):
        greedy_order(plan, [StageCost()] * 2, limits=4)
    with pytest.raises(InputError, match=r"greedy_order: limits: expected at least \[2, 2\] for 2 ranks, found 1; raise them$"):
        greedy_order(plan, [StageCost()] * 4, limits=1)
    expected = r"greedy_order: limits: expected an integer, or one for each of 2 ranks, found \[2\]; give at least \[2, 2\]$"
    with pytest.raises(InputError, match=expected):
        greedy_order(plan, [StageCost()] * 4, limits=[2])
    uneven = Plan.even("ab", 2, "zb_h1", 2, replicas=[1, 2])
    with pytest.raises(
        InputError, match=r"greedy_order: expected the same number of replicas for each stage, found \[1, 2\]; use one number for all$"
    ):
        greedy_order(uneven, [StageCost()] * 2, limits=4)


def test_limits_may_be_numbers_of_numpy():
    plan, costs = plan_of("zb_v", 2, 2, 4), [StageCost()] * 4
    expected = greedy_order(plan, costs, limits=4)
    assert all(greedy_order(plan, costs, limits=limits) == expected for limits in (np.int64(4), np.array([4, 4]), [np.int32(4), 4]))
