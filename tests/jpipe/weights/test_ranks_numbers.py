"""Schedules with several stages on a rank or split backwards equal the sequential reference bit for bit."""

import itertools
import random

import pytest

from jpipe import DynamicLossScale, InputError, LayerStack, Plan, Precision
from jpipe.programs import StageCost
from jpipe.schedules import SCHEDULES, greedy_order
from tests.jpipe import models
from tests.jpipe.running import check_against_reference

STACK = models.rich_stack()
LONG = LayerStack({f"{layer_id}{n}": STACK.layers[layer_id] for n in range(3) for layer_id in ("track", "noise", "mix", "out")})


def plan_of(schedule: str, ranks: int, chunks: int, m: int, replicas: int = 1, **fields) -> Plan:
    """Return an even plan; for `auto_zero_bubble`, use a greedy order for equal times."""
    ids = STACK.ids if ranks * chunks <= len(STACK.ids) else LONG.ids
    options = {"layers": ids, "num_stages": ranks * chunks, "microbatches": m, "replicas": replicas, "chunks_per_rank": chunks} | fields
    if schedule != "auto_zero_bubble":
        return Plan.even(schedule=schedule, **options)
    straight = Plan.even(schedule="looped_bfs", **options)
    order = greedy_order(straight, [StageCost()] * straight.depth, limits=max(2 * ranks * chunks, 2))
    return Plan.even(schedule=schedule, order=order, **options)


def check(plan: Plan, drain_after: set[int], **options) -> None:
    stack = STACK if len(plan.layers) == len(STACK.ids) else LONG
    check_against_reference(stack, plan, drain_after, **options)


FEW = [
    ("interleaved_1f1b", 2, 2, 3, 1, {}),
    ("zb_v", 2, 2, 3, 1, {}),
    ("pipedream_2bw", 2, 2, 3, 1, {}),  # groups of 2 microbatches begin in one batch and end in the next
    ("pipedream_2bw", 3, 1, 3, 1, {"split_backward": "early"}),
]


@pytest.mark.parametrize(("schedule", "ranks", "chunks", "m", "replicas", "fields"), FEW)
@pytest.mark.thinned(most=2)
def test_numbers_are_those_of_the_reference(schedule, ranks, chunks, m, replicas, fields):
    check(plan_of(schedule, ranks, chunks, m, replicas, **fields), drain_after={1, 4})


def legal_plans(schedule: str) -> list[Plan]:
    """Return plans on 1 to 4 ranks of 1 to 3 chunks, with few and many microbatches, with and without replicas."""
    layout, plans = SCHEDULES[schedule].layout, []
    for ranks, chunks, replicas in itertools.product((1, 2, 3, 4), (1, 2, 3), (1, 2)):
        if (layout == "straight" and chunks > 1) or (layout == "v" and chunks != 2) or (schedule.startswith("pipedream") and chunks == 1):
            continue
        for m in sorted({1, 3, 4, 2 * ranks}):
            try:
                plans.append(plan_of(schedule, ranks, chunks, m * replicas, replicas))
            except InputError:
                continue
    return plans


TRIED = 2
"""Plans of each schedule that are run, of about 530 legal ones in all; `make test-slow` runs the smaller one of each."""


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, *(pytest.param(number, marks=pytest.mark.exhaustive) for number in range(1, TRIED))])
@pytest.mark.parametrize("schedule", [*models.WITHOUT_VARIANTS, "pipedream", "pipedream_2bw"])
def test_numbers_of_plans_of_all_kinds_are_those_of_the_reference(schedule, number):
    plans = [plan for plan in legal_plans(schedule) if plan.depth <= 6]  # the next test has more stages
    assert len(plans) > 6
    tried = sorted(random.Random(schedule).sample(plans, TRIED), key=lambda plan: (plan.depth, plan.microbatches))
    check(tried[number], drain_after={2})


MANY = [("interleaved_1f1b", 4, 2, 5), ("interleaved_zero_bubble", 4, 3, 6), ("pipedream_2bw", 4, 2, 6), ("pipedream_2bw", 5, 2, 9)]


@pytest.mark.exhaustive
@pytest.mark.thinned(most=0, most_slow=1)
@pytest.mark.parametrize(("schedule", "ranks", "chunks", "m"), MANY)
def test_numbers_of_eight_to_twelve_stages_are_those_of_the_reference(schedule, ranks, chunks, m):
    plan = plan_of(schedule, ranks, chunks, m)
    assert 8 <= plan.depth <= 12
    check(plan, drain_after={2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        ("interleaved_zero_bubble", 2),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("pipedream", 2), ("pipedream_2bw", 2), ("zb_v", 2), ("zb_h2", 1))
        ),
    ],
)
def test_numbers_with_the_global_norm_are_those_of_the_reference(schedule, chunks):
    options = {"vertical_sync": True} if schedule == "pipedream" else {}
    m, replicas = (8, 2) if schedule.startswith("pipedream") else (5, 1)
    check(plan_of(schedule, 2, chunks, m, replicas, **options), drain_after={2}, clip_global_norm=0.5)


@pytest.mark.thinned(most=0)
@pytest.mark.parametrize(
    "precision",
    [
        Precision(params="bfloat16"),
        Precision(compute="float16", loss_scale=2.0**10),
        Precision(params="float16", loss_scale=DynamicLossScale(initial=2.0**15, growth_every=2)),
    ],
    ids=["masters", "fixed scale", "dynamic scale"],
)
@pytest.mark.parametrize(("schedule", "chunks"), [("zb_h1", 1), ("interleaved_zero_bubble", 2), ("pipedream_2bw", 2)])
def test_numbers_in_another_precision_equal_the_reference(schedule, chunks, precision):
    check(plan_of(schedule, 2, chunks, 4), drain_after={2}, precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "recompute"),
    [
        ("zb_v", "full"),
        pytest.param("zb_h1", "dots_saveable", marks=pytest.mark.exhaustive),
        pytest.param("interleaved_1f1b", "full", marks=pytest.mark.exhaustive),
    ],
)
def test_numbers_with_recomputation_are_those_of_the_reference(schedule, recompute):
    chunks = 1 if schedule == "zb_h1" else 2
    check(plan_of(schedule, 2, chunks, 4, recompute=recompute), drain_after={2})
