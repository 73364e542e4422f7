"""What version 0.4 wrote is still read: a run of six steps of 2BW with its checkpoint of step 3, plans and a profile."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import jpipe
from jpipe_planner import Profile
from jpipe_train.config import config_file
from jpipe_train.run import loop

WRITTEN = Path(__file__).parents[2] / "written_by_0_4"


@pytest.mark.usefixtures("no_report")
def test_a_run_goes_on(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(WRITTEN, folder)
    before = [json.loads(line) for line in (WRITTEN / "metrics.jsonl").read_text().splitlines()]
    values = [f"run.dir={folder}", f"data.path={WRITTEN / 'text.txt'}", "log=[]"]
    assert loop.main(config_file.load(folder / "config.yaml", values)).folder == folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [*range(6)]
    for row, expected in zip(rows, before, strict=True):
        for key in ("loss", "val_loss", "version_distance", "learning_rate"):
            np.testing.assert_allclose(row.get(key, 0.0), expected.get(key, 0.0), rtol=1e-5, err_msg=key)
    assert rows[5]["seconds"] != before[5]["seconds"], "the last steps ran again"


@pytest.mark.parametrize(("name", "schedule"), [("plan.json", "pipedream_2bw"), ("found_plan.json", "auto_zero_bubble")])
def test_a_plan(name, schedule):
    assert jpipe.Plan.from_json((WRITTEN / name).read_text()).schedule == schedule


def test_a_profile():
    profile = Profile.from_json((WRITTEN / "profile.json").read_text())
    assert profile.ids == ("embed", "block_0", "head")
    assert profile.source == "measured"
