"""The simulator's bubbles and memory equal the papers' formulas."""

import random

import pytest

from jpipe import InputError
from tests.jpipe.schedules.pricing import Priced, most_in_flight, order_of, plan_of


def price(schedule, d, v, m, times):
    """Simulate a batch on d ranks of v stages; a whole rank's share takes v times as long as a stage."""
    return Priced(plan_of(schedule, d, v, m), *times)


def shortest_weights(f, i, w):
    return w <= min(f, i)


def falling(f, i, w):
    return f >= i >= w


def equal(f, i, w):
    return f == i == w


def any_times(f, i, w):
    return True


# schedule, chunks, which times, which microbatches of d ranks, which bubble, the formula with the times of a stage
FORMULAS = [
    ("gpipe", (1,), any_times, lambda m, d: True, "idle", lambda d, f, i, w: (d - 1) * (f + i + w)),
    ("pipedream_flush", (1,), any_times, lambda m, d: True, "idle", lambda d, f, i, w: (d - 1) * (f + i + w)),
    ("interleaved_1f1b", (1, 2, 3), any_times, lambda m, d: m % d == 0, "idle", lambda d, f, i, w: (d - 1) * (f + i + w)),
    ("looped_bfs", (1, 2, 3), any_times, lambda m, d: True, "idle", lambda d, f, i, w: (d - 1) * (f + i + w)),
    ("zb_h1", (1,), shortest_weights, lambda m, d: True, "idle", lambda d, f, i, w: (d - 1) * (f + i - w)),
    ("zb_h2", (1,), falling, lambda m, d: m >= 2 * d - 1, "idle_between", lambda d, f, i, w: (d - 1) * (f + i - 2 * w)),
    ("interleaved_zero_bubble", (1, 2, 3), shortest_weights, lambda m, d: m % d == 0, "idle", lambda d, f, i, w: (d - 1) * (f + i - w)),
    ("zb_v", (2,), equal, lambda m, d: m >= 2 * d, "idle_between", lambda d, f, i, w: 0),
    ("zb_v", (2,), equal, lambda m, d: m >= 2 * d, "idle", lambda d, f, i, w: (d - 1) * f),
    ("dualpipe_v", (2,), equal, lambda m, d: m >= 2 * d, "idle", lambda d, f, i, w: (d - 1) * f),
]


def check_formulas(ranks, microbatches, times):
    """Compare each formula with the simulator where it applies."""
    checked = 0
    for schedule, chunks, suit, whole, kind, formula in FORMULAS:
        for d in ranks:
            for v in chunks:
                for m in microbatches(d):
                    for t in times:
                        if suit(*t) and whole(m, d):
                            priced = price(schedule, d, v, m, t)
                            assert max(getattr(priced, kind)) == formula(d, *t), (schedule, d, v, m, t, kind)
                            checked += 1
    return checked


def test_bubbles_are_those_of_the_formulas():
    assert check_formulas((2, 4), lambda d: (d, 2 * d, 2 * d + 1), [(1, 1, 1), (5, 3, 2)]) > 60


@pytest.mark.exhaustive
def test_bubbles_are_those_of_the_formulas_for_many_microbatches_and_random_times():
    """For d = 2, 4 and 8, m is the least possible, 2d - 1, 2d, 3d and 32; the times are equal or drawn, with forwards the longest."""
    draw = random.Random(0)
    times = [(1, 1, 1), sorted((draw.randint(1, 9) for _ in "fiw"), reverse=True)]
    assert check_formulas((2, 4, 8), lambda d: sorted({d, 2 * d - 1, 2 * d, 3 * d, 32}), times) > 100


@pytest.mark.parametrize("kind", ["idle", "idle_between"])
def test_the_conditions_of_the_formulas_are_needed(kind):
    """Where the conditions do not hold, the simulator gives another bubble."""
    if kind == "idle":
        assert max(price("zb_h1", 4, 1, 8, (1, 1, 2)).idle) > 0
        assert max(price("interleaved_1f1b", 4, 2, 13, (1, 1, 1)).idle) > 3 * 3
    else:
        assert max(price("zb_h2", 4, 1, 6, (1, 1, 1)).idle_between) > 0
        assert max(price("zb_v", 4, 2, 8, (2, 1, 1)).idle_between) > 0


def test_shares_of_the_schedules_for_four_ranks_and_eight_microbatches():
    shares = {
        (schedule, v): f"{price(schedule, 4, v, 8, (1, 1, 1)).bubble:.1%}"
        for schedule, v in (
            ("pipedream_flush", 1),
            ("interleaved_1f1b", 2),
            ("looped_bfs", 2),
            ("zb_h1", 1),
            ("interleaved_zero_bubble", 2),
            ("zb_v", 2),
            ("dualpipe_v", 2),
        )
    }
    assert list(shares.values()) == ["27.3%", "15.8%", "15.8%", "11.1%", "5.9%", "5.9%", "5.9%"]


# Of rank p of d ranks of v stages: the most microbatches of a stage up to the input gradient, and up to the end of the backward.
PEAKS = [
    ("pipedream_flush", 1, lambda d, v, p: d - p, lambda d, v, p: d - p),
    ("zb_h1", 1, lambda d, v, p: d - p, lambda d, v, p: d),
    ("zb_h2", 1, lambda d, v, p: 2 * (d - p) - 1, lambda d, v, p: 2 * d - 1),
    *(
        (
            "interleaved_1f1b",
            v,
            lambda d, v, p: (v - 1) * d + 2 * (d - 1 - p) + 1,
            lambda d, v, p: (v - 1) * d + 2 * (d - 1 - p) + 1,
        )
        for v in (2, 3, 4)
    ),
    *(("interleaved_zero_bubble", v, lambda d, v, p: v * d - p, lambda d, v, p: v * d) for v in (2, 3, 4)),
    ("zb_v", 2, lambda d, v, p: 2 * d, lambda d, v, p: 2 * d),
    ("dualpipe_v", 2, lambda d, v, p: 2 * d + 1, lambda d, v, p: 2 * d + 1),
]


@pytest.mark.parametrize(("schedule", "v", "to_input", "to_weight"), PEAKS)
def test_ranks_hold_as_many_microbatches_as_said(schedule, v, to_input, to_weight):
    for d in (2, 3, 4, 8):
        plan = plan_of(schedule, d, v, 3 * d)
        for p in range(d):
            order = order_of(plan, p)
            assert most_in_flight(order, lambda entry: entry.gives_gradient) == to_input(d, v, p), (d, p)
            assert most_in_flight(order, lambda entry: entry.finishes) == to_weight(d, v, p), (d, p)


@pytest.mark.parametrize("d", [2, 3, 4])
def test_zb_v_with_few_microbatches_is_a_prefix_of_the_order_of_more(d):
    whole = plan_of("zb_v", d, 2, 2 * d - 1)
    for m in range(1, 2 * d - 1):
        plan = plan_of("zb_v", d, 2, m)
        for p in range(d):
            assert order_of(plan, p) == [entry for entry in order_of(whole, p) if entry.microbatch < m]


def test_looped_bfs_holds_everything_and_naive_one_microbatch():
    assert most_in_flight(order_of(plan_of("looped_bfs", 4, 2, 7), 0), lambda entry: entry.finishes) == 14
    assert most_in_flight(order_of(plan_of("naive", 4, 1, 7), 0), lambda entry: entry.finishes) == 1


def check_that_orders_run(ranks, microbatches):
    """Simulate all plans of one replica: complete orders, free of deadlock, verified instruction by instruction."""
    checked = 0
    for schedule in ("interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "interleaved_zero_bubble", "zb_v", "dualpipe_v"):
        for d in ranks:
            for v in (1, 2, 3):
                for m in microbatches:
                    try:
                        plan = plan_of(schedule, d, v, m)
                    except InputError:
                        assert v > 1 if schedule in ("zb_h1", "zb_h2") else v != 2 or m < 2 * d
                        continue
                    assert sum(map(bool, Priced(plan, 2, 1, 1).idle)) <= d
                    checked += 1
    return checked


def test_orders_run_for_any_number_of_microbatches():
    assert check_that_orders_run((1, 2, 3, 4), (1, 2, 3, 5, 8)) == 248


@pytest.mark.exhaustive
def test_orders_run_for_any_number_of_ranks_and_microbatches():
    assert check_that_orders_run((1, 2, 3, 5, 8), (1, 3, 4, 9, 16)) > 200
