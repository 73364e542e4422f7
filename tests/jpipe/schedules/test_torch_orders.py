"""Orders equal those of PyTorch's schedule classes, where both have the schedule."""

import json
from pathlib import Path

import pytest

from tests import torch
from tests.jpipe.schedules.pricing import order_of, plan_of

CLASSES = {
    "gpipe": ("ScheduleGPipe", (1,)),
    "pipedream_flush": ("Schedule1F1B", (1,)),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", (1, 2, 3)),
    "interleaved_zero_bubble": ("ScheduleInterleavedZeroBubble", (1, 2, 3)),
    "looped_bfs": ("ScheduleLoopedBFS", (1, 2, 3)),
    "zb_v": ("ScheduleZBVZeroBubble", (2,)),
    "dualpipe_v": ("ScheduleDualPipeV", (2,)),
}


def is_supported(schedule, ranks, microbatches):
    """Return whether PyTorch's class supports this number of microbatches."""
    rounds = max(1, microbatches // ranks)
    return {
        "pipedream_flush": microbatches >= ranks,
        "interleaved_1f1b": microbatches % rounds == 0,
        "interleaved_zero_bubble": microbatches % rounds == 0,
        "dualpipe_v": microbatches >= 2 * ranks,
    }.get(schedule, True)


def from_torch(schedule, order, last, microbatches):
    """Convert PyTorch's order of a rank to jpipe's terms."""
    entries = [(op, s, k) for op, s, k in order if op != "REDUCE_GRAD"]  # jpipe adds gradients up as they are made
    if schedule == "looped_bfs":  # PyTorch takes the backwards of a stage from the last microbatch to the first, jpipe in order
        entries = [(op, s, microbatches - 1 - k if op == "B" else k) for op, s, k in entries]
    if schedule == "pipedream_flush":  # PyTorch's list numbers the forwards of the last stage from 1; what it runs has them from 0
        entries = [(op, s, k - 1 if op == "F" and s == last else k) for op, s, k in entries]
    return whole_at_stage_0(entries)


def from_jpipe(entries):
    """Return the order of a rank in jpipe, with each fused computation split into its parts."""
    return whole_at_stage_0([(op, s, k) for ops, s, k in entries for op in ops])


def whole_at_stage_0(entries):
    """Merge the two halves of a backward at stage 0 where they are adjacent, as in jpipe."""
    merged = []
    for op, s, k in entries:
        if (op, s) == ("W", 0) and merged and merged[-1] == ("I", 0, k):
            merged[-1] = ("B", 0, k)
        else:
            merged.append((op, s, k))
    return merged


@pytest.mark.slow
@pytest.mark.parametrize("numbers_of_ranks", [(2, 3, 4), pytest.param((1, 8), marks=pytest.mark.exhaustive)], ids=["few", "more"])
def test_orders_are_those_of_pytorch(numbers_of_ranks):
    cases = [
        (schedule, ranks, chunks, microbatches)
        for schedule, (_, numbers) in CLASSES.items()
        for chunks in numbers
        for ranks in numbers_of_ranks
        for microbatches in (*range(1, 10), 12, 16, 17, 24)
        if is_supported(schedule, ranks, microbatches)
    ]
    request = json.dumps([(CLASSES[schedule][0], *arguments) for schedule, *arguments in cases])
    program = Path(__file__).with_name("torch_orders.py")
    orders = json.loads(torch.run(program, needs="torch", request=request))
    for case, expected in zip(cases, orders, strict=True):
        schedule, ranks, chunks, microbatches = case
        plan = plan_of(schedule, ranks, chunks, microbatches)
        for p in range(ranks):
            actual = from_jpipe(order_of(plan, p))
            assert actual == from_torch(schedule, expected[p], plan.depth - 1, microbatches), (case, p)
    assert {schedule for schedule, *_ in cases} == {*CLASSES}
    assert len(cases) > 150
