"""What version 0.1 wrote is still read: a plan and a profile, kept in `tests/written_by_0_1/`."""

from pathlib import Path

import jpipe
from jpipe_planner import Profile

WRITTEN = Path(__file__).parent / "written_by_0_1"


def test_a_plan():
    plan = jpipe.Plan.from_json((WRITTEN / "plan.json").read_text())
    assert (plan.schedule, plan.layers) == ("pipedream_flush", ("embed", "block_0", "head"))
    assert len(plan.predicted.peak_bytes) == 2


def test_a_profile():
    profile = Profile.from_json((WRITTEN / "profile.json").read_text())
    assert profile.ids == ("embed", "block_0", "head")
