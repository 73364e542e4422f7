"""The mark of a run that has come to its end, as real runs write and remove it."""

import json

import pytest

from jpipe_train.checkpoint.run_folder import RunFolder
from jpipe_train.run import loop
from jpipe_train.runs.reading import read
from tests.train.conftest import changed
from tests.train.runs.folders import PLAN


def test_a_run_that_goes_on_loses_its_mark(tiny, tmp_path):
    config, mark = changed(tiny), tmp_path / "run" / "end.json"
    with RunFolder(config, PLAN) as folder:
        folder.mark_end(5, 5, None)
    assert json.loads(mark.read_text()) == {"format": "jpipe-end/1", "steps": 5, "length": 5, "stopped_early": None}
    with RunFolder(config, PLAN, resumes=True) as folder:
        assert mark.exists()
        folder.go_on("")
        assert not mark.exists()


@pytest.mark.slow
def test_a_run_of_epochs_is_complete_and_is_not_when_more_are_to_be_trained(tiny, tmp_path, no_report, monkeypatch):
    base = tiny | {"log": [], "train": {"epochs": 0.05, "batch_size": 4}}
    summary = loop.main(changed(base, checkpoint={"every": 100}))
    run = read(tmp_path / "run", whole=True)
    assert (run.state.name, run.steps, run.done) == ("complete", summary.steps, summary.steps)
    monkeypatch.setattr("jpipe_train.run.ending.complete", lambda summary, *_: summary)  # as if it were killed at its end
    loop.main(changed(base, checkpoint={"every": 100}, train={"epochs": 0.1}))
    assert read(tmp_path / "run", whole=True).end is None


@pytest.mark.slow
def test_a_run_that_stopped_early_says_why(tiny, tmp_path, no_report):
    stop = {"metric": "val_loss", "patience": 1, "min_delta": 100.0}
    summary = loop.main(changed(tiny | {"log": []}, train={"steps": 20, "stop": stop}))
    run = read(tmp_path / "run", whole=False)
    assert (run.state.name, run.steps, run.done) == ("stopped early", 20, summary.steps)
    assert run.state.why == summary.remarks["stopped early"]
