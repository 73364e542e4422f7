"""What version 0.1 wrote is still read: a checkpoint, a plan and a profile, kept in `tests/written_by_0_1/`."""

import json
import shutil
from pathlib import Path

import pytest

import jpipe
from jpipe_planner import Profile
from jpipe_train.cli import main
from tests.train.conftest import SENTENCE

WRITTEN = Path(__file__).parent / "written_by_0_1"


@pytest.mark.slow
def test_a_run_resumes_from_its_checkpoint(tmp_path, monkeypatch, capsys):
    shutil.copytree(WRITTEN / "run", tmp_path / "run")
    (tmp_path / "text.txt").write_bytes(SENTENCE * 100)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jpipe_train.run.loop.write_report", lambda *_: None)
    assert main(["train", "run/config.yaml", "--resume", "must", "--set", "train.steps=5"]) == 0, capsys.readouterr().err
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1]["val_loss"] < rows[0]["val_loss"]


def test_a_plan():
    plan = jpipe.Plan.from_json((WRITTEN / "plan.json").read_text())
    assert (plan.schedule, plan.layers) == ("pipedream_flush", ("embed", "block_0", "head"))
    assert len(plan.predicted.peak_bytes) == 2


def test_a_profile():
    profile = Profile.from_json((WRITTEN / "profile.json").read_text())
    assert profile.ids == ("embed", "block_0", "head")
