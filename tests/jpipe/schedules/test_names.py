"""Schedules are found by the names of papers and other libraries, too."""

import pytest

from jpipe import InputError, Plan
from jpipe.schedules import OTHER_NAMES, SCHEDULES, name_of

PYTORCH = {  # the classes of torch.distributed.pipelining that jpipe has
    "GPipe": "gpipe",
    "1F1B": "pipedream_flush",
    "Interleaved1F1B": "interleaved_1f1b",
    "ScheduleLoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "interleaved_zero_bubble",
    "ZBVZeroBubble": "zb_v",
    "DualPipeV": "dualpipe_v",
}


@pytest.mark.parametrize(
    ("name", "schedule"), [*PYTORCH.items(), *OTHER_NAMES.items(), ("ZB-H1", "zb_h1"), ("PipeDream 2BW", "pipedream_2bw")]
)
def test_a_name_of_others_finds_the_schedule(name, schedule):
    assert name_of(name) == schedule in SCHEDULES


def test_a_plan_has_the_name_in_the_registry():
    plan = Plan.even("abcd", 4, "Interleaved", microbatches=4, chunks_per_rank=2)
    assert plan.schedule == "interleaved_1f1b"
    assert Plan.from_json(plan.to_json().replace("interleaved_1f1b", "VPP")) == plan


def test_errors_name_both():
    with pytest.raises(InputError, match=r"^unknown schedule '1f1c'; did you mean '1f1b'\?$"):
        name_of("1f1c")
    with pytest.raises(InputError, match=r"known: 1f1b, .*pipedream_flush"):
        name_of("x")
